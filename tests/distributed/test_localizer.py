"""The localizer names the module that each planted bug went wrong in, and nothing without a bug."""

from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.capturing import captured, setting
from tests.support.catching import BUGS
from tests.support.gates import Gates
from tests.support.tiers import tiered
from titan_moe.verify.layouts.layouts import depth, num_rows, parse
from titan_moe.verify.localize.capture_reader import Capture
from titan_moe.verify.localize.localize import locate, uncompared

Baselines = Callable[[str, str], Capture]


class Expected(NamedTuple):
    """What a bug must be named as: decided by what it does."""

    phase: str
    module: str
    """Pattern; it, or one of those between bars."""
    tensor: str
    whole_phase: bool = False
    """Whether all of the phase must be wrong, as the mistake is in no module of the model."""
    copies: bool = False
    """Whether what differs is ranks' copies of one tensor."""
    missing: bool = False
    """Whether the gradient never came."""


_LAST = "mtp.layers.0.block"
"""The backward comes by here first."""
_NORM = Expected("norm", "", "grad_norm")
_BALANCE = Expected("loss", "layers.1.moe", "balance loss")
_DISPATCHED = Expected("forward", "layers.1.moe.dispatcher.dispatch", "*")
_COMBINED = Expected("forward", "layers.1.moe.dispatcher.combine", "output")
_TIED = Expected("gradient", "output|tok_embeddings", "gradient of weight")

EXPECTED = {
    "replicas averaged": Expected("gradient", "*", "gradient of *", whole_phase=True),
    "replicas counted again in the norm": _NORM,
    "each rank divides by its own targets": Expected("loss", "", "num_targets"),
    "each microbatch divided by its own targets": Expected("backward", "loss|mtp.loss*", "logits"),
    "experts' gradients divided by ep": Expected("gradient", "*.moe.experts", "gradient of w?"),
    "experts left out of the norm under ep": _NORM,
    "rows come home off by one shard": _COMBINED,
    "gathered rows' gradients not summed over etp": Expected(
        "backward", f"{_LAST}.moe.dispatcher.dispatch", "*"
    ),
    "router's gradient not summed over tp": Expected(
        "gradient", f"{_LAST}.moe.router.gate", "gradient of weight"
    ),
    "a norm's gradient not summed over tp": Expected("gradient", "*norm", "gradient of weight"),
    "replicas over tp diverge": Expected("gradient", "*", "gradient of *", copies=True),
    "a bias added on every rank of a partial sum": Expected(
        "forward", "layers.0.attention.wo", "output"
    ),
    "the embedding's gradient without the vocabulary's mask": Expected(
        "gradient", "*tok_embeddings", "gradient of weight"
    ),
    "targets counted by every tp rank": Expected("loss", "", "num_targets"),
    "loss counted by every tp rank": Expected("loss", "", "loss"),
    "labels shifted at a border of cp": Expected("data", "batch", "labels"),
    "positions counted from each rank's first token": Expected("data", "batch", "positions"),
    "gathered keys' and values' gradients not summed over cp": Expected(
        "backward", f"{_LAST}.attention.core", "keys|values"
    ),
    "the ring's last block skipped": Expected("forward", "layers.0.attention.core", "output"),
    "sequences' counts not summed over cp and tp": _BALANCE,
    "tokens counted twice by recompute": Expected(
        "counts", "layers.1.moe.router", "tokens_per_expert"
    ),
    "recompute routes anew": Expected("recompute", "*.moe.router.weigh", "weights"),
    "recomputed rows without their routing weight": Expected(
        "gradient", "*.moe.experts", "gradient of w2"
    ),
    "every chunk of the loss gets the first one's labels": Expected("loss", "", "loss"),
    "the output layer's gradient of the last chunk alone": Expected(
        "gradient", "output", "gradient of weight"
    ),
    "the vocabulary's other ranks left out of the largest logit": Expected("loss", "", "loss"),
    "a schedule divides by its microbatches": Expected(
        "gradient", "*", "gradient of *", whole_phase=True
    ),
    "routing biases of a rank's first stage alone": Expected(
        "balance", "layers.2.moe.router", "expert_bias"
    ),
    # What leads to parameters alone never runs: first seen where mtp's own embedding hangs.
    "parameters freed before a split backward": Expected(
        "backward", "mtp.layers.0.embedding_norm", "input", missing=True
    ),
    "routing biases from a rank's own tokens": Expected(
        "counts", "layers.1.moe.router", "tokens_per_expert"
    ),
    "global balance loss with this step's load": _BALANCE,
    "balance losses not attached": _BALANCE,
    "weight decay on norms": Expected("update", "*norm", "update of weight"),
    "a tie not summed between the ends of a pipeline": _TIED,
    "a tie not summed on a rank that has both": _TIED,
    "a tie counted twice in the norm": _NORM,
    "one end of a pipeline adds the other's part of a tie twice": Expected(
        "gradient", "tok_embeddings", "gradient of weight"
    ),
    "labels ahead from the next document": Expected("data", "batch", "labels 1 ahead"),
    "tokens and labels ahead shifted at a border of cp": Expected(
        "data", "batch", "tokens 1 ahead"
    ),
    "multi-token prediction's gradients without its weight": Expected(
        "backward", "mtp.loss of depth 1", "logits"
    ),
    "multi-token prediction's loss lost": Expected("loss", "", "mtp_loss"),
    "multi-token prediction's loss counted by every tp rank": Expected("loss", "", "mtp_loss"),
    "routing bias of multi-token prediction not updated": Expected(
        "balance", f"{_LAST}.moe.router", "expert_bias"
    ),
    "every rank adds its slice of the experts' biases to the first one": Expected(
        "forward", "layers.0.moe.experts", "output"
    ),
    "expert biases not weighted by the router": Expected(
        "backward", "layers.2.moe.experts", "weights"
    ),
    "a rank's heads get the first heads' sinks": Expected(
        "forward", "layers.0.attention.core", "output"
    ),
    "sinks' gradients whole on every rank of a ring": Expected(
        "gradient", "layers.2.attention.sinks", "gradient of weight"
    ),
    "all layers see everything under cp": Expected("forward", "layers.0.attention.core", "output"),
    "temperature from positions in a rank's own part": Expected(
        "forward", "layers.2.attention.core", "queries"
    ),
    "of a token's experts on a rank, the first one's output alone": _COMBINED,
    "a token's row copied for each expert, its gradients not added": Expected(
        "backward", f"{_LAST}.moe.dispatcher.dispatch", "*"
    ),
    "rows that came by way of another rank taken for those of the next node": _DISPATCHED,
    "outputs leave a node without the other ranks' parts": _COMBINED,
    "buffers come home off by one rank": _COMBINED,
    "buffers filled with the rows of the tokens before": _DISPATCHED,
    "rows through symmetric memory taken for those of another rank": _DISPATCHED,
    "gradients come home through symmetric memory before they are there": Expected(
        "backward", f"{_LAST}.moe.dispatcher.combine", "*"
    ),
    "the last microbatch reduces nothing": Expected(
        "gradient", "*", "gradient of *", whole_phase=True
    ),
    "a step's gradients reduced after its first microbatch": Expected(
        "gradient", "*", "gradient of *", whole_phase=True
    ),
    "parameters kept gathered over the update": Expected(
        "gradient", "*", "gradient of *", whole_phase=True
    ),
}
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
    "pp=2,schedule=DualPipeV",
    "pp=2,tp=2,schedule=InterleavedZeroBubble,reshard=always",
    "tp=2,cp=2,ep=2,etp=2,recompute=op",
]


