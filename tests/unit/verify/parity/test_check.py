"""Our models against those of `transformers`, on tiny random weights."""

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.tiers import split
from titan_moe.cli.main import main
from titan_moe.data.batch import Batch
from titan_moe.models.config import RopeConfig
from titan_moe.models.decoder import Decoder
from titan_moe.models.hf import HFModel
from titan_moe.models.registry import FAMILIES
from titan_moe.training.train_step import local_batch
from titan_moe.verify.parity import check as parity
from titan_moe.verify.parity.check import BOUNDS, ParityResult, cases, compare
from titan_moe.verify.parity.table import exceeds_a_bound

_CASES = {str(case): case for case in cases()}
_TYPES = {str(dtype).removeprefix("torch."): dtype for dtype in BOUNDS}


_PLAIN = [name for name in _CASES if name.endswith(": plain")]
_QUICK = list(product([*_PLAIN, "deepseek_v3: multi-token prediction"], ["float64"], [0]))
_ALL = list(product(_CASES, _TYPES, range(5)))
_SLOW = [case for case in _ALL if case[2] == 0 and case not in _QUICK]


@pytest.mark.parametrize("name, dtype, seed", split(_ALL, _QUICK, _SLOW))
def test_model_agrees_with_transformers(name: str, dtype: str, seed: int):
    difference = compare(_CASES[name], seed, _TYPES[dtype])
    assert difference.worst <= BOUNDS[_TYPES[dtype]], difference


def _changed(config: Any, path: str, changes: dict[str, Any]) -> Any:
    """Returns a config with other fields in one of its sections, such as "attention.rope"."""
    first, _, rest = path.partition(".")
    if first:
        changes = {first: _changed(getattr(config, first), rest, changes)}
    return replace(config, **changes)


ROPE = RopeConfig(500_000.0, "neighbours")
# Dimensions that may be wrong without a change of a weight's shape.
_YARN = "deepseek_v2: YaRN, beyond its original length"
_MISTAKES = {
    "norm_eps": ("mixtral: plain", "", {"norm_eps": 1e-4}),
    "window": ("gpt_oss: plain", "near.local", {"size": 11}),
    "chunk": ("llama4: plain", "near.local", {"size": 15}),
    "positions everywhere": (
        "llama4: plain",
        "attention",
        {"rope": ROPE},
    ),
    "QK norm": ("llama4: plain", "near", {"qk_norm": "none"}),
    "route_scale": ("deepseek_v3: plain", "moe", {"route_scale": 1.0}),
    "groups": ("deepseek_v3: plain", "moe", {"num_groups": 1, "top_groups": 1}),
    "rotated half": ("glm4_moe: plain", "attention", {"partial_rotary_factor": 1.0}),
    "bias in the choice of groups": ("glm4_moe: groups", "moe", {"group_score_top": 1}),
    "indexer's rope": ("deepseek_v32: plain", "attention.indexer", {"pairing": "neighbours"}),
    "indexer's rope of GLM-5": ("glm_moe_dsa: plain", "attention.indexer", {"pairing": "halves"}),
    # What each family does otherwise than one would expect (docs/models.md).
    "scores by the heads' dim": ("gemma4: plain", "attention", {"scale": None}),
    "values without a norm": ("gemma4: plain", "near", {"v_norm": False}),
    "all pairs turn": ("gemma4: plain", "attention.rope", {"share": 1.0}),
    "rotated share of a head": ("gemma4: plain", "attention", {"partial_rotary_factor": 0.25}),
    "embedding as it is": ("gemma4: plain", "", {"embedding_scale": 1.0}),
    "logits as they are": ("gemma4: plain", "", {"logit_cap": None}),
    "norms around 0": ("step3p7: plain", "", {"zero_centred_norms": False}),
    "clamped before": ("step3p7: limits reached", "moe.activation", {"clamps": "before"}),
    "limit of other layers": ("step3p7: limits reached", "activation", {"limited_in": (1,)}),
    "values without a factor": ("mimo_v2: plain", "near", {"value_scale": 1.0}),
    "window of one fewer": ("mimo_v2: plain", "near.local", {"size": 9}),
    "bound of time steps": (
        "nemotron_h: time steps at their bound",
        "recurrent",
        {"time_step_min": 0.0},
    ),
    "positions of Nemotron-H": ("nemotron_h: plain", "attention", {"rope": ROPE}),
    "activation of Nemotron-H": ("nemotron_h: latent", "moe.activation", {"function": "silu"}),
    "mscale": (_YARN, "attention.rope.scaling", {"mscale_all_dim": 0.0}),
}


