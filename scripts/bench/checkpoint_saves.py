"""How long a step waits for its checkpoint, in the step and in the background.

    python -m scripts.bench.checkpoint_saves [--gigabytes 1] [--repeats 5] [--cuda] [--folder DIR]

One process with parameters and AdamW's state of that size in float32, on the CPU or a GPU, saves
them again and again; medians, without the first save of each mode, which is a row of its own: it
touches the buffers for the first time. A plain copy writes the same number of bytes to the same
disk and waits for it (fsync). Memory is what is resident when the saves are done, above that before
them, of the process and of the one that writes; they share the buffers, which count once.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from scripts.bench.measure import options, print_table, write_json
from titan_moe.testing.checkpoints import plain_checkpointer

_DIM = 2048


def main() -> None:
    parser = options(__doc__, repeats=5, seeded=True)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="default: %(default)s")
    parser.add_argument("--cuda", action="store_true", help="the state is on a GPU")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model, optimizer = _state(arguments.gigabytes, "cuda" if arguments.cuda else "cpu")
    num_bytes = 3 * sum(parameter.nbytes for parameter in model.parameters())
    modes = ["disabled", "async", *["async_with_pinned_mem"] * arguments.cuda]
    rows = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        copies = [_copy(Path(place), num_bytes) for _ in range(arguments.repeats)]
        rows.append(_row("plain copy", copies, copies, num_bytes, 0.0))
        for mode in modes:
            rows += _saves(model, optimizer, Path(place) / mode, mode, arguments, num_bytes)
    print(f"{num_bytes / 1e9:.2f} GB, {arguments.repeats} saves of each")
    waits = next(row["waited"] for row in rows if row["name"] == "disabled")
    for row in rows:
        row["of_waiting"] = row["waited"] / waits
    heads = ["", "waited s", "fewest", "most", "of disabled", "until on disk s", "GB/s", "more GB"]
    keys = ["name", "waited", "fewest", "most", "of_waiting", "seconds", "gb_per_s", "memory"]
    print_table(heads, [[row[key] for key in keys] for row in rows])
    write_json(arguments.json, {"num_bytes": num_bytes, "rows": rows})
    dist.destroy_process_group()


def _state(gigabytes: float, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    number = max(1, round(gigabytes * 1e9 / (3 * 4 * _DIM**2)))
    model = nn.ParameterList(torch.randn(_DIM, _DIM, device=device) for _ in range(number))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _saves(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: Path,
    mode: str,
    arguments: argparse.Namespace,
    num_bytes: int,
) -> list[dict]:
    checkpointer = plain_checkpointer(
        folder, model, optimizer, interval=2, async_mode=mode, keep_latest_k=1
    )
    before = _resident("self")
    checkpointer.maybe_save(1, {})  # No save yet; the process that writes starts.
    time.sleep(2.0 * (mode != "disabled"))
    waited, seconds = [], []
    for step in range(2, 2 * arguments.repeats + 4, 2):
        if arguments.cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        checkpointer.maybe_save(step, {"step": step})
        waited.append(time.perf_counter() - started)
        while checkpointer.last_step != step:
            time.sleep(0.01)
            checkpointer.maybe_save(step + 1, {})
        seconds.append(time.perf_counter() - started)
    memory = _resident("self") - before
    if checkpointer._background is not None:
        writer = checkpointer._background._child.pid
        memory += _resident(str(writer)) - _resident(str(writer), "RssShmem")
        checkpointer.finish()
    first = _row(f"{mode}, the first", waited[:1], seconds[:1], num_bytes, memory)
    return [first, _row(mode, waited[1:], seconds[1:], num_bytes, memory)]


def _row(name: str, waited: list[float], seconds: list[float], num_bytes: int, memory: float):  # type: ignore[no-untyped-def]
    return {
        "name": name,
        "waited": statistics.median(waited),
        "fewest": min(waited),
        "most": max(waited),
        "seconds": statistics.median(seconds),
        "gb_per_s": num_bytes / 1e9 / statistics.median(seconds),
        "memory": memory / 1e9,
    }


def _resident(process: str, field: str = "VmRSS") -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def _copy(folder: Path, num_bytes: int) -> float:
    """Seconds to write so many bytes of memory."""
    piece = os.urandom(2**20) * 16
    started = time.perf_counter()
    with (folder / "copy").open("wb", buffering=0) as file:
        for _ in range(-(-num_bytes // len(piece))):
            file.write(piece)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    (folder / "copy").unlink()
    return seconds


if __name__ == "__main__":
    main()