@pytest.fixture(scope="session")
def baselines(gates: Gates, tmp_path_factory) -> Baselines:
    """Family and layout -> one plain process on the same model and rows."""
    made: dict[tuple, Capture] = {}

    def baseline(family: str, text: str) -> Capture:
        layout = parse(text)
        key = family, depth(layout), num_rows(layout)
        if key not in made:
            task = setting(gates(family), "dp_shard=1", text)
            made[key] = captured(task, tmp_path_factory.mktemp("baseline"))
        return made[key]

    return baseline


def test_each_bug_has_a_place():
    assert set(EXPECTED) == set(BUGS) and set(QUICK) <= set(BUGS)


def named(gates: Gates, baselines: Baselines, name: str, folder: Path) -> None:
    bug, expected = BUGS[name], EXPECTED[name]
    layout = bug.caught_on
    candidate = captured(setting(gates(bug.family), layout, layout), folder, bug)
    finding = locate(baselines(bug.family, layout), candidate)
    assert finding is not None
    said = "\n".join(finding.lines())
    assert finding.place.phase == expected.phase, said
    assert matches(finding.place.module, expected.module), said
    assert matches(finding.place.tensor, expected.tensor), said
    assert not finding.is_tie, said
    wrong, places = finding.of_phase
    assert wrong == places if expected.whole_phase else wrong <= places, said
    assert finding.difference.ranks is not None or not expected.copies, said
    assert finding.difference.missing == expected.missing, said


def matches(text: str, patterns: str) -> bool:
    return any(fnmatchcase(text, pattern) for pattern in patterns.split("|"))


@pytest.mark.parametrize("name", tiered(QUICK[:1], slow=QUICK[1:]))
def test_a_planted_bug_is_named(gates: Gates, baselines: Baselines, name: str, tmp_path: Path):
    named(gates, baselines, name, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in EXPECTED if name not in QUICK])
def test_every_planted_bug_is_named(gates: Gates, baselines: Baselines, name: str, tmp_path: Path):
    named(gates, baselines, name, tmp_path)


def nothing(gates: Gates, baselines: Baselines, family: str, layout: str, folder: Path) -> None:
    candidate = captured(setting(gates(family), layout, layout), folder)
    finding = locate(baselines(family, layout), candidate)
    assert finding is None, "\n".join(finding.lines())
    assert uncompared(baselines(family, layout), candidate) == []


@pytest.mark.parametrize("layout", tiered(HARMLESS[:1], slow=HARMLESS[1:]))
def test_a_layout_alone_is_no_difference(
    gates: Gates, baselines: Baselines, layout: str, tmp_path: Path
):
    nothing(gates, baselines, "deepseek_v3", layout, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("layout", MORE_HARMLESS)
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3", "gpt_oss", "llama4", "mixtral"])
def test_layouts_alone_are_no_difference(
    gates: Gates, baselines: Baselines, family: str, layout: str, tmp_path: Path
):
    nothing(gates, baselines, family, layout, tmp_path)
