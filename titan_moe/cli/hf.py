"""hf import, hf export and hf merge: from Hugging Face folders to checkpoints and back."""

import argparse
import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib.util import find_spec

from titan_moe.cli.command import Answer, Command, add_out, path_of
from titan_moe.config.errors import ConfigError
from titan_moe.runtime.launch import Launch

_TIMEOUT = timedelta(hours=1)  # Ranks wait for the one with the slowest disk.


def _import_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="HF_FOLDER", type=path_of)
    add_out(parser, default=None, says="the checkpoint to write; it must not exist", required=True)
    says = "as the training.dtype that is to load it; float32 (the default) holds bfloat16 "
    says += "and float16 exactly"
    dtypes = ["float32", "bfloat16", "float64"]
    parser.add_argument("--dtype", choices=dtypes, default="float32", help=says)


def import_(options: argparse.Namespace) -> Answer:
    """Make a checkpoint of a Hugging Face folder, for checkpoint.initial_load_path.

        titan-moe hf import HF_FOLDER --out OUT --dtype float32
        torchrun --nproc-per-node 4 -m titan_moe hf import HF_FOLDER --out OUT

    Safetensors only; float8, MXFP4 and int4 are de-quantised. Tensors are streamed: memory stays
    within some chunks of 256 MB whatever the model. OUT/hf keeps config.json and the tokenizer's
    files. Training reads Hugging Face folders directly too (checkpoint.initial_load_in_hf); a
    checkpoint has checksums, and starts faster where weights were quantised.

    Exit codes: 0; 1 the folder cannot be read or written; 2 a folder that is not supported.
    """
    from titan_moe.checkpoint.hf.read import import_folder

    return converted(import_folder, options)


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="CHECKPOINT", type=path_of, help="a step-N folder")
    add_out(parser, default=None, says="the folder to write; it must not exist", required=True)
    dtypes = ["float32", "bfloat16", "float16"]
    says = "default: as the config.json that training started from says, else bfloat16"
    parser.add_argument("--dtype", choices=dtypes, help=says)
    says = "compare logits with those of transformers, which is to be installed: two float32 models"
    parser.add_argument("--logits", action="store_true", help=says)


def export(options: argparse.Namespace) -> Answer:
    """Write a checkpoint's model as a Hugging Face folder, for transformers and inference servers.

        titan-moe hf export outputs/checkpoint/step-1000 --out HF_FOLDER
        torchrun --nproc-per-node 4 -m titan_moe hf export CHECKPOINT --out HF_FOLDER --logits

    config.json, the tokenizer's files, the type and the split into files are those of the weights
    that training started from, if there are any. The folder is read back, and every value, expert,
    name and key compared with the checkpoint and these. HF_FOLDER must not exist; it appears when
    all of it is on disk and right. Of adapters (lora) it is a PEFT folder.

    Exit codes: 0; 1 the checkpoint cannot be read, the folder not be written, or logits differ; 2 a
    wrong argument, or --logits without transformers.
    """
    from titan_moe.checkpoint.hf.write import export_checkpoint

    return _compared(export_checkpoint, options)


def _compared(convert: Callable[..., str], options: argparse.Namespace) -> Answer:
    """Runs a conversion; with --logits, compares its model with that of transformers."""
    if options.logits and find_spec("transformers") is None:
        raise ConfigError("--logits compares with transformers: pip install -e '.[dev]'")
    answer = converted(convert, options)
    if not options.logits or Launch.from_environment(os.environ).rank:
        return answer
    if (options.out / "adapter_config.json").exists():
        return Answer(answer.data, [*answer.lines, "logits: not compared, of adapters alone"])
    from titan_moe.verify.parity.check import EXPORT_BOUND, logits_difference

    difference = logits_difference(options.out)
    line = f"logits: at most {difference:.1e} from those of transformers (bound {EXPORT_BOUND})"
    lines, failed = [*answer.lines, line], not difference <= EXPORT_BOUND
    return Answer({**answer.data, "logits": difference}, lines, exit_code=int(failed))


def _merge_arguments(parser: argparse.ArgumentParser) -> None:
    _export_arguments(parser)
    says = "a Hugging Face folder or a step-N folder; default: what the adapters' run began with"
    parser.add_argument("--base", type=path_of, help=says)


def merge(options: argparse.Namespace) -> Answer:
    """Write the model of a checkpoint of adapters (lora) as a Hugging Face folder.

        titan-moe hf merge outputs/checkpoint/step-1000 --out HF_FOLDER --dtype bfloat16
        titan-moe hf merge CHECKPOINT --base ./Qwen3-30B-A3B --out HF_FOLDER

    Each adapter's product is added to its weight in float64, and the sum rounded once. Weights are
    streamed, also over torchrun's processes, as hf export does.

    Exit codes: 0; 1 something cannot be read, or the folder not be written; 2 a wrong argument.
    """
    from titan_moe.checkpoint.hf.merge import merge

    return _compared(partial(merge, base=options.base), options)


def converted(convert: Callable[..., str], options: argparse.Namespace) -> Answer:
    """Runs a conversion over torchrun's processes, or this one."""
    import torch
    import torch.distributed as dist

    from titan_moe.runtime.log import start_logging

    launch = Launch.from_environment(os.environ)
    start_logging(launch.rank, {0})
    # Passes over memory gain little by torch's threads, whose waits for one another take longer
    # than the work where the cores are shared.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.HashStore() if launch.world_size == 1 else None,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=_TIMEOUT,
    )
    try:
        dtype = options.dtype and getattr(torch, options.dtype)
        line = convert(options.source, options.out, dtype)
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)
    return Answer({"folder": str(options.out), "summary": line}, [line])


COMMANDS = {
    "import": Command(import_, _import_arguments, ends_at_once=True),
    "export": Command(export, _export_arguments, ends_at_once=True),
    "merge": Command(merge, _merge_arguments, ends_at_once=True),
}
