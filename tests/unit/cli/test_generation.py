"""Decoding takes the likeliest token of the whole text, whatever is kept of it."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.support.chat_templates import TEMPLATES, tokenizer_file
from tests.support.commands import run_command
from tests.support.documents import write_ranks
from tests.support.packing import filled
from titan_moe.cli import generation as generate
from titan_moe.cli.generation import decode, prompt_ids
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Messages, Training
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.models.cache import with_cache
from titan_moe.models.decoder import Decoder
from titan_moe.models.registry import FAMILIES, model_config

CACHED = [family for family in FAMILIES if family != "deepseek_v4"]  # Its blocks have no cache.


def _model(family: str, flavor: str = "gate", **changes: int) -> Decoder:
    return filled(replace(model_config(family, flavor), **changes)).eval()


def test_decode_takes_the_likeliest_token_of_the_last_max_seq_len() -> None:
    model = _model("qwen3", max_seq_len=16)
    tokenizer = load_tokenizer("bytes")
    ids = list(range(12))
    for token in decode(model, ids, tokenizer, max_new_tokens=8):
        with torch.no_grad():
            logits_V = model(torch.tensor([ids[-16:]]))[0, -1]
        assert token == int(logits_V[: tokenizer.vocab_size].argmax())
        ids = [*ids, token]
    assert len(ids) == 20


class _Script(torch.nn.Module):
    """Says one token after the other, whatever it reads."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__()
        self.config = model_config("qwen3", "gate")
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.core, self.layers = None, torch.nn.ModuleDict()
        self.output = torch.nn.Identity()
        self._tokens = iter(tokens)

    def hidden(self, *_: torch.Tensor) -> list[torch.Tensor]:
        return [functional.one_hot(torch.tensor([[next(self._tokens)]]), 600)]


@pytest.mark.parametrize("stop", [256 + 1, 256 + 9, 260, 261])
def test_decode_ends_at_the_end_of_a_text_and_of_a_turn(tmp_path: Path, stop: int) -> None:
    path = write_ranks(tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|eot_id|>"}')
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": [260, 261]}}')
    said = [*"né 🎉".encode()]
    tokenizer = load_tokenizer(path)
    model: Any = _Script([*said, stop, 97])
    assert tokenizer.decode(decode(model, [1], tokenizer)) == "né 🎉"


@pytest.mark.parametrize("bos", [True, False])
def test_prompt_begins_as_documents_do(tmp_path: Path, bos: bool) -> None:
    path = write_ranks(tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": bos}))
    ids = prompt_ids("a", load_tokenizer(path), vocab_size=600)
    assert ids == ([256, 97] if bos else [97])


def test_a_decoder_takes_tokens_alone() -> None:
    model = _model("llama4")
    tokens_BS = torch.randint(model.config.vocab_size, (2, 9))
    positions_BS = torch.arange(9).expand(2, -1)
    with torch.no_grad():
        said = model(tokens_BS, torch.zeros_like(tokens_BS), positions_BS)
        assert torch.equal(model(tokens_BS), said)


@pytest.mark.parametrize(
    ("family", "flavor"), [*product(CACHED, ["gate"]), ("deepseek_v32", "gate_shared")]
)
@torch.no_grad()
def test_logits_of_a_text_read_in_pieces_are_those_of_the_whole_text(
    family: str, flavor: str
) -> None:
    model = _model(family, flavor)
    for name, parameter in model.named_parameters():  # Gates and sinks that start at zero too.
        parameter.add_(torch.randn(parameter.shape).double() * 0.02 * ("A_log" not in name))
    tokens_BS = torch.randint(model.config.vocab_size, (2, 40))
    positions_BS = torch.arange(40).expand(2, -1)
    whole_BSV = model(tokens_BS)
    cached, before = with_cache(model), {n: t.clone() for n, t in model.state_dict().items()}
    pieces = [slice(0, 19), slice(19, 20), slice(20, 37), *(slice(n, n + 1) for n in (37, 38, 39))]
    for piece in pieces:
        logits_BSV = cached(tokens_BS[:, piece], positions_BS=positions_BS[:, piece])
        torch.testing.assert_close(logits_BSV, whole_BSV[:, piece], rtol=1e-9, atol=1e-11)
    assert torch.equal(model(tokens_BS), whole_BSV), "the model itself keeps nothing"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    shared = zip(cached.parameters(), model.parameters(), strict=True)
    assert all(ours is theirs for ours, theirs in shared), "no tensor is copied"


def test_tokens_without_a_batch_are_one_line() -> None:
    with pytest.raises(ValueError, match=r"^tokens have shape \[9\], not \[batch, sequence\]: "):
        _model("qwen3")(torch.arange(9))


def test_a_message_is_asked_as_the_chat_template_says_and_the_answer_ends_with_its_turn(
    tmp_path: Path,
) -> None:
    tokenizer_file(tmp_path)
    training = Training(dataset_format="messages", messages=Messages(template="chatml"))
    tokenizer = load_tokenizer(str(tmp_path), training)
    chat = {"messages": [{"role": "user", "content": "Why?"}]}
    ids = prompt_ids(chat, tokenizer, vocab_size=600)
    asked = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids) == asked
    end = tokenizer.encode("<|im_end|>")
    assert len(end) == 1
    (tmp_path / "strict.jinja").write_text("{{ raise_exception('a system message first') }}")
    strict = Messages(template=str(tmp_path / "strict.jinja"))
    refusing = load_tokenizer(str(tmp_path), Training(dataset_format="messages", messages=strict))
    with pytest.raises(ConfigError, match=r"'Why[?]'.* a system message first"):
        prompt_ids(chat, refusing, vocab_size=600)
    model: Any = _Script([*tokenizer.encode("So.").tolist(), *end.tolist(), 97])
    assert tokenizer.decode(decode(model, ids, tokenizer)) == "So."


def test_a_chat_begins_with_system_text_messages_and_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer_file(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES["qwen3"])
    tokenizer = load_tokenizer(str(tmp_path), Training(dataset_format="messages"))
    model, asked = SimpleNamespace(config=SimpleNamespace(vocab_size=600)), []
    monkeypatch.setattr(generate, "load_model", lambda *_, chat, **how: chat and (model, tokenizer))
    monkeypatch.setattr(generate, "decode", lambda _, ids, *__, **how: asked.append(ids) or [])
    run_command("generate", "x", "--chat", "--system", "Add.", "--prompt", "1?")
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1?"}]
    for talk in (messages, {"messages": messages, "tools": [{"name": "add"}]}):
        (tmp_path / "talk.json").write_text(json.dumps(talk))
        run_command("generate", "x", "--messages", tmp_path / "talk.json")
    given = "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1?<|im_end|>\n"
    given += "<|im_start|>assistant\n"
    tools = given.replace("Add.", 'Add.\n{"type": "function", "function": {"name": "add"}}')
    assert [tokenizer.decode(ids) for ids in asked] == [given, given, tools]
