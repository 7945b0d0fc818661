"""The localizer names the module that each planted bug went wrong in, and nothing without a bug."""

from collections.abc import Callable
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path

import pytest

from tests.support.catching import BUGS, captured, setting
from tests.support.gates import Gates, fitting
from tests.support.planting import Bug
from tests.support.tiers import split, tiered
from titan_moe.models.registry import FAMILIES
from titan_moe.verify.layouts.layouts import depth, num_sequences, parse
from titan_moe.verify.localize.capture_reader import Capture
from titan_moe.verify.localize.localize import locate, uncompared

Baselines = Callable[[str, str], Capture]


QUICK = [
    "rows come home off by one shard",
    "replicas over tp diverge",
    "gathered keys' and values' gradients not summed over cp",
    "recompute routes anew",
    "weight decay on norms",
]
HARMLESS = ["tp=2,ep=2,recompute=op", "pp=2,recompute=full"]
MORE_HARMLESS = [
    "dp_shard=2,recompute=full",
    "dp_replicate=2,tp=2,recompute=2",
    "dp_shard=4,ep=2,reshard=always",
    "cp=2,cp_method=ring,recompute=op",
    "cp=2,cp_method=allgather,cp_balancer=none",
    "cp=2,etp=2,cp_method=ulysses",
    "pp=2,schedule=ZBVZeroBubble",
    "pp=2,dp_shard=2,ep=2,schedule=DualPipeV",
    "pp=2,tp=2,schedule=InterleavedZeroBubble,reshard=always",
    "tp=2,cp=2,ep=2,etp=2,recompute=op",
]


@pytest.fixture(scope="session")
def baselines(gates: Gates, tmp_path_factory) -> Baselines:
    """Family and layout -> one plain process on the same model and rows."""
    made: dict[tuple, Capture] = {}

    def baseline(family: str, text: str) -> Capture:
        layout = parse(text)
        key = family, depth(layout), num_sequences(layout)
        if key not in made:
            task = setting(gates(family), "dp_shard=1", text)
            made[key] = captured(task, tmp_path_factory.mktemp("baseline"))
        return made[key]

    return baseline


LOCALIZED = [name for name, bug in BUGS.items() if bug.localized]


def matches(text: str, patterns: str) -> bool:
    return any(fnmatchcase(text, pattern) for pattern in patterns.split("|"))


@pytest.mark.parametrize("name", split(LOCALIZED, QUICK[:1], QUICK[1:]))
def test_localizer_names_planted_bug(gates: Gates, baselines: Baselines, name: str, tmp_path: Path):
    bug = BUGS[name]
    layout, (phase, module, tensor) = bug.caught_on, bug.localized
    task = setting(gates(bug.family, bug.kind), layout, layout)
    finding = locate(baselines(bug.family, layout), captured(task, tmp_path, bug))
    assert finding is not None
    said = "\n".join(finding.lines())
    place = finding.first.place
    assert place.phase == phase, said
    assert matches(place.module, module), said
    assert matches(place.tensor, tensor), said
    assert not finding.tie, said
    wrong, places = finding.of_phase()
    assert wrong == places if bug.whole_phase else wrong <= places, said
    assert finding.first.copies or not bug.copies, said


@pytest.mark.slow
def test_keys_that_rounding_selects_are_a_tie(gates: Gates, baselines: Baselines, tmp_path: Path):
    """Scores of 0 are common: so little makes the later key the better one."""
    right = "index.decide(scores_BST)"
    wrong = "index.decide(scores_BST + 1e-15 * torch.arange(scores_BST.shape[-1]))"
    bug = Bug("titan_moe.ops.sparse_attention:SparseAttention.__call__", right, wrong)
    task = setting(gates("deepseek_v32"), "tp=2", "tp=2")
    finding = locate(baselines("deepseek_v32", "tp=2"), captured(task, tmp_path, bug))
    assert finding is not None and finding.tie
    assert finding.first.place == ("forward", "layers.0.attention.indexer", "choice")


@pytest.mark.parametrize(
    "family, kind, layout",
    tiered(
        [("deepseek_v3", "AdamW", HARMLESS[0])],
        slow=[
            ("deepseek_v3", "AdamW", HARMLESS[1]),
            ("deepseek_v3", "overlap", "tp=2,ep=2,recompute=full"),
            ("deepseek_v3", "AdamW", "dp_shard=4,ep=2,etp=2,recompute=full,dispatch=balanced"),
            ("gemma4", "AdamW", "tp=2"),
            ("kimi_linear", "AdamW", "tp=2"),
            ("nemotron_h", "AdamW", "tp=2"),
            ("qwen3_next", "AdamW", "tp=2"),
        ],
        full=product(FAMILIES, ["AdamW"], MORE_HARMLESS),
    ),
)
def test_localizer_finds_nothing_in_layout_alone(
    gates: Gates, baselines: Baselines, family: str, kind: str, layout: str, tmp_path: Path
):
    layout = fitting(family, layout)
    candidate = captured(setting(gates(family, kind), layout, layout), tmp_path)
    finding = locate(baselines(family, layout), candidate)
    assert finding is None, "\n".join(finding.lines())
    assert uncompared(baselines(family, layout), candidate) == []
