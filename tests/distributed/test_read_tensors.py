"""Loading: each part of a checkpoint is read from disk by one rank, whatever the layout."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.planting import Bug, plant
from titan_moe.checkpoint.read_tensors import read_tensors
from titan_moe.checkpoint.safe_reader import SafeReader
from titan_moe.checkpoint.tensor_files import write_tensors
from titan_moe.distributed.dtensor import local_part
from titan_moe.runtime.ranks import RankError, run_on_ranks

_VALUES = {
    "matrix": torch.arange(80, dtype=torch.float32).view(10, 8),
    "norm": torch.arange(8).to(torch.bfloat16),
    "step": torch.tensor(5.0),
    "load": torch.arange(6, dtype=torch.int64),
}
_BYTES = sum(each.nbytes for each in _VALUES.values())


def held(layout: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """As four ranks hold them."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    line = init_device_mesh("cpu", (4,))
    replicas = [Replicate(), Replicate()]
    if layout == "hsdp":
        cuts = {"matrix": [Replicate(), Shard(0)], "norm": [Replicate(), Shard(0)]}
    elif layout == "tp":
        cuts = {"matrix": [Shard(0), Shard(1)], "norm": replicas}
    elif layout == "fsdp":
        return values | {
            name: distribute_tensor(values[name], line, [Shard(0)]) for name in ("matrix", "norm")
        }
    else:  # Every rank another stage of a pipeline.
        return {name: values[name] for name in [sorted(values)[dist.get_rank()]]}
    return values | {name: distribute_tensor(values[name], grid, cuts[name]) for name in cuts}


def save_and_load(
    folder: Path, before: str, after: str, max_bytes: int, bug: Bug | None
) -> tuple[int, int, list[str]]:
    """Bytes that this rank says it has read, those it has read, and what it has not right."""
    if bug is not None:
        plant(bug)
    write_tensors(held(before, _VALUES), folder, doing="saving")
    dist.barrier()
    read = 0

    class Counting(SafeReader):
        def read_chunk(self, name: str, box: tuple[slice, ...]) -> Tensor:
            nonlocal read
            values = super().read_chunk(name, box)
            read += values.nbytes
            return values

    tensors = held(after, {name: torch.zeros_like(each) for name, each in _VALUES.items()})
    says = read_tensors(tensors, Counting(folder), doing="loading", max_bytes=max_bytes)
    expected = held(after, _VALUES)
    wrong = [
        name
        for name, each in tensors.items()
        if not torch.equal(local_part(each), local_part(expected[name]))
    ]
    return says, read, wrong


@pytest.mark.parametrize("max_bytes", [1, 2**20])
@pytest.mark.parametrize("before, after", [("hsdp", "hsdp"), ("fsdp", "tp"), ("tp", "stages")])
def test_every_byte_is_read_once(tmp_path: Path, before: str, after: str, max_bytes: int) -> None:
    ranks = run_on_ranks(save_and_load, 4, tmp_path, before, after, max_bytes, None)
    assert [wrong for _, _, wrong in ranks] == [[]] * 4
    assert [says for says, _, _ in ranks] == [read for _, read, _ in ranks]
    assert sum(read for _, read, _ in ranks) == _BYTES
    if after != "stages":  # A quarter each, but for the tensors that cannot be shared out.
        matrix = _VALUES["matrix"].nbytes
        assert max(read for _, read, _ in ranks) <= matrix / 2 + _BYTES - matrix


def test_a_part_read_by_all_its_replicas_is_caught(tmp_path: Path) -> None:
    bug = Bug(
        "titan_moe.checkpoint.read_tensors:_choose_readers",
        "readers.append((best, part))",
        "readers.extend((rank, part) for rank in able)",
        caught_on="",
        named=(),
        spared=(),
    )
    ranks = run_on_ranks(save_and_load, 4, tmp_path, "hsdp", "hsdp", 2**20, bug)
    assert sum(read for _, read, _ in ranks) > _BYTES


def load_less(folder: Path) -> None:
    write_tensors(_VALUES, folder, doing="saving")
    dist.barrier()
    longer = {"norm": torch.zeros(9, dtype=torch.bfloat16)}
    read_tensors(longer, SafeReader(folder), doing="loading")


def test_files_that_hold_something_else_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"is damaged: its files hold 8 of the 9 elements of norm"):
        run_on_ranks(load_less, 2, tmp_path)


def load_damaged(folder: Path) -> None:
    write_tensors(held("hsdp", _VALUES), folder, doing="saving")
    dist.barrier()
    reader = SafeReader(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        for path in folder.glob("__3_*.distcp"):
            path.write_bytes(bytes(path.stat().st_size))
    dist.barrier()
    read_tensors(held("hsdp", _VALUES), reader, doing="loading")


def test_one_rank_that_reads_damage_stops_all(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"__3_0.distcp is damaged"):
        run_on_ranks(load_damaged, 4, tmp_path)
