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
from titan_moe.parallelize.activations import Lines
from titan_moe.parallelize.communicators import communicator_bytes, communicators
from titan_moe.parallelize.memory import GIB, MARGIN, Memory, memory, memory_of_ranks
from titan_moe.parallelize.memory_table import Table, tables
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


def _tables(plan: Plan) -> dict[str, Table]:
    """Returns the lines of the first rank by moment."""
    return {moment: table for rank, moment, table in tables(plan) if rank == 0}


def test_every_line_of_a_small_model_by_hand():
    tokens, late = 3 * 7, _OUTPUT + 2 * _LAYER  # The embedding is as large as the output layer.
    always = {
        "weights": _WEIGHTS / 4 * 4,
        "moments": 2 * _WEIGHTS / 4 * 4,
        "inputs of recomputed layers": 2 * tokens * 10 * 2,
        "buffers of NCCL": (672 + 4 * 32) * 2**20,
    }
    layer = {
        "norms and sums": tokens * 4 * 10 * 2,
        "attention": tokens * (3 * 2 + 3 * 1) * 5 * 2,
        "feed-forward": tokens * 4 * 30 * 2,
        "gradient of the stream": tokens * 10 * 2,
        "weights of two units": 2 * _LAYER * 2,
    }
    by_hand = {
        "the loss": {
            "weights of the output layer, twice": 2 * _OUTPUT * 2,
            "logits of a chunk": tokens * 100 * 2,
            "gradients of the output layer's weight": _OUTPUT * 2,
            "gradients of its input": tokens * 10 * 2,
        },
        "the first feed-forward's backward": layer
        | {
            "gradients": (_WEIGHTS - late) / 4 * 4,
            "gradients of the feed-forward, or copies of rows": tokens * 4 * 30 * 2,
            "gradients in reduction": _LAYER * 4,
        },
        "the last attention's backward": layer
        | {
            "feed-forward, which is gone": -tokens * 4 * 30 * 2,
            "gradients of attention": tokens * (3 * 2 + 3 * 1) * 5 * 2,
            # Float32 sums for 2 heads of 5, as wide as 32; gradients of keys and values of both.
            "sums in FlashAttention's backward": (
                (tokens + 3 * 128) * (2 * 32 * 4 + 2 * 2 * 5 * 2)
            ),
            "gradients of a layer": _LAYER * 2,
            "gradients in reduction": _LAYER * 4,
        },
        "the embedding's backward": {
            "gradients": (_WEIGHTS - late) / 4 * 4,
            "gradients of the embedding": _OUTPUT * 2,
            "its weights, or its gradients in reduction": _OUTPUT * 4,
        },
    }
    found = _tables(_plan())
    for moment, lines in by_hand.items():
        rows = {line: size for term in found[moment].values() for line, size in term.items()}
        assert {line: size for line, size in rows.items() if size} == pytest.approx(always | lines)
    most = _memory()
    assert most.moment in found
    sums = [sum(map(sum, (term.values() for term in table.values()))) for table in found.values()]
    assert most.total + most.communicators == pytest.approx(max(sums))


def test_loss_chunks_and_wide_types_of_a_small_model():
    def at_the_loss(**keys: object) -> Lines:
        return _tables(_plan(training=_training(**keys)))["the loss"]["logits"]

    whole, chunked = at_the_loss(), at_the_loss(loss_chunk_size=5)
    assert whole["logits of a chunk"] - chunked["logits of a chunk"] == (21 - 5) * 100 * 2
    # A sum of chunks' gradients is float32.
    weight = "gradients of the output layer's weight"
    assert (whole[weight], chunked[weight]) == (_OUTPUT * 2, _OUTPUT * 4)
    assert at_the_loss(loss_chunk_size=0) == whole
    wide = _plan(training=_training(mixed_precision_param="float32"))
    layer = _tables(wide)["the last attention's backward"]["layer"]
    assert layer["sums in FlashAttention's backward"] == 0  # FlashAttention is narrow.


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
    found = _tables(_plan(activation_checkpoint=ActivationCheckpoint(mode=mode, **keys)))
    kept = found["the loss"]["kept"]
    assert sum(kept.values()) == 21 * elements * 2
    recomputed = sum(_tables(_plan())["the last attention's backward"]["layer"].values())
    layer = found["the last attention's backward"]["layer"]
    already = layer.get("values that are kept already", 0.0)
    assert sum(layer.values()) - already == recomputed


