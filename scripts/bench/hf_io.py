"""GB/s of Hugging Face import and export beside a plain copy of the same bytes.

    python -m scripts.bench.hf_io [--gigabytes 0.8] [--repeats 3] [--folder DIR] [--json FILE]

A folder of random bfloat16 weights (Qwen3's layout, experts one by one) is copied, imported and
exported in turn, each in a process of its own that ends with fsync; medians. GB are those of the
folder's weights whatever is written: float32 checkpoints are twice as long. The folder has just
been written, so that reading it is reading memory; the copy has the same advantage. Peak memory is
the process's resident set, beside that of a process that has only imported torch and the code.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts.bench.measure import REPO, options, print_table, write_json
from scripts.bench.resident import resident_mib

_PIECE = 2**24


@dataclass(frozen=True)
class Way:
    """One thing to measure, from `source` to `target` inside the working folder."""

    name: str
    source: str
    target: str
    dtype: str = "bfloat16"


WAYS = [
    Way("plain copy", "hf", "copy"),
    Way("import to bfloat16", "hf", "imported16"),
    Way("import to float32", "hf", "imported32", "float32"),
    Way("export of bfloat16", "imported16", "exported16"),
    Way("export of float32", "imported32", "exported32"),
    Way("import, live, float32", "hf", "live32", "float32"),
    Way("export, live, float32", "hf", "live16"),
]


def main() -> None:
    parser = options(__doc__, repeats=3, seeded=True)
    parser.add_argument("--gigabytes", type=float, default=0.8, help="default: %(default)s")
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        name, folder = arguments.child
        print(json.dumps(_measure(name, Path(folder))))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        num_bytes = make_weights(Path(place) / "hf", arguments.gigabytes, arguments.seed)
        base = _child("nothing", place)["peak"]
        found: dict[str, list[dict[str, float]]] = {way.name: [] for way in WAYS}
        for _ in range(arguments.repeats):
            for way in WAYS:
                shutil.rmtree(Path(place) / way.target, ignore_errors=True)
                found[way.name].append(_child(way.name, place))
    rows = table(found, num_bytes, base)
    print(f"{num_bytes / 1e9:.2f} GB of weights; peak memory above {base / 1e9:.2f} GB")
    heads = ["", "GB/s", "of the copy", "peak GB", "CPU s/GB", "from", "to"]
    keys = ["name", "gb_per_s", "of_copy", "peak_gb", "cpu_s_per_gb", "fewest", "most"]
    print_table(heads, [[row[key] for key in keys] for row in rows])
    write_json(arguments.json, {"num_bytes": num_bytes, "rows": rows})


def table(found: dict[str, list[dict[str, float]]], num_bytes: int, base: float) -> list[dict]:
    """One row per way: the median speed, its share of the copy's, the worst peak above `base`."""
    rows: list[dict] = []
    for name, runs in found.items():
        speeds = [num_bytes / 1e9 / run["seconds"] for run in runs]
        row: dict = {"name": name, "gb_per_s": statistics.median(speeds)}
        row |= {"fewest": min(speeds), "most": max(speeds)}
        row["cpu_s_per_gb"] = statistics.median(run["cpu"] for run in runs) / num_bytes * 1e9
        row["peak_gb"] = max(0.0, max(run["peak"] for run in runs) - base) / 1e9
        row["of_copy"] = row["gb_per_s"] / (rows[0]["gb_per_s"] if rows else row["gb_per_s"])
        rows.append(row)
    return rows


def make_weights(folder: Path, gigabytes: float, seed: int) -> int:
    """Write a folder of about that size; returns its tensors' bytes."""
    import torch
    import torch.distributed as dist

    from titan_moe.checkpoint.hf.assets import write_assets
    from titan_moe.checkpoint.hf.names import model_shapes
    from titan_moe.checkpoint.hf.pieces import whole
    from titan_moe.checkpoint.hf.write_folder import export

    torch.manual_seed(seed)
    model = bench_model(gigabytes)
    shapes = model_shapes(model.config)

    class Random:
        """Random bits in the exponent's middle, one tensor at a time."""

        def boxes(self):  # type: ignore[no-untyped-def]
            return {name: [whole(shape)] for name, shape in shapes.items()}

        def read(self, name, box):  # type: ignore[no-untyped-def]
            scale = 0.0 if name.endswith("expert_bias") else 0.02
            yield box, torch.randn(shapes[name]).mul_(scale)

        def verify(self) -> None:
            """Nothing to check."""

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    num_bytes = export(
        model,
        shapes,
        Random(),
        folder,
        dtype=torch.bfloat16,
        write_assets=lambda aside: write_assets(model, [], torch.bfloat16, aside),
    )
    dist.destroy_process_group()
    return num_bytes


