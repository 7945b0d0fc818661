"""Rotary positions of drawn config.json files, against those of transformers."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from titan_moe.config.errors import ConfigError
from titan_moe.models.hf import HFModel, model_of
from titan_moe.models.rope import attention_factor, inverse_frequencies, softmax_factor
from titan_moe.verify.parity.check import cases

# transformers 5.24 knows no kimi_linear, and Nemotron-H has no rotary positions. Families whose
# kinds of layers differ have a table for each.
_PLAIN = {
    case.family: case.settings
    for case in cases()
    if case.option == "plain"
    and case.settings["model_type"] not in ("kimi_linear", "nemotron_h")
    and "full_attention" not in case.settings.get("rope_parameters", {})
}
_KEYS = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary_dim"}
_ORIGINAL = "original_max_position_embeddings"
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, _ORIGINAL: 16}
_CHOICES = {
    "factor": [2.0, 4.0, 8],
    _ORIGINAL: [16, 32, 4096],
    "beta_fast": [16, 32],
    "beta_slow": [1, 2],
    "truncate": [True, False],
    "attention_factor": [None, 1.3],
    "mscale": [1.0, 0.7],
    "mscale_all_dim": [1.0, 0.7, 0],
}


def _table(chance: random.Random) -> dict[str, Any]:
    kind = chance.choice(["default", "yarn", "yarn", "llama3", "linear", None])
    table = {chance.choice(["rope_type", "type"]): kind} if kind else {}
    if kind == "yarn":
        drawn = {key: chance.choice(values) for key, values in _CHOICES.items()}
        table |= {k: v for k, v in drawn.items() if k == "factor" or chance.random() < 0.4}
    table |= {"llama3": _LLAMA3, "linear": {"factor": 2.0}}.get(kind or "", {})
    own = {"rope_theta": [500.0, 1e6], "partial_rotary_factor": [0.25, 0.5, 1.0]}
    return table | {k: chance.choice(v) for k, v in own.items() if chance.random() < 0.4}


def _drawn(chance: random.Random, rotated: int) -> dict[str, Any]:
    """Keys about rotary positions, at every place where some config.json has them."""
    first = {
        "rope_theta": [300.0, 2e6],
        "partial_rotary_factor": [0.25, 0.5, 1.0],
        "rotary_dim": [rotated, rotated // 2],
        _ORIGINAL: [64],
    }
    keys = {key: chance.choice(values) for key, values in first.items() if chance.random() < 0.4}
    tables = chance.choice(
        [[], ["rope_scaling"], ["rope_parameters"], ["rope_scaling", "rope_parameters"]]
    )
    return keys | {name: _table(chance) for name in tables}


def _read(settings: dict[str, Any], folder: Path) -> HFModel | None:
    """Ours; None if it is refused in a line that names a key."""
    (folder / "config.json").write_text(json.dumps(settings))
    try:
        return model_of(folder)
    except ConfigError as error:
        assert re.search(
            r"(rope|factor|mscale).*(not supported|is missing|even number)", str(error)
        )
    return None


@pytest.mark.parametrize("family", _PLAIN)
def test_drawn_rope_keys_agree_with_transformers_or_are_refused(
    family: str, tmp_path: Path
) -> None:
    base = {key: value for key, value in _PLAIN[family].items() if key not in _KEYS}
    chance, num_read = random.Random(family), 0
    for _ in range(16):
        settings = base | _drawn(chance, base.get("head_dim") or 8)
        config = AutoConfig.for_model(**json.loads(json.dumps(settings)))
        model = AutoModelForCausalLM.from_config(config).model
        theirs = model.rotary_emb.inv_freq.double()
        # As published, as transformers saves it, and as it is exported.
        first = _read(settings, tmp_path)
        num_read += first is not None
        forms = [settings, config.to_dict()] + ([first.settings()] if first else [])
        for form in forms:
            if (found := _read(form, tmp_path)) is None:
                assert first is None, form
                continue
            attention = next(each for each in found.config.attentions if each.rope)
            rope = attention.rope
            ours = inverse_frequencies(attention.rope_dim, rope)
            assert ours.shape == theirs.shape, settings
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0, msg=f"{settings}")
            factor = getattr(model.rotary_emb, "attention_scaling", 1.0)
            assert attention_factor(rope) == pytest.approx(factor, rel=1e-12), settings
            if "v2" not in base["model_type"] and softmax_factor(rope) != 1.0:
                width = base["qk_nope_head_dim"] + base["qk_rope_head_dim"]
                scale = width**-0.5 * softmax_factor(rope)
                assert model.layers[0].self_attn.scaling == pytest.approx(scale, rel=1e-12)
    assert num_read >= 5
