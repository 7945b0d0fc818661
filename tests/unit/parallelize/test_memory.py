"""The memory estimate, against a count by hand; tests/unit/config has what the TOML files say."""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from operator import itemgetter

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from tests.support.tiny import make_job, tiny, tiny_step
from titan_moe.config.job_config import ActivationCheckpoint, JobConfig, Parallelism, Training
from titan_moe.config.parse import resolve
from titan_moe.models.config import GQAConfig, ModelConfig, RopeConfig
from titan_moe.models.decoder import Decoder
from titan_moe.models.registry import model_config
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.layer import MoE
from titan_moe.moe.router import GivenExperts
from titan_moe.parallelize.communicators import communicator_bytes, communicators
from titan_moe.parallelize.memory import GIB, MARGIN, Memory, memory
from titan_moe.parallelize.memory_table import tables
from titan_moe.parallelize.plan import Plan
from titan_moe.parallelize.policies import make_plan
from titan_moe.runtime.process_pool import in_fresh_processes
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.simulate.fake_rank import balanced_choice
from titan_moe.simulate.step import measure

_DENSE = ModelConfig(
    vocab_size=100,
    dim=10,
    num_layers=2,
    hidden_dim=30,
    attention=GQAConfig(2, 1, 5, RopeConfig(10_000.0)),
    moe=None,
)
_JOB = JobConfig(training=Training(local_batch_size=3, seq_len=7))
_LAYER = 2 * 10 + 2 * 10 * (10 + 5) + 3 * 10 * 30
_OUTPUT = 100 * 10
_WEIGHTS = 2 * _LAYER + 2 * _OUTPUT + 10  # The embedding is as large as the output layer.
_FULL = ActivationCheckpoint(mode="full")


def _plan(
    config: ModelConfig = _DENSE, ranks: int = 4, gpu: float | None = None, **sections: object
) -> Plan:
    """Returns the plan of four ranks of the dense model, or of another one, with some tables of the
    job; `gpu`: bytes of a GPU."""
    job = _JOB.model_copy(update={"activation_checkpoint": _FULL} | sections)
    return make_plan(job, config, ranks, device_type="cuda", device_bytes=gpu)


def _training(**keys: object) -> Training:
    return _JOB.training.model_copy(update=keys)


def _memory(config: ModelConfig = _DENSE, ranks: int = 4, **sections: object) -> Memory:
    return memory(_plan(config, ranks, **sections))


def test_every_line_of_a_small_model_by_hand():
    tokens = 3 * 7
    by_hand = {
        "weights": _WEIGHTS / 4 * 4,
        "gradients": _WEIGHTS / 4 * 4,
        "moments": 2 * _WEIGHTS / 4 * 4,
        "weights of two layers": 2 * _LAYER * 2,
        "gradients of a layer": _LAYER * 2,
        "gradients in reduction": _LAYER * 4,
        "weights and gradients of the output layer": 2 * _OUTPUT * 2,
        "its gradients in reduction": _OUTPUT * 4,
        "inputs of recomputed layers": 2 * tokens * 10 * 2,
        "norms and sums, with gradients": 2 * tokens * 4 * 10 * 2,
        "attention, with gradients": 2 * tokens * (3 * 2 + 3 * 1) * 5 * 2,
        "feed-forward, with gradients": 2 * tokens * 4 * 30 * 2,
        # Float32 sums for 2 heads of 5, as wide as 32, and gradients of keys and values of both.
        "sums in FlashAttention's backward": (tokens + 3 * 128) * (2 * 32 * 4 + 2 * 2 * 5 * 2),
        "logits of a chunk": tokens * 100 * 2,
        "gradients of the output layer's input": tokens * 10 * 2,
        "gradients of its weight, and their sum": 100 * 10 * (2 + 4),
        "buffers of NCCL": (672 + 4 * 32) * 2**20,
    }
    (table,) = tables(_plan())
    rows = [(term, line, size) for term, lines in table.items() for line, size in lines.items()]
    print("\n".join(f"{term:<14}{line:<44}{size:>16,.0f}" for term, line, size in rows))
    assert {line: size for _, line, size in rows if size} == by_hand
    found = _memory()
    assert found.total == sum(by_hand.values()) - found.communicators