def bench_model(gigabytes: float):  # type: ignore[no-untyped-def]
    """Qwen3's 30B-A3B in the small: as many layers as the size wants."""
    from dataclasses import replace

    from titan_moe.models.hf import HFModel
    from titan_moe.models.registry import model_config

    config = model_config("qwen3", "30B-A3B")
    assert config.moe is not None
    moe = replace(config.moe, num_experts=16, global_aux_loss_weight=0.0)
    config = replace(config, moe=moe, vocab_size=16_384)
    embeddings, layer = 2 * 16_384 * 2048 * 2, 2 * (16 * 3 * 2048 * 768 + 2048 * 128 * 72)
    layers = max(1, round((gigabytes * 1e9 - embeddings) / layer))
    return HFModel("qwen3", replace(config, num_layers=layers))


def _child(name: str, place: str) -> dict[str, float]:
    """Measure in a process of its own."""
    command = [sys.executable, "-m", "scripts.bench.hf_io", "--child", name, place]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _measure(name: str, place: Path) -> dict[str, float]:
    import torch.distributed as dist

    from titan_moe.checkpoint.hf import transfer  # noqa: F401  Before the clock starts.

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    way = next((way for way in WAYS if way.name == name), None)
    action: Callable[[], object] = (lambda: None) if way is None else _action(way, place)
    started, busy = time.perf_counter(), time.process_time()
    action()
    seconds = time.perf_counter() - started
    dist.destroy_process_group()
    # Not getrusage's: that one begins with what the parent had.
    peak = resident_mib(os.getpid())["VmHWM"] * 2**20
    return {"seconds": seconds, "peak": peak, "cpu": time.process_time() - busy}


def _action(way: Way, place: Path) -> Callable[[], object]:
    import torch

    from titan_moe.checkpoint.hf.transfer import export_checkpoint, import_folder

    source, target = place / way.source, place / way.target
    dtype = getattr(torch, way.dtype)
    if way.name == "plain copy":
        return lambda: copy(source, target)
    if "live" in way.name:
        return _live(way.name, source, target)
    if way.name.startswith("import"):
        return lambda: import_folder(source, target, dtype)
    return lambda: export_checkpoint(source, target, torch.bfloat16)


def _live(name: str, source: Path, target: Path) -> Callable[[], object]:
    """A model on one rank, in float32; its own memory counts in the peak."""
    import torch

    from titan_moe.checkpoint.hf.transfer import load_hf, save_hf
    from titan_moe.models.decoder import Decoder
    from titan_moe.models.hf import model_of

    model = model_of(source)
    with torch.device("meta"):
        plain = Decoder(model.config)
    tensors = plain.to_empty(device="cpu").state_dict()
    for tensor in tensors.values():
        tensor.zero_()  # The first touch of memory is not the reading's.
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if name.startswith("import"):
        return lambda: load_hf(source, model, tensors, shapes)
    options = {"dtype": torch.bfloat16, "job_record": {}}
    return lambda: save_hf(target, model, tensors, shapes, **options)  # type: ignore[arg-type]


def copy(source: Path, target: Path) -> None:
    """Read, write and fsync every file."""
    target.mkdir()
    buffer = memoryview(bytearray(_PIECE))
    for path in source.iterdir():
        at = target / path.name
        with path.open("rb", buffering=0) as reading, at.open("wb", buffering=0) as writing:
            while got := reading.readinto(buffer):
                writing.write(buffer[:got])
            os.fsync(writing.fileno())


if __name__ == "__main__":
    main()