def test_weights_that_are_frozen_have_neither_gradients_nor_moments():
    config = model_config("deepseek_v32", "gate")
    with torch.device("meta"):
        sizes = {name: p.numel() for name, p in Decoder(config).named_parameters()}
    trained = sum(size for name, size in sizes.items() if ".indexer." in name)
    found = _tables(_plan(config, 1, training=_training(indexer_stage="dense")))["the loss"]
    assert sum(found["stored"].values()) == 4 * sum(sizes.values()) + 8 * trained


def test_two_reductions_under_way_where_experts_are_apart():
    sparse = replace(_DENSE, moe=MoEConfig(num_experts=64, top_k=2, hidden_dim=30))
    plan = _plan(sparse, parallelism=Parallelism(expert_parallel_degree=4))
    routed, dense = 64 / 4 * 3 * 10 * 30, _LAYER - 3 * 10 * 30 + 10 * 64
    first, second = "the last feed-forward's backward", "the last attention's backward"
    for device, moment, bytes_ in (
        ("cuda", first, (routed + dense) * (2 * 2 + 4) + routed * 2),
        # A CPU has one reduction under way, here the output layer's.
        ("cpu", first, (routed + dense) * 2 * 2 + routed * 2 + _OUTPUT * 4),
        ("cuda", second, (routed + 2 * dense) * 2 + dense * 2 + routed * 4),
    ):
        found = _tables(replace(plan, device_type=device))[moment]["gathered"]
        assert sum(found.values()) == pytest.approx(bytes_)


@pytest.mark.parametrize(
    ("backend", "ep", "rows"),
    [("standard", 1, 0), ("standard", 4, 2), ("deduplicated", 4, 4 * (1 - (3 / 4) ** 2))],
)
def test_rows_that_were_exchanged_are_kept_beside_a_layers_input(backend, ep: int, rows: float):
    sparse = replace(_DENSE, moe=MoEConfig(num_experts=8, top_k=2, hidden_dim=6))
    parallelism = Parallelism(expert_parallel_degree=ep, expert_parallel_comm_backend=backend)
    keeping = _FULL.model_copy(update={"keep_exchanged_rows": True})
    found = _tables(_plan(sparse, parallelism=parallelism, activation_checkpoint=keeping))
    kept = found["the loss"]["kept"]["exchanged rows of recomputed layers"]
    assert kept == pytest.approx(2 * 21 * rows * 10 * 2)


@pytest.mark.parametrize(("schedule", "in_flight", "passes"), [("1F1B", 1, 1), ("GPipe", 3, 2)])
def test_the_last_rank_of_a_pipeline_by_hand(schedule, in_flight: int, passes: int):
    parallelism = Parallelism(pipeline_parallel_degree=2, pipeline_parallel_schedule=schedule)
    found = {moment: t for rank, moment, t in tables(_plan(parallelism=parallelism)) if rank == 1}
    sums = {
        term: sum(lines.values()) for term, lines in found["the loss"].items() if term != "skew"
    }
    # A layer, the norm and the output layer, over two ranks of four.
    parameters = _LAYER + 10 + _OUTPUT
    assert sums["stored"] == parameters * 12 / 2
    # All weights stay gathered, gradients are summed whole.
    assert sums["accumulated"] == parameters * (2 + 4)
    # Inputs of layers when one microbatch is through, outputs, and torch's buffers for each of
    # three microbatches of one row.
    assert sums["kept"] == (passes + in_flight + 2 * 3) * 7 * 10 * 2
    assert sums["logits"] == 7 * 100 * 2 + in_flight * (7 * 10 * 2 + _OUTPUT * 2)
    assert found["the last attention's backward"]["gathered"]["gradients in reduction"] == 0