def test_loss_chunks_and_wide_types_of_a_small_model():
    found = _memory()
    chunked = _memory(training=_training(loss_chunk_size=5))
    assert found.logits - chunked.logits == (21 - 5) * 100 * 2
    assert _memory(training=_training(loss_chunk_size=0)) == found
    wide = _memory(training=_training(mixed_precision_param="float32"))
    assert wide.attention == 0  # FlashAttention is narrow.


_VALUES = 4 * 10 + (3 * 2 + 3 * 1) * 5 + 4 * 30
# The input; queries, keys and values before and after rotation, attention's output and its
# projection; gate, up and their projection.
_RESULTS = 10 + 2 * (2 + 2) * 5 + 2 * 5 + 10 + 2 * 30 + 10


@pytest.mark.parametrize(
    ("mode", "keys", "elements"),
    [
        ("none", {}, 2 * _VALUES),
        ("selective", {}, _VALUES + 10),
        ("selective", {"selective_ac_option": "op"}, 2 * _RESULTS),
        ("full", {"keep_attention": True}, 2 * (10 + 2 * 5)),
    ],
)
def test_elements_that_two_layers_keep_of_a_token(mode, keys: dict, elements: int):
    found = _memory(activation_checkpoint=ActivationCheckpoint(mode=mode, **keys))
    assert found.kept == 21 * elements * 2
    assert found.layer == _memory().layer


def test_weights_that_are_frozen_have_neither_gradients_nor_moments():
    config = model_config("deepseek_v32", "gate")
    with torch.device("meta"):
        sizes = {name: p.numel() for name, p in Decoder(config).named_parameters()}
    trained = sum(size for name, size in sizes.items() if ".indexer." in name)
    found = _memory(config, 1, training=_training(indexer_stage="dense"))
    assert found.stored == 4 * sum(sizes.values()) + 12 * trained


def test_two_reductions_under_way_where_experts_are_apart():
    found = _memory(parallelism=Parallelism(tensor_parallel_degree=2))
    # Two dense layers in a row.
    assert found.gathered == (_LAYER * (3 * 2 + 2 * 4) + _OUTPUT * (2 * 2 + 4)) / 2
    sparse = replace(_DENSE, moe=MoEConfig(num_experts=64, top_k=2, hidden_dim=30))
    found = _memory(sparse, parallelism=Parallelism(expert_parallel_degree=4))
    # One layer's experts, and its other parameters.
    layer = _LAYER - 3 * 10 * 30 + 10 * 64 + 64 / 4 * 3 * 10 * 30
    assert found.gathered == pytest.approx(layer * (3 * 2 + 4) + _OUTPUT * (2 * 2 + 4))


@pytest.mark.parametrize(
    ("backend", "ep", "rows"),
    [("standard", 1, 0), ("standard", 4, 2), ("deduplicated", 4, 4 * (1 - (3 / 4) ** 2))],
)
def test_rows_that_were_exchanged_are_kept_beside_a_layers_input(backend, ep: int, rows: float):
    sparse = replace(_DENSE, moe=MoEConfig(num_experts=8, top_k=2, hidden_dim=6))
    parallelism = Parallelism(expert_parallel_degree=ep, expert_parallel_comm_backend=backend)
    keeping = _FULL.model_copy(update={"keep_exchanged_rows": True})
    (table,) = tables(_plan(sparse, parallelism=parallelism, activation_checkpoint=keeping))
    kept = table["kept"]["exchanged rows of recomputed layers"]
    assert kept == pytest.approx(2 * 21 * rows * 10 * 2)


@pytest.mark.parametrize(("schedule", "in_flight"), [("1F1B", 1), ("GPipe", 3)])
def test_the_heavier_rank_of_a_pipeline_by_hand(schedule, in_flight: int):
    parallelism = Parallelism(pipeline_parallel_degree=2, pipeline_parallel_schedule=schedule)
    found = _memory(parallelism=parallelism)
    # Its second rank: a layer, the norm and the output layer, over two ranks of four.
    parameters = _LAYER + 10 + _OUTPUT
    assert found.stored == parameters * 16 / 2
    # All weights stay gathered, and gradients are summed whole; half of them are counted already.
    assert found.accumulated == parameters * (4 + 2) - parameters * 4 / 2
    # Inputs of layers, outputs, and torch's buffers for each of three microbatches of one row.
    assert found.kept == (in_flight + in_flight + 2 * 3) * 7 * 10 * 2
    assert found.logits == 7 * 100 * 2 + in_flight * (7 * 10 * 2 + _OUTPUT * (4 + 2))


