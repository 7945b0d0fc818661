"""Make a checkpoint of a Hugging Face folder, for checkpoint.initial_load_path.

    titan-moe hf import HF_FOLDER --out OUT --dtype float32
    torchrun --nproc-per-node 4 -m titan_moe hf import HF_FOLDER --out OUT    faster on fast disks

Safetensors only; float8 and MXFP4 are de-quantised. The tensors are streamed: memory stays within
some chunks of 256 MB whatever the model. OUT/hf keeps config.json and the tokenizer's files.
Training reads Hugging Face folders directly too (checkpoint.initial_load_in_hf); a checkpoint has
checksums, and starts faster where weights were quantised.

Exit codes: 0; 1 the folder cannot be read or written; 2 a folder that is not supported.
"""

import argparse
from pathlib import Path

from titan_moe.cli.command import Answer, Command, add_out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="HF_FOLDER", type=Path)
    add_out(parser, default=None, says="the checkpoint to write; it must not exist", required=True)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float64"),
        default="float32",
        help="as the training.dtype that is to load it; float32 (the default) holds bfloat16 "
        "and float16 exactly",
    )


def run(options: argparse.Namespace) -> Answer:
    import torch

    from titan_moe.checkpoint.hf.transfer import import_folder
    from titan_moe.cli.hf_processes import in_processes

    dtype = getattr(torch, options.dtype)
    line = in_processes(lambda: import_folder(options.folder, options.out, dtype))
    return Answer({"folder": str(options.out), "summary": line}, [line])


COMMAND = Command(run, add_arguments, ends_at_once=True)
