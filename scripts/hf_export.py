"""Write a checkpoint's model as a Hugging Face folder, for transformers and inference servers.

    python scripts/hf_export.py outputs/checkpoint/step-1000 HF_FOLDER [--dtype bfloat16]
    torchrun --nproc-per-node 4 scripts/hf_export.py CHECKPOINT HF_FOLDER

config.json and the tokenizer's files come along, from the weights that training started from or
from model.hf_assets_path or model.tokenizer_path. The stored chunks are read one at a time and
their checksums compared. HF_FOLDER must not exist; it appears when all of it is on disk.
"""

import argparse
import sys
from pathlib import Path

from titan_moe.runtime.launch import end_on_signals


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="a step-N folder")
    parser.add_argument("folder", metavar="HF_FOLDER", type=Path)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="default: that of the weights that were imported, else bfloat16",
    )
    options = parser.parse_args(argv)

    import torch

    from titan_moe.checkpoint.hf.command import run
    from titan_moe.checkpoint.hf.transfer import export_checkpoint

    dtype = getattr(torch, options.dtype) if options.dtype else None
    return run(lambda: export_checkpoint(options.checkpoint, options.folder, dtype))


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main(sys.argv[1:]))