_FOUR_MICROBATCHES = {"global_batch_size": 4 * 4 * 3}


def _shared(free: float, word: str = "auto", **training: object) -> str:
    """Returns the choice of four ranks whose GPUs have `free` bytes beside the model."""
    section = _training(**_FOUR_MICROBATCHES | training)
    tables = {"training": section, "parallelism": Parallelism(fsdp_accumulation=word)}
    return _plan(gpu=memory(_plan(**tables)).needed + free + MARGIN, **tables).accumulation


def test_auto_keeps_parameters_gathered_where_memory_suffices():
    # Whole gradients where a quarter of them is counted already, and weights in bfloat16.
    sums, weights = _WEIGHTS * 4 - _WEIGHTS * 4 / 4, _WEIGHTS * 2
    assert _shared(sums + weights) == "keep_gathered"
    assert _shared(sums + weights - 1) == "reduce_each"
    assert _shared(sums + weights, global_batch_size=4 * 3) == "reduce_each"  # One microbatch.
    assert _shared(0, word="keep_gathered") == "keep_gathered"


def test_auto_reduces_each_microbatch_on_a_cpu_and_in_a_pipeline():
    training, pipeline = _training(**_FOUR_MICROBATCHES), Parallelism(pipeline_parallel_degree=2)
    on_cpu = _plan(training=training)
    assert (on_cpu.accumulation, on_cpu.microbatches) == ("reduce_each", 4)
    piped = _plan(training=training, parallelism=pipeline, gpu=80 * GIB)
    assert (piped.accumulation, piped.microbatches) == ("reduce_each", 1)


def test_symmetric_memory_is_three_buffers():
    moe = MoEConfig(num_experts=8, top_k=2, hidden_dim=16)
    config = replace(_DENSE, moe=moe)
    keys = {"expert_parallel_degree": 2, "data_parallel_shard_degree": 4}
    word = {"expert_parallel_comm_backend": "symmetric"}
    plain, symmetric, bounded = (
        _memory(config, training=_training(seq_len=8), parallelism=Parallelism(**keys, **more))
        for more in ({}, word, word | {"expert_parallel_capacity_factor": 1.5})
    )
    row = 10 * 2 + 64
    assert (plain.exchange, symmetric.exchange) == (0.0, 3 * 2 * 24 * 2 * row)
    assert bounded.exchange == 3 * 1.5 * 24 * 2 * row
    assert symmetric.total - plain.total == symmetric.exchange
    assert "symmetric memory" in str(symmetric) and "symmetric memory" not in str(plain)


def test_communicators_and_states_are_those_of_a_step():
    degrees = {f"{axis}_parallel_degree": 2 for axis in ("pipeline", "context", "tensor", "expert")}
    nodes = {"expert_parallel_comm_backend": "deduplicated", "expert_parallel_ranks_per_node": 4}
    tables = {"training": {"local_batch_size": 2}, "optimizer": {"state_dtype": "bfloat16"}}
    layouts = (
        {"data_parallel_replicate_degree": 2, "expert_parallel_degree": 8, **nodes},
        {**degrees, "context_parallel_rotate_method": "ulysses"},
    )
    jobs = [make_job("qwen3", parallelism=layout, **tables) for layout in layouts]
    joined = {f"{axis}_parallel_degree": 2 for axis in ("tensor", "expert")}
    joined["data_parallel_replicate_degree"] = 2
    jobs.append(make_job("qwen3", parallelism=joined, optimizer={"name": "Muon"}))
    tasks = [(resolve(job, 16), replace(tiny(job), num_layers=2), 16, 0) for job in jobs]
    for task, facts in in_fresh_processes(measure, tasks, num_workers=1):
        plan = make_plan(*tasks[task][:3])
        found = communicators(plan)
        send = [size > communicator_bytes(ranks, sends=False) for (ranks, _), size in found.items()]
        sent = [not {"all_to_all", "send"}.isdisjoint(ops) for ops in facts.traffic.values()]
        # And the world's. Under Muon too, all are made before the step.
        assert len(found) == facts.num_groups + 1
        # The estimate lets Muon exchange over fsdp and edp, whatever the cut.
        assert sum(send) == sum(sent) or (task == 2 and sum(send) > sum(sent))
        if task == 0:
            owned = 2 * facts.parameter_bytes + facts.optimizer_bytes
            assert memory(plan).stored == pytest.approx(owned, rel=0.01)


