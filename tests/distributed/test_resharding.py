"""A checkpoint of any layout goes on in any other: the same bits by name, the same global batches,
the same curve."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from tests.support.gates import OTHERS, SAMPLE
from tests.support.pieces import waste
from tests.support.resharding import LEG, Run, go_on, make_job, problems, run
from tests.support.tiers import tiered
from titan_moe.distributed.dtensor import local_part
from titan_moe.distributed.sharding import Sharding
from titan_moe.models.registry import FAMILIES, model_config
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.process import Process
from titan_moe.runtime.ranks import RankError, run_on_ranks
from titan_moe.trainer import Trainer
from titan_moe.verify.gradients.fixture import at_depth
from titan_moe.verify.layouts.layouts import Layout, depth, parse

_V3, _QWEN = "deepseek_v3", "qwen3"

# (family, before, after); the chain 8 -> 2 -> 6 below makes two more.
SHORT = [
    (_V3, "dp_shard=4,etp=4", "dp_shard=2,cp=2"),
    (_V3, "dp_shard=2,tp=2", "cp=2,tp=2,etp=4,cp_method=ulysses"),
    (_V3, "pp=4,schedule=1F1B", "tp=2,dp_shard=2,ep=2,etp=2"),
    (_V3, "dp_shard=2,cp=2,tp=2,ep=8", "dp_replicate=2,dp_shard=4"),
    (_V3, "pp=2,tp=2,ep=2,schedule=DualPipeV", "pp=2,dp_shard=3,schedule=GPipe"),
    (_QWEN, "dp_shard=3,tp=2,ep=2", "dp_shard=4"),
]
LONG = [
    (_V3, "dp_shard=8", "dp_shard=8,ep=8"),
    (_V3, "pp=4,dp_shard=2,ep=2,schedule=1F1B", "dp_shard=4,tp=2"),
    (_V3, "pp=4,schedule=ZBVZeroBubble", "pp=4,schedule=Interleaved1F1B"),
    (_V3, "pp=4,schedule=DualPipeV", "tp=4,etp=4"),
    (_V3, "dp_shard=4", "pp=4,schedule=ZBVZeroBubble"),
    (_V3, "pp=2,tp=2,dp_replicate=2,schedule=LoopedBFS", "cp=8,etp=2"),
    (_V3, "tp=8,ep=8", "dp_shard=8,ep=2,etp=4"),
    (_V3, "dp_shard=6,etp=2", "dp_shard=4,cp=2,ep=4"),
    (_V3, "dp_shard=1", "pp=2,dp_shard=2,tp=2,ep=4,schedule=InterleavedZeroBubble"),
    (_QWEN, "dp_shard=8,ep=8", "pp=4,tp=2,schedule=LoopedBFS"),
    (_QWEN, "pp=4,tp=2,schedule=Interleaved1F1B", "dp_replicate=2,cp=2,tp=2,etp=4"),
    (_QWEN, "dp_shard=3,cp=2,etp=2", "pp=2,cp=2,tp=2,cp_method=ring"),
]
CHAIN = ["pp=2,dp_shard=2,tp=2,ep=2,schedule=Interleaved1F1B", "cp=2,ep=2", "dp_shard=3,tp=2,etp=2"]

# From each layout of the gate's sample to another one of it: 30 pairs for each family.
SAMPLED = list(zip(SAMPLE, [*SAMPLE[7:], *SAMPLE[:7]], strict=True))

Undisturbed = Callable[..., Run]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """(family, layout, depth, steps) -> the run that never stopped; each is made once."""
    runs: dict[tuple[Any, ...], Run] = {}

    def get(family: str, layout: Layout, num_layers: int, steps: int = 2 * LEG) -> Run:
        key = (family, layout, num_layers, steps)
        if key not in runs:
            folder = tmp_path_factory.mktemp("undisturbed")
            runs[key] = run(family, layout, folder, steps=steps, depth=num_layers)
            assert not waste(runs[key].checkpoint(LEG))
        return runs[key]

    return get


@pytest.mark.parametrize("family, before, after", tiered(SHORT[:3], slow=SHORT[3:], full=LONG))
def test_a_run_goes_on_in_another_layout(
    tmp_path: Path, undisturbed: Undisturbed, family: str, before: str, after: str
):
    source, target = parse(before), parse(after)
    num_layers = max(depth(source), depth(target))
    reference = undisturbed(family, source, num_layers)
    ours = go_on(family, reference, LEG, target, tmp_path, depth=num_layers)
    assert problems(reference, ours, reference, LEG) == []


@pytest.mark.parametrize(
    "family, before, after",
    tiered(
        [],
        slow=[(family, "tp=2,dp_shard=2,ep=2,etp=2", "pp=2,cp=2,ep=2") for family in OTHERS],
        full=[(family, *pair) for family in FAMILIES for pair in SAMPLED],
    ),
)
def test_every_family_goes_on_in_another_layout(
    tmp_path: Path, undisturbed: Undisturbed, family: str, before: str, after: str
):
    test_a_run_goes_on_in_another_layout(tmp_path, undisturbed, family, before, after)


@pytest.mark.slow
def test_from_eight_ranks_to_two_to_six(tmp_path: Path, undisturbed: Undisturbed):
    layouts = [parse(text) for text in CHAIN]
    num_layers = max(map(depth, layouts))
    reference = undisturbed(_V3, layouts[0], num_layers, 3 * LEG)
    two = go_on(_V3, reference, LEG, layouts[1], tmp_path / "two", depth=num_layers, save_last=True)
    assert problems(reference, two, reference, LEG) == []
    six = go_on(_V3, two, 2 * LEG, layouts[2], tmp_path / "six", depth=num_layers)
    assert problems(two, six, reference, 2 * LEG) == []


@pytest.mark.parametrize("tp, shards", [(1, 5), (2, 3), (2, 8), (3, 6), (4, 4), (8, 7)])
def test_strided_shards_lie_where_arithmetic_puts_them(tp: int, shards: int):
    """Cut by tp first, then by data parallelism unevenly."""
    axes = {"fsdp": shards, "tp": tp}
    placements = [_StridedShard(0, split_factor=tp), Shard(0)]
    sharding = Sharding.of(placements, axes)
    for size in range(tp, 40, tp):
        own = size // tp
        rows = -(-own // shards)
        for shard, rank in product(range(shards), range(tp)):
            first, end = (min(edge * rows, own) for edge in (shard, shard + 1))
            (box,) = sharding.box(shard * tp + rank, (size,), axes)
            assert (box.start, box.stop) == (rank * own + first, rank * own + end)
            (length,), (begin,) = _compute_local_shape_and_global_offset(
                (size,), (shards, tp), [shard, rank], placements
            )
            assert length == end - first
            assert length == 0 or begin == box.start


# --- the test can fail ----------------------------------------------------------------------------


def _shift_strided_shards() -> None:
    """Strided shards are said to lie one shard further, at loading and for the checksums alike:
    production's own check sees nothing."""
    from titan_moe.checkpoint import tensors

    slices = tensors.local_slices

    def shifted(tensor):
        box = list(slices(tensor))
        for placement in getattr(tensor, "placements", ()):
            if isinstance(placement, _StridedShard):
                dim, held = placement.dim, box[placement.dim]
                size = held.stop - held.start
                first = (held.start + size) % tensor.shape[dim]
                box[dim] = slice(first, first + size)
        return tuple(box)

    tensors.local_slices = shifted


