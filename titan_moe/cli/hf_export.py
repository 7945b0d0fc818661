"""Write a checkpoint's model as a Hugging Face folder, for transformers and inference servers.

    titan-moe hf export outputs/checkpoint/step-1000 --out HF_FOLDER --dtype bfloat16
    torchrun --nproc-per-node 4 -m titan_moe hf export CHECKPOINT --out HF_FOLDER

config.json and the tokenizer's files come along, from the weights that training started from or
from model.hf_assets_path or model.tokenizer_path. The stored chunks are read one at a time and
their checksums compared. HF_FOLDER must not exist; it appears when all of it is on disk.

Exit codes: 0; 1 the checkpoint cannot be read, or the folder not be written; 2 a wrong argument.
"""

import argparse
from pathlib import Path

from titan_moe.cli.command import Answer, Command, add_out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="a step-N folder")
    add_out(parser, default=None, says="the folder to write; it must not exist", required=True)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="default: that of the weights that were imported, else bfloat16",
    )


def run(options: argparse.Namespace) -> Answer:
    import torch

    from titan_moe.checkpoint.hf.transfer import export_checkpoint
    from titan_moe.cli.hf_processes import in_processes

    dtype = getattr(torch, options.dtype) if options.dtype else None
    line = in_processes(lambda: export_checkpoint(options.checkpoint, options.out, dtype))
    return Answer({"folder": str(options.out), "summary": line}, [line])


COMMAND = Command(run, add_arguments, ends_at_once=True)
