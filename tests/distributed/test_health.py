"""titan-moe check --health: a rank or a pair that is slow, wrong or hangs is named."""

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import start_command
from tests.support.health import problems
from titan_moe.runtime.process_pool import TIMEOUT_S

_HOST = f"host {socket.gethostname()}"


def test_a_slow_rank_a_flipped_bit_and_a_wrong_pair_are_named_together(tmp_path: Path) -> None:
    slow, flipped, pair = problems(tmp_path, "slow matmul", "flipped memory", "wrong pair")
    assert slow.startswith(f"rank 1 ({_HOST}): matmul at ") and slow.endswith(" % of the others")
    assert flipped == (
        f"rank 2 ({_HOST}): memory: 2 of 8,388,608 words were read back with other bits; "
        "the first: word 77, bits 0x10000000000"
    )
    assert pair == (
        f"rank 1 ({_HOST}) and rank 2 ({_HOST}): all-reduce: 20 of 20,971,520 sums are wrong"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "ranks_per_node", "says"),
    [
        ("wrong matmul", 3, [f"rank 1 ({_HOST}): matmul: "]),
        ("failing matmul", 3, [f"rank 1 ({_HOST}): matmul: failed: CUDA error: uncorrectable ECC"]),
        ("slow pair", 3, [f"rank 1 ({_HOST}) and rank 2 ({_HOST}): all-reduce at "]),
        ("slow pair", 1, [f"node 1 ({_HOST}) and node 2 ({_HOST}): all-reduce at "]),
        ("wrong pair", 1, [f"node 1 ({_HOST}) and node 2 ({_HOST}): all-reduce: 20 of "]),
        (
            "wrong link",
            3,
            [
                f"rank 1 ({_HOST}): all-reduce with each other rank: 20 of ",
                f"node 0 ({_HOST}): all-reduce of its ranks: 20 of ",
            ],
        ),
        (
            "hung pair",
            1,
            [f"node 1 ({_HOST}) and node 2 ({_HOST}): all-reduce had not ended after"],
        ),
    ],
)
def test_what_is_bad_is_named(
    tmp_path: Path, plant: str, ranks_per_node: int, says: list[str]
) -> None:
    timeout_s = 15 if plant == "hung pair" else 60
    lines = problems(tmp_path, plant, ranks_per_node=ranks_per_node, timeout_s=timeout_s)
    # On a busy machine others may be slow too.
    lines = [x for x in lines if x.startswith(says[0]) or not x.endswith(" % of the others")]
    assert [line[: len(start)] for line, start in zip(lines, says, strict=True)] == says


def test_the_command_prints_a_table_and_nothing_is_wrong(tmp_path: Path) -> None:
    done = check(tmp_path, "--slow", "0.01")
    *_, matmul, memory, _, _, links, last = done.splitlines()
    assert last == "nothing is wrong: 2 rank(s) on 1 host(s)"
    assert memory.split()[:3] == ["1", socket.gethostname(), "CPU"], done
    assert links.startswith("pairs of ranks") and "GFLOP/s" in matmul


def check(folder: Path, *words: str, code: int = 0) -> str:
    """What the command on two ranks prints."""
    process = start_command(
        *("check", "--health", "--ranks", 2, "--memory-gib", 0.03),
        *("--job.dump_folder", folder, *words),
    )
    said, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == code, said
    return said


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root mounts")
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.slow
def test_a_full_disk_is_named_once_for_all_ranks(small_disk: Path) -> None:
    said = check(small_disk, "--slow", "0.01", code=1)
    assert said.splitlines()[-1] == (
        f"error: ranks 0-1 ({_HOST}): disk: cannot write and read in {small_disk}: No space left "
        "on device"
    )


@pytest.mark.slow
def test_a_disk_that_cannot_be_written_is_named(small_disk: Path) -> None:
    (saves := small_disk / "checkpoint").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(saves)], check=True)
    try:
        said = check(small_disk, "--slow", "0.01", code=1)
    finally:
        subprocess.run(["umount", str(saves)], check=True)
    assert f"disk: cannot write and read in {saves}: Read-only file system" in said


@pytest.mark.slow
def test_two_nodes_are_checked_from_both(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        endpoint = f"localhost:{probe.getsockname()[1]}"
    words = ["check", "--health", "--ranks", 2, "--nodes", 2, "--endpoint", endpoint, "--json"]
    words += ["--job.dump_folder", tmp_path, "--slow", 0.01, "--memory-gib", 0.03]
    nodes = [start_command(*words, "--node-rank", node) for node in range(2)]
    said = [node.communicate(timeout=TIMEOUT_S)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    (told,) = [words for words in said if "{\n" in words]  # torchrun may begin with either.
    found = json.loads(told[told.index("{\n") : told.rindex("}\n") + 2])
    assert found["problems"] == [] and list(found["rates"]["pairs of nodes"]["all-reduce"]) == [
        "0 1"
    ]