def test_every_family_has_a_case():
    assert set(FAMILIES) <= {case.family for case in cases()}


@pytest.mark.parametrize("mistake", split(_MISTAKES, ["window", "route_scale"]))
def test_parity_sees_wrong_dimension(mistake: str, monkeypatch: pytest.MonkeyPatch):
    name, path, changes = _MISTAKES[mistake]
    right = parity.model_of

    def wrong(folder: Path) -> HFModel:
        model = right(folder)
        return replace(model, config=_changed(model.config, path, changes))

    monkeypatch.setattr(parity, "model_of", wrong)
    assert compare(_CASES[name], 0, torch.float64).worst > 1e-4


@pytest.mark.parametrize("name", ["norm.weight", "layers.1.moe.router.gate.weight"])
def test_parity_of_nan_fails(name: str, monkeypatch: pytest.MonkeyPatch, capsys):
    right = parity.load_folder

    def wrong(model: Decoder, *more: object) -> None:
        right(model, *more)
        torch.nn.init.constant_(model.get_parameter(name), torch.nan)

    monkeypatch.setattr(parity, "load_folder", wrong)
    found = compare(_CASES["mixtral: plain"], 0, torch.float64)
    assert found.logits == found.gradient == found.losses == math.inf
    # In float32 the trained model is exported.
    assert main(["verify", "parity", "--only", "mixtral: plain", "--seeds", "1"]) == 4
    assert "has values that are NaN or infinite in float32" in capsys.readouterr().err


_GOOD = ParityResult(0.0, gradient=0.0, gradient_of="w", losses=0.0, exported=None, margin=1.0)


@pytest.mark.parametrize("name", ["logits", "gradient", "losses", "exported"])
def test_nan_and_no_result_exceed_every_bound(name: str):
    case, bad = _CASES["mixtral: plain"], replace(_GOOD, **{name: torch.nan})
    assert not exceeds_a_bound({case: {torch.float64: [_GOOD, _GOOD]}})
    for results in ([bad, _GOOD], [_GOOD, bad], []):
        assert exceeds_a_bound({case: {torch.float64: results}})


@pytest.mark.parametrize(
    ("errors", "name"),
    [({}, ""), ({"v": 0.0, "w": torch.nan}, "w"), ({"v": torch.nan, "w": 0.0}, "v")],
)
def test_gradient_of_nan_and_no_gradient_are_infinitely_far(errors: dict[str, float], name: str):
    assert parity.worst_of(errors) == (float("inf"), name)


def test_packed_documents_of_llama4_are_those_that_transformers_reads_alone():
    """Chunks of 16 tokens and temperatures from 8 tokens on count in the document."""
    lengths, seq_len = (5, 1, 27, 14, 3), 50
    tokens = torch.randint(3, 96, (1, seq_len), generator=torch.Generator().manual_seed(0))
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    with parity.computing_in(torch.float64):
        oracle = parity.Oracle(_CASES["llama4: plain"].settings, 0)
        found, model = parity._ours(oracle)
        alone = [oracle(document, None)[0] for document in tokens.split(lengths, 1)]
    layout = SimpleNamespace(
        config=found.config,
        device=torch.device("cpu"),
        plan=SimpleNamespace(counts_in_documents=True, counts_answers=False),
        positions=lambda n, device: torch.arange(n),
    )
    batch = Batch(tokens, tokens, documents, [[]])
    local = local_batch(batch, layout)  # type: ignore[arg-type]
    packed = model(local.tokens_BS, local.documents_BS, local.positions_BS)
    assert parity.distance(packed, torch.cat(alone, 1)) <= 1e-12