def _first_stage_only() -> None:
    """The optimizer's state of a rank's further stages is neither saved nor loaded."""
    from titan_moe.checkpoint import checkpointer

    everything = checkpointer.optimizer_tensors
    checkpointer.optimizer_tensors = lambda modules, optimizer: {
        name: tensor
        for name, tensor in everything(modules, optimizer).items()
        if any(f"optimizer.{fqn}." in name for fqn, _ in modules[0].named_parameters())
    }


def _begin_data_anew() -> None:
    from titan_moe.data.loader import Loader

    Loader.load_state_dict = lambda *_: None


def test_a_shifted_strided_shard_is_noticed(tmp_path: Path, undisturbed: Undisturbed):
    source, target = parse("dp_shard=2"), parse("dp_shard=2,tp=2")
    reference = undisturbed(_V3, source, 3)
    plant = _shift_strided_shards
    ours = go_on(_V3, reference, LEG, target, tmp_path, depth=3, plant=plant)
    lines = problems(reference, ours, reference, LEG)
    for kind in ("parameter", "exp_avg", "exp_avg_sq"):
        assert f"{kind} output.weight is not what was saved" in lines
    assert not any("norm.weight is not" in line for line in lines), "it has no strided shards"
    assert not any("checksums" in line for line in lines), "production's check cannot see it"


@pytest.mark.slow
def test_missing_optimizer_state_does_not_fit_another_layout(tmp_path: Path):
    layout = parse("pp=2,schedule=Interleaved1F1B")
    plant = _first_stage_only
    source = run(_V3, layout, tmp_path / "a", steps=LEG, depth=4, save_last=True, plant=plant)
    with pytest.raises(RankError, match=r"it lacks optimizer\.layers"):
        go_on(_V3, source, LEG, parse("dp_shard=2"), tmp_path / "b", depth=4)


@pytest.mark.slow
def test_data_that_begins_anew_is_noticed(tmp_path: Path, undisturbed: Undisturbed):
    reference = undisturbed(_V3, parse("dp_shard=2"), 3)
    target = parse("dp_shard=1")
    ours = go_on(_V3, reference, LEG, target, tmp_path, depth=3, plant=_begin_data_anew)
    lines = problems(reference, ours, reference, LEG)
    assert "step 3 has another global batch" in lines
    assert not any("not what was saved" in line for line in lines)


def _save_with_a_drifted_norm(job, config) -> tuple[str, bool]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    process = Process(rank=rank, world_size=world_size, device=torch.device("cpu"))
    trainer = Trainer(job, config, process)
    if rank == 1:
        norm = dict(trainer.sharded.named_parameters())["layers.1.attention_norm.weight"]
        with torch.no_grad():
            local_part(norm)[0] += 1e-15
    try:
        trainer.checkpointer.save(1, {"step": 1})
    except RunError as error:
        return str(error), trainer.checkpointer.folder.exists()
    return "", True


@pytest.mark.slow
def test_a_norm_that_drifted_between_tp_ranks_is_refused(tmp_path: Path):
    layout = parse("dp_shard=2,tp=2")
    job = make_job(_V3, layout, tmp_path, steps=1)
    config = at_depth(model_config(_V3, "gate"), 3)
    for line, written in run_on_ranks(_save_with_a_drifted_norm, 4, job, config):
        name = "model.layers.1.attention_norm.weight"
        assert line.endswith(f"should be replicas: {name} (rank 0 unlike rank 1)")
        assert not written
