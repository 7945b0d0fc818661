"""Compiled layers train the same model, and nothing is compiled again as routing varies."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.gates import SAMPLE
from tests.support.paths import DEBUG_CONFIGS
from tests.support.tiers import tiered
from tests.support.tiny import global_batch, make_job, tiny
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import load_job
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.verify.gradients.gate import Gate
from titan_moe.verify.layouts.layouts import SPLIT_BACKWARD, Layout, parse, with_options

STEPS = 6


@pytest.fixture(scope="module")
def compiled_gates(tmp_path_factory) -> Callable[[str], Gate]:
    """The gate, in float64, with every layer and the loss compiled by a backend."""
    torch.set_num_threads(1)
    folder = Path(tmp_path_factory.mktemp("compiled"))
    path = str(DEBUG_CONFIGS / "gate_deepseek_v3.toml")

    @cache
    def gate(backend: str) -> Gate:
        arguments = ["--job.config_file", path, "--compile.enable", "--compile.backend", backend]
        return Gate(load_job(arguments), folder)

    return gate


def compilable(layout: Layout) -> Layout:
    """With a schedule that does not split the backward, which compile refuses."""
    return with_options(layout, schedule="1F1B") if layout.schedule in SPLIT_BACKWARD else layout


@pytest.mark.parametrize(
    ("backend", "text"),
    tiered(
        [("aot_eager", "dp_shard=2,ep=2,recompute=2")],
        slow=[
            ("aot_eager", "dp_shard=2,ep=2,recompute=op,dispatch=bounded"),
            ("aot_eager", "tp=2"),
            ("aot_eager", "cp=2,cp_method=ring"),
        ],
        full=[
            *(("aot_eager", text) for text in SAMPLE),
            ("inductor", "dp_shard=2,ep=2,recompute=op"),
            ("inductor", "dp_shard=2,ep=2,dispatch=bounded"),
        ],
    ),
)
def test_compiled_layers_train_the_same_model(compiled_gates, backend: str, text: str):
    result = compiled_gates(backend).verify(compilable(parse(text)))
    assert result.passed, "\n".join([*result.lines, result.traceback])


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["standard", "bounded"])
def test_compiled_halves_of_a_microbatch_train_the_same_model(tmp_path: Path, dispatch: str):
    path = str(DEBUG_CONFIGS / "gate_deepseek_v3.toml")
    arguments = ["--job.config_file", path, "--compile.enable", "--compile.backend", "aot_eager"]
    arguments += ["--parallelism.expert_parallel_overlap", "true"]
    gate = Gate(load_job(arguments), tmp_path)
    result = gate.verify(parse(f"dp_shard=2,ep=2,dispatch={dispatch}"))
    assert result.passed, "\n".join([*result.lines, result.traceback])


def train(job: JobConfig, planted: bool) -> tuple[list[int], list[float], list[set]]:
    """Graphs compiled after each step, losses, and the numbers of rows that experts got."""
    from torch._dynamo.utils import counters

    from titan_moe.data.batch import Batch
    from titan_moe.distributed.parallelize import build_sharded_model
    from titan_moe.optim.optimizers import build_optimizer
    from titan_moe.train_step import TrainStep

    if planted:
        compile_ = torch.compile
        torch.compile = lambda *args, dynamic=None, **kwargs: compile_(
            *args, dynamic=None if dynamic is None else False, **kwargs
        )
    device, world_size = torch.device("cpu"), dist.get_world_size()
    sharded = build_sharded_model(job, tiny(job), device=device, world_size=world_size)
    optimizer = build_optimizer(job.optimizer, sharded.named_parameters())
    step = TrainStep(sharded, optimizer, job.training, device=device)
    sizes: set[int] = set()
    for moe in sharded.moe_layers().values():
        moe.experts.register_forward_pre_hook(lambda _, args: sizes.add(len(args[0].x_RD)))
    graphs, losses = [], []
    for number in range(STEPS):
        rows = (x[dist.get_rank() : 4 : world_size] for x in global_batch(number, 96))
        losses.append(step([Batch(*rows, [[]] * (4 // world_size))]).loss)
        graphs.append(counters["stats"]["unique_graphs"])
    return graphs, losses, sizes


def job_of(ep: int, backend: str | None, dtype: str = "float64") -> JobConfig:
    return make_job(
        "qwen3",
        training={"dtype": dtype, "mixed_precision_param": "float32", "local_batch_size": 4 // ep},
        parallelism={"expert_parallel_degree": ep},
        compile={"enable": backend is not None, "backend": backend or "eager"},
    )


@pytest.mark.parametrize("ep", tiered([], slow=[2], full=[1]))
def test_nothing_is_compiled_after_the_second_step(ep: int):
    eager = run_on_ranks(train, ep, job_of(ep, None), False)
    for (graphs, losses, sizes), (none, expected, _) in zip(
        run_on_ranks(train, ep, job_of(ep, "aot_eager"), False), eager, strict=True
    ):
        assert 0 < graphs[1] == graphs[-1] and none[-1] == 0
        assert losses == pytest.approx(expected, rel=1e-12)
        assert ep == 1 or len(sizes) > 2, "the number of rows did not vary"


@pytest.mark.full
def test_generated_kernels_train_alike():
    ((graphs, losses, _),) = run_on_ranks(train, 1, job_of(1, "inductor", "float32"), False)
    ((_, expected, _),) = run_on_ranks(train, 1, job_of(1, None, "float32"), False)
    assert graphs[1] == graphs[-1] and losses == pytest.approx(expected, rel=1e-4)