@pytest.mark.parametrize(
    "schedule", ["1F1B", "Interleaved1F1B", "GPipe", "ZBVZeroBubble", "DualPipeV"]
)
@pytest.mark.parametrize("mode", ["none", "full"])
def test_ranks_with_the_same_parts_need_no_more_than_the_first_of_them(schedule: str, mode: str):
    deep = replace(_DENSE, num_layers=18, vocab_size=10)
    parallelism = Parallelism(pipeline_parallel_degree=4, pipeline_parallel_schedule=schedule)
    plan = _plan(
        deep,
        training=_training(local_batch_size=16),
        parallelism=parallelism,
        activation_checkpoint=ActivationCheckpoint(mode=mode),
    )
    assert memory(plan) == max(memory_of_ranks(plan), key=lambda rank: rank.needed)


_FOUR_MICROBATCHES = {"global_batch_size": 4 * 4 * 3}


def _shared(free: float, word: str = "auto", **training: object) -> str:
    """Returns the choice of four ranks whose GPUs have `free` bytes beside the model."""
    section = _training(**_FOUR_MICROBATCHES | training)
    tables = {"training": section, "parallelism": Parallelism(fsdp_accumulation=word)}
    return _plan(gpu=memory(_plan(**tables)).needed + free + MARGIN, **tables).accumulation


def test_auto_keeps_parameters_gathered_where_memory_suffices():
    section = _training(**_FOUR_MICROBATCHES)
    each, keeping = (
        memory(_plan(training=section, parallelism=Parallelism(fsdp_accumulation=word))).needed
        for word in ("reduce_each", "keep_gathered")
    )
    more = keeping - each
    # Whole gradients where a quarter of them is counted already, and weights in bfloat16.
    assert 0 < more < _WEIGHTS * 4 - _WEIGHTS * 4 / 4 + _WEIGHTS * 2
    assert _shared(more) == "keep_gathered"
    assert _shared(more - 1) == "reduce_each"
    assert _shared(more, global_batch_size=4 * 3) == "reduce_each"  # One microbatch.
    assert _shared(0, word="keep_gathered") == "keep_gathered"


def test_auto_reduces_each_microbatch_on_a_cpu_and_in_a_pipeline():
    training, pipeline = _training(**_FOUR_MICROBATCHES), Parallelism(pipeline_parallel_degree=2)
    on_cpu = _plan(training=training)
    assert (on_cpu.accumulation, on_cpu.microbatches) == ("reduce_each", 4)
    piped = _plan(training=training, parallelism=pipeline, gpu=80 * GIB)
    assert (piped.accumulation, piped.microbatches) == ("reduce_each", 1)


def test_symmetric_memory_is_three_buffers():
    config = replace(_DENSE, moe=MoEConfig(num_experts=8, top_k=2, hidden_dim=16))
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
    tables["comm"] = {"separate_reduce_scatter": True}
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
            owned = facts.parameter_bytes + facts.optimizer_bytes
            stored = _tables(plan)["the loss"]["stored"]
            assert sum(stored.values()) == pytest.approx(owned, rel=0.01)


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
    skew = _tables(make_plan(_SKEWED, tiny(_SKEWED), 2))["the loss"]["skew"]
    found = run_on_ranks(_kept_beyond_an_even_share, 2)[0]
    assert sum(skew.values()) == pytest.approx(found, rel=0.05)


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

    def estimate(top_k: int) -> float:
        model = replace(_DENSE, dim=128, moe=replace(config, top_k=top_k))
        training = Training(local_batch_size=1, seq_len=2048, mixed_precision_param="float32")
        layer = _tables(_plan(model, training=training))["the last feed-forward's backward"][
            "layer"
        ]
        return sum(layer.values())

    # Values and copies of all rows: an expert's other values are few.
    assert peak == pytest.approx(2 * (estimate(8) - estimate(4)), rel=0.15)


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
    plans = (make_plan(_sliced(slices), config, 2) for slices in (1, 2))
    found = [sum(_tables(plan)["the loss"]["kept"].values()) for plan in plans]
    assert config.moe is not None
    more = 256 * config.moe.top_k * config.dim * 8 * (config.num_layers - config.num_dense_layers)
    assert found[1] - found[0] == pytest.approx(more)
