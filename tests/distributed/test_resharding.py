"""A checkpoint of any layout goes on in any other: the same bits by name, the same global batches,
the same curve."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support.gates import OTHERS, SAMPLE
from tests.support.pieces import waste
from tests.support.resharding import LEG, Run, go_on, problems, run
from tests.support.tiers import tiered
from titan_moe.models.registry import FAMILIES
from titan_moe.runtime.ranks import RankError
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
