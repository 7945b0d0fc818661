"""Keys of experts and dispatchers that do nothing, or contradict each other, get one line."""

import pytest

from tests.support.config_checks import noted, problems
from titan_moe.config.checks.experts import check_trains_on_gpus
from titan_moe.config.parse import load_job

_EP, _P = "--parallelism.expert_parallel_degree 2", "--parallelism.expert_parallel"


@pytest.mark.parametrize(
    "arguments, line",
    [
        (
            f"{_EP} {_P}_capacity_factor 1.5 {_P}_comm_backend deduplicated",
            "parallelism.expert_parallel_capacity_factor=1.5 bounds the buffers of "
            "expert_parallel_comm_backend=standard and symmetric alone, not of deduplicated: "
            "choose one",
        ),
        (
            f"{_EP} {_P}_comm_backend deduplicated {_P}_ranks_per_node 3",
            "parallelism.expert_parallel_ranks_per_node=3 must divide the 2 ranks of this run: "
            "choose 1 or 2",
        ),
    ],
)
def test_one_line(arguments: str, line: str) -> None:
    assert problems(arguments, ranks=2) == [line]


@pytest.mark.parametrize(
    "arguments, line",
    [
        (
            f"{_P}_capacity_factor 1.5",
            "parallelism.expert_parallel_capacity_factor=1.5 has no effect without "
            "expert_parallel_degree above 1",
        ),
        (
            f"{_P}_overlap true",
            "parallelism.expert_parallel_overlap=true has no effect without "
            "expert_parallel_degree above 1",
        ),
        (
            f"{_EP} {_P}_overflow drop",
            "parallelism.expert_parallel_overflow=drop has no effect without "
            "expert_parallel_capacity_factor",
        ),
        (
            f"{_EP} {_P}_comm_backend standard {_P}_ranks_per_node 2",
            "parallelism.expert_parallel_ranks_per_node=2 has no effect without "
            "expert_parallel_comm_backend=deduplicated",
        ),
    ],
)
def test_a_key_without_effect_is_a_note(arguments: str, line: str) -> None:
    assert noted(arguments, ranks=2) == [line]


@pytest.mark.parametrize(
    "arguments",
    [
        f"{_EP} {_P}_capacity_factor 1.5 {_P}_overflow drop",
        f"{_EP} {_P}_comm_backend deduplicated {_P}_ranks_per_node 2",
        f"{_EP} {_P}_ranks_per_node 2",  # Which the automatic choice reads.
        f"{_P}_comm_backend deduplicated",  # As good as another where nothing travels.
    ],
)
def test_nothing_to_say(arguments: str) -> None:
    assert problems(arguments, ranks=2) == []


@pytest.mark.parametrize("backend", ["deduplicated", "symmetric"])
def test_a_model_without_experts(backend: str) -> None:
    (line,) = noted(f"{_P}_comm_backend {backend}", moe=False)
    assert line.startswith(f"parallelism.expert_parallel_comm_backend={backend} has no effect")
    assert line.endswith("has no experts")


_NAME = "parallelism.expert_parallel_comm_backend=symmetric"


@pytest.mark.parametrize(
    "arguments, ranks, lines",
    [
        ("degree 2", 2, []),
        ("degree 2 {p}_capacity_factor 1.5", 2, []),
        (
            "degree 3",
            3,
            [
                f"{_NAME}: torch's kernel wants a power of two of ranks, at most 64, and "
                "expert_parallel_degree is 3: choose one, or deduplicated",
                "parallelism.expert_parallel_degree=3 must divide num_experts=8: choose 1, 2, 4 or "
                "8",
            ],
        ),
        (
            "degree 2 {p}_capacity_factor 0.5",
            2,
            [
                f"{_NAME} never drops a row, and expert_parallel_capacity_factor=0.5 does not "
                "suffice for those of a balanced router: choose 1.25 or more"
            ],
        ),
        (
            "degree 2 {p}_capacity_factor 1.5 {p}_overflow drop",
            2,
            [f"{_NAME} never drops a row: leave expert_parallel_overflow=drop out"],
        ),
        (
            "degree 2 {p}_overlap true",
            2,
            [
                f"{_NAME} has one set of buffers, and parallelism.expert_parallel_overlap=true has "
                "two exchanges under way: choose one"
            ],
        ),
    ],
)
def test_symmetric_memory(arguments: str, ranks: int, lines: list[str]) -> None:
    given = f"{_P}_comm_backend symmetric {_P}_" + arguments.format(p=_P)
    assert problems(given, ranks=ranks, gpus=8) == lines


def test_symmetric_memory_trains_on_gpus_alone() -> None:
    assert not check_trains_on_gpus(load_job(f"{_P}_comm_backend symmetric".split()), 0)
    job = load_job(f"{_EP} {_P}_comm_backend symmetric".split())
    (line,) = check_trains_on_gpus(job, 0)
    assert line.startswith(f"{_NAME}: a CPU has no NVSHMEM: choose standard; ")
    assert not check_trains_on_gpus(job, 8)
    assert not check_trains_on_gpus(load_job([]), 0)


def test_a_dense_model_has_no_expert_settings() -> None:
    arguments = "--parallelism.expert_parallel_degree 2 --debug.moe_force_load_balance"
    lines = noted(arguments, ranks=2, moe=False)
    assert len(lines) == 2 and all(
        "deepseek_v3 debugmodel has no experts" in line for line in lines
    )
    assert problems("", moe=False) == []


def test_settings_of_experts_say_that_a_dense_model_has_none() -> None:
    arguments = "--moe.row_alignment 16 --moe.bias_update_speed 0.1"
    lines = noted(arguments, moe=False)
    assert lines == [
        f"moe.{setting} has no effect: deepseek_v3 debugmodel has no experts"
        for setting in ("row_alignment=16", "bias_update_speed=0.1")
    ]
    assert noted(arguments) == []
