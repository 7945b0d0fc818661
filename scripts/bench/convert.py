"""hf import and hf export beside what they cannot do without, and beside transformers.

    python -m scripts.bench.convert OUT                     # 0.69 billion parameters, 10 GB
    python -m scripts.bench.convert OUT --before CHECKOUT   # and another checkout's, in turn
    python -m scripts.bench.convert OUT --layers 1 --repeats 1

Makes a random Qwen3-MoE in bfloat16, in files of 120 MB. Each reading is of processes of its own,
after their imports: seconds, seconds of CPU of all ranks, and the most anonymous memory of a rank
beyond that at the start, in units of the largest file. All have one torch thread. "read, dcp.save"
reads the folder with safetensors and saves it in float32, cast off the clock. On a machine that
others use, compare seconds of CPU.
"""

import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch

from scripts.bench import measure

_READING = "reading "
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

Reading = list[float]
"""Seconds, seconds of CPU, bytes."""


@contextmanager
def _clock(reading: Reading) -> Iterator[None]:
    """Adds what happens inside to a reading."""
    done, begun, used, held = Event(), time.perf_counter(), time.process_time(), _anonymous()

    def watch() -> None:
        while not done.wait(0.02):
            reading[2] = max(reading[2], _anonymous() - held)
        reading[1] -= time.thread_time()  # Its own looks do not count.

    thread = Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    reading[0] += time.perf_counter() - begun
    reading[1] += time.process_time() - used


def _anonymous() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def _read_and_save(source: Path, target: Path, reading: Reading) -> None:
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    state: dict[str, Any] = {}
    for file in sorted(source.glob("*.safetensors")):
        with _clock(reading):
            # The library maps the file: the copies read it.
            tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
        state |= {name: tensor.float() for name, tensor in tensors.items()}
    with _clock(reading):
        dcp.save(state, checkpoint_id=target)


def _transformers(source: Path, target: Path, reading: Reading) -> None:
    from transformers import Qwen3MoeForCausalLM

    with _clock(reading):
        model = Qwen3MoeForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        model.save_pretrained(target, max_shard_size="120MB")


def _convert(command: str, source: Path, target: Path, reading: Reading) -> None:
    from titan_moe.checkpoint.hf import write  # noqa: F401
    from titan_moe.cli.main import main

    with _clock(reading):
        assert not main(["hf", command, str(source), "--out", str(target)])


def _make(folder: Path, layers: int) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: Any = {"hidden_size": 1024, "moe_intermediate_size": 768, "vocab_size": 32000}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
    sizes |= {"num_hidden_layers": layers, "num_experts": 32, "eos_token_id": 2}
    torch.set_default_dtype(torch.bfloat16)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).save_pretrained(folder, max_shard_size="120MB")


_OURS = ("import", "export")
_PEERS = {"read, dcp.save": _read_and_save, "transformers": _transformers}


def _run(name: str, out: Path, ranks: int, root: Path) -> Reading:
    source = out / ("imported" if name == "export" else "hf")
    target = out / {"import": "imported", "export": "exported"}.get(name, "other")
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    found: list[Reading] = []

    def keep(line: str, *_: object) -> None:
        found.extend(json.loads(text) for text in line.split(_READING)[1:])

    start = measure.torchrun(ranks) if ranks > 1 else [sys.executable]
    command = [*start, __file__, name, str(source), str(target)]
    measure.run_job(command, {"PYTHONPATH": str(root), **_ENVIRONMENT}, keep)
    seconds, used, held = zip(*found, strict=True)
    return [max(seconds), sum(used), max(held)]


def main() -> None:
    """Runs the benchmark, or one action of it in this process."""
    if sys.argv[1] in (*_OURS, *_PEERS):
        action = _PEERS.get(sys.argv[1], partial(_convert, sys.argv[1]))
        action(Path(sys.argv[2]), Path(sys.argv[3]), reading := [0.0, 0.0, 0.0])
        print(_READING + json.dumps(reading), flush=True)
        return
    parser = measure.options(__doc__, repeats=3)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT")
    parser.add_argument("--layers", type=int, default=8)
    arguments = parser.parse_args()
    folder = arguments.out.absolute() / "hf"
    if not folder.exists():
        _make(folder, arguments.layers)
    largest = max(file.stat().st_size for file in folder.glob("*.safetensors"))
    kinds = {name: (name, folder.parent, 1, measure.REPO) for name in (*_PEERS, *_OURS)}
    kinds |= {f"{name}, 2 ranks": (name, folder.parent, 2, measure.REPO) for name in _OURS}
    if arguments.before:
        before = arguments.before.absolute()
        kinds |= {f"{name}, before": (name, folder.parent, 1, before) for name in _OURS}
    turns = [{name: _run(*kind) for name, kind in kinds.items()} for _ in range(arguments.repeats)]
    rows: list[list[Any]] = []
    for name in kinds:
        readings = zip(*(turn[name] for turn in turns), strict=True)
        seconds, used, held = map(statistics.median, readings)
        rows.append([name, seconds, used, held / largest])
    heads = ("action", "seconds", "CPU seconds", "memory, files")
    measure.print_table(heads, rows, f"medians of {arguments.repeats}")
    measure.write_json(arguments.json, {"columns": heads, "rows": rows})


if __name__ == "__main__":
    main()