_SKEWED = make_job("qwen3", training={"seq_len": 256}, parallelism={"expert_parallel_degree": 2})


def _kept_beyond_an_even_share() -> int:
    """Returns the bytes that this rank keeps for the backward if the first rank gets all rows,
    beyond those with even shares."""
    (model,), kept = tiny_step(_SKEWED)[0].parts, []
    tokens_BS = torch.zeros(1, 256).long()
    for ranks in (2, 1):
        saved: list[torch.Tensor] = []
        for moe in model.moe_layers().values():
            choose = balanced_choice(moe.config.num_experts * ranks // 2, moe.config.top_k)
            moe.router.select = GivenExperts("balanced", choose)
        with saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):  # noqa: B023
            model(tokens_BS, tokens_BS.int(), torch.arange(256)[None])
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
        kept.append(sum(storages.values()))
    return kept[1] - kept[0]


def test_skewed_rows_are_those_of_a_forward():
    config = tiny(_SKEWED)
    layers = config.num_layers
    # The estimate has the values of one layer more, their gradients, and two copies of its rows.
    row = config.dim + 2 * config.moe.hidden_dim
    skew = memory(make_plan(_SKEWED, config, 2)).skew
    estimate = skew * layers * row / ((layers + 2) * row + 2 * config.dim)
    assert estimate == pytest.approx(run_on_ranks(_kept_beyond_an_even_share, 2)[0], rel=0.05)


def most_allocated(step: Callable[[], object]) -> int:
    """Returns the most bytes of a CPU's memory alive at once during a call that were not before
    it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    events = profile.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return max(accumulate(change for _, change in sorted(changes, key=itemgetter(0))))


def test_live_rows_of_a_layer_are_within_the_estimate():
    """Few and small projections: rows of `dim` elements are most of what lives. On one rank, since
    gloo's threads hold an exchange's buffers for a while after it."""
    config = MoEConfig(num_experts=8, top_k=8, hidden_dim=32)
    layer, x_BSD = MoE(128, config, None), torch.randn(1, 2048, 128, requires_grad=True)
    for parameter in layer.parameters():
        parameter.grad = torch.nn.init.normal_(parameter.data).clone()
    layer(x_BSD).sum().backward()  # What is made once.
    peak = most_allocated(lambda: layer(x_BSD).sum().backward())

    def estimate(top_k: int) -> tuple[float, float]:
        model = replace(_DENSE, dim=128, moe=replace(config, top_k=top_k))
        training = Training(local_batch_size=1, seq_len=2048, mixed_precision_param="float32")
        found = _memory(model, training=training)
        return found.layer, found.copies

    (eight, copies), (four, _) = estimate(8), estimate(4)
    rows = 2 * (eight - four)
    assert rows < peak < rows + copies


def _sliced(slices: int) -> JobConfig:
    keys = {"parallelism": {"expert_tensor_parallel_degree": slices}}
    return make_job("deepseek_v3", training={"seq_len": 256}, **keys)


def _rows_of_a_slice(slices: int) -> int:
    """Returns the most rows of a routed product's input that this rank keeps for the backward."""
    (model,), rows = tiny_step(_sliced(slices))[0].parts, []
    dim, tokens_BS = model.config.dim, torch.zeros(1, 256).long()

    def keep(x: torch.Tensor) -> torch.Tensor:
        rows.append(len(x) if x.ndim == 2 and x.shape[1] == dim else 0)
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        model(tokens_BS, tokens_BS.int(), torch.arange(256)[None])
    return max(rows)


def test_each_slice_of_an_expert_has_all_of_its_rows():
    one, two = (run_on_ranks(_rows_of_a_slice, 2, slices)[0] for slices in (1, 2))
    assert two == pytest.approx(2 * one, rel=0.1)
    config = tiny(_sliced(1))
    found = [memory(make_plan(_sliced(slices), config, 2)) for slices in (1, 2)]
    assert found[1].copies == 2 * found[0].copies
    assert config.moe is not None
    more = 256 * config.moe.top_k * config.dim * 8 * (config.num_layers + config.num_mtp_layers)
    assert found[1].kept - found[0].kept == pytest.approx(more)
