"""A train_state.json whose values were changed: read, or refused in one line that names the key."""

import base64
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fuzz.damage import ODD_VALUES, places
from tests.fuzz.verdict import refused
from tests.support.documents import ListCorpus, random_texts
from tests.support.streams import order, texts_of_files
from titan_moe.bad_steps import BadSteps
from titan_moe.checkpoint.train_state import (
    get_random_state,
    merge_rank_states,
    read_train_state,
    set_random_state,
)
from titan_moe.config.job_config import Training
from titan_moe.data.document_order import CorpusOrder, Split
from titan_moe.data.position import check_position
from titan_moe.data.sequences import BlendSource, SequenceStream
from titan_moe.data.step_reader import Identity, StepReader, continue_state, merge_states
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.runtime.errors import RunError

_STEP = 5
_IDENTITY = Identity("list", 3, 2, 16, "c")
_TOKENIZER = load_tokenizer("bytes")
_TEXTS = random_texts(40)


def _reader() -> StepReader:
    """Of a corpus with a bad document and a stream of five files."""
    corpus = ListCorpus(_TEXTS)
    parts = [
        BlendSource(CorpusOrder("corpus", corpus, split=Split.ALL, seed=3, repeat=True), 2.0),
        BlendSource(
            order(texts_of_files([3, 9, 4, 1, 30]), sequences=range(2), batch=2, repeat=True), 1.0
        ),
    ]
    streams = [
        SequenceStream(
            index,
            parts=parts,
            tokenizer=_TOKENIZER,
            seed=3,
            global_batch_size=2,
            seq_len=16,
            mask_documents=True,
        )
        for index in range(2)
    ]
    return StepReader(streams, parts, identity=_IDENTITY, local_batch_size=2, max_bad_documents=1)


def _saved() -> tuple[dict[str, Any], list[Any]]:
    """What a checkpoint keeps after some steps, and the batches of the next."""
    reader = _reader()
    for _ in range(_STEP):
        reader.read_step()
    common = {"step": _STEP, "tokens": 320, "bad_steps": {"norms": [1.5, 2.0], "skipped": 1}}
    state: dict[str, Any] = {**common, "data": reader.state_dict(), "rng": get_random_state()}
    state["data"]["bad"] = [[1, "list/3 has no text"], [0, ""]]
    saved = json.loads(json.dumps(merge_rank_states([state], merge_states)))
    return saved, reader.read_step()[0]


def _go_on(folder: Path) -> list[Any]:
    """As a run: what it reads next. RunError."""
    saved = read_train_state(folder, _STEP)
    check_position(saved["data"])
    reader, steps = _reader(), BadSteps(Training(spike_factor=2.0))
    reader.load_state_dict(continue_state(saved["data"], _IDENTITY, _IDENTITY)[0])
    steps.load_state(saved["common"])
    steps.is_spike(3.0)
    if len(saved["rng"]) == 1:  # Else of another number of ranks: they start fresh.
        set_random_state(saved["rng"][0])
    batches = reader.read_step()[0]
    json.dumps([merge_states([reader.state_dict()]), steps.state(), saved["common"]["tokens"] + 1])
    return batches


def _write(folder: Path, state: dict[str, Any]) -> None:
    """Without digests: a program that changes a file can write its digest too."""
    (folder / "train_state.json").write_text(json.dumps(state))


def _changed(state: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The state with each value replaced by each odd one, and without it."""
    for number, (kept, key) in enumerate(places(state)):
        if isinstance(kept, list) and len(kept) == 4 and key == 3:
            continue  # A stream's own place: only it can say what that may be.
        for odd in [*ODD_VALUES, _REMOVED]:
            other = copy.deepcopy(state)
            inside: Any = list(places(other))[number][0]
            inside[key] = odd
            if odd is _REMOVED:
                del inside[key]
            yield f"{key} is {str(odd)[:40]}", other


_REMOVED = object()


def _same(one: list[Any], other: list[Any]) -> bool:
    return all(
        (getattr(a, name) == getattr(b, name)).all()
        for a, b in zip(one, other, strict=True)
        for name in ("tokens_BS", "labels_BS")
    )


def test_every_value_of_a_train_state(tmp_path: Path) -> None:
    state, expected = _saved()
    _write(tmp_path, state)
    assert _same(_go_on(tmp_path), expected)
    before, counts = torch.get_rng_state(), {"read": 0, "refused": 0}
    for what, changed in _changed(state):
        _write(tmp_path, changed)
        try:
            _go_on(tmp_path)
            counts["read"] += 1
        except RunError as error:
            assert refused([str(error)]).kind == "refused", (what, error)
            assert "train_state.json" in str(error) or "the checkpoint" in str(error), what
            counts["refused"] += 1
        except Exception as error:
            raise AssertionError(f"{what}: {error!r}") from error
    torch.set_rng_state(before)
    assert counts["refused"] > 1000


@pytest.mark.parametrize("state", ["", "AAAA", base64.b64encode(bytes(5056)).decode()])
def test_a_random_state_that_is_none_is_refused(tmp_path: Path, state: str) -> None:
    saved, _ = _saved()
    saved["rng"][0]["cpu"] = state
    _write(tmp_path, saved)
    with pytest.raises(RunError, match=r"train_state.json is damaged: rng.0 is no state"):
        read_train_state(tmp_path)


def test_the_key_is_named(tmp_path: Path) -> None:
    saved, _ = _saved()
    saved["common"]["bad_steps"]["norms"][1] = "2.0"
    _write(tmp_path, saved)
    with pytest.raises(RunError, match=r"train_state.json is damaged: common.bad_steps.norms.1: "):
        read_train_state(tmp_path)
    saved["common"] = {"step": _STEP + 1, "tokens": 1}
    _write(tmp_path, saved)
    with pytest.raises(RunError, match=f"train_state.json is damaged: common.step is not {_STEP}"):
        read_train_state(tmp_path, _STEP)


def test_a_stream_does_not_go_on_behind_what_is_asked_for() -> None:
    stream = order(texts_of_files([9]), sequences=[0], batch=1)
    stream.seek([[6, 0, 6, 6]], [0])
    assert stream.document(7).content == "0.7"
    with pytest.raises(RunError, match="damaged: document 3 lies before 8, its place"):
        stream.document(3)
