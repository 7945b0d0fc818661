"""scripts/check_cluster.py names the rank and the pair with a planted fault."""

import socket
from pathlib import Path

from titan_moe.runtime.ranks import run_on_ranks


def check_planted(folder: Path, faulty: bool) -> tuple[list[str], list[str]]:
    """Check three ranks; rank 1 multiplies wrongly, and ranks 1 and 2 add wrongly."""
    import torch
    import torch.distributed as dist

    from scripts.check_cluster import check

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = torch.mm(a, b)
        product[3, 5] += faulty and dist.get_rank() == 1
        return product

    def reduce(values: torch.Tensor, group: dist.ProcessGroup) -> None:
        dist.all_reduce(values, group=group)
        values[99] += faulty and set(dist.get_process_group_ranks(group)) == {1, 2}

    return check(folder, torch.device("cpu"), multiply=multiply, reduce=reduce)


def test_check_cluster_names_faulty_rank_and_pair(tmp_path: Path) -> None:
    (rates, problems), *others = run_on_ranks(check_planted, 3, tmp_path / "new", True)
    assert others == [(rates, problems)] * 2
    assert [line.partition(":")[0] for line in rates] == ["matmul", "disk", "all-reduce"]
    host = socket.gethostname()
    # A busy machine may make a rank slow, whatever was planted.
    assert [line for line in problems if line.endswith("elements are wrong")] == [
        f"rank 1 ({host}): matmul: 50 elements are wrong",
        f"rank 1 ({host}) and rank 2 ({host}): all-reduce: 20 elements are wrong",
    ]
    ((_, problems), *_) = run_on_ranks(check_planted, 3, tmp_path, False)
    assert not any("wrong" in line for line in problems)
