"""Make a checkpoint of a Hugging Face folder, for checkpoint.initial_load_path.

    python scripts/hf_import.py HF_FOLDER OUT [--dtype float32]
    torchrun --nproc-per-node 4 scripts/hf_import.py HF_FOLDER OUT       faster, with fast disks

Safetensors only; float8 and MXFP4 are de-quantised. The tensors are streamed: memory stays within
some chunks of 256 MB whatever the model. OUT/hf keeps config.json and the tokenizer's files.
Training reads Hugging Face folders directly too (checkpoint.initial_load_in_hf); a checkpoint has
checksums, and starts faster where weights were quantised.
"""

import argparse
import sys
from pathlib import Path

from titan_moe.runtime.launch import end_on_signals


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="HF_FOLDER", type=Path)
    parser.add_argument("out", metavar="OUT", type=Path)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float64"),
        default="float32",
        help="as the training.dtype that is to load it; float32 (the default) holds bfloat16 "
        "and float16 exactly",
    )
    options = parser.parse_args(argv)

    import torch

    from titan_moe.checkpoint.hf.command import run
    from titan_moe.checkpoint.hf.transfer import import_folder

    dtype = getattr(torch, options.dtype)
    return run(lambda: import_folder(options.folder, options.out, dtype))


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main(sys.argv[1:]))
