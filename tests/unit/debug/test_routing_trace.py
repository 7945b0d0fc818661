"""Routing records: any ranks read what others wrote, and a layer follows its tokens."""

import io
import logging
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.refusals import failure, refusal, refusals
from titan_moe.debug.routing_record import (
    Dims,
    Record,
    RecordWriter,
    SequenceName,
    Tokens,
    name_sequences,
    start_record,
)
from titan_moe.debug.routing_trace import Kept, Replay, flipped_experts
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.layer import MoE

N, P, K, E = 6, 8, 2, 300
DIMS = Dims(["layers.1", "mtp.layers.0"], E, K)
# The same sequence three times.
FINGERPRINTS = [7, 4_000_000_000, 7, 1, 2, 7]
PARTS = {
    # Two data ranks by two parts of the sequence, of which one is head and tail.
    "dp 2, cp 2": [(r, p) for r in ([0, 1, 2], [3, 4, 5]) for p in ([0, 1, 6, 7], [2, 3, 4, 5])],
    "sequences in another order": [([5, 3, 1], list(range(P))), ([0, 2, 4], list(range(P)))],
    "one": [(list(range(N)), list(range(P)))],
}


def whole(step: int = 1) -> dict[str, np.ndarray]:
    """Experts of all sequences and positions, by layer."""
    generator = np.random.default_rng(step)
    every = np.tile(np.arange(E), (N, P, 1))
    return {
        name: generator.permuted(every, axis=-1)[..., :K].astype(np.uint16) for name in DIMS.layers
    }


def tokens_of(sequences: list[int], positions: list[int]) -> Tokens:
    names = name_sequences(FINGERPRINTS)
    return Tokens([names[number] for number in sequences], np.array(positions))


EVERYTHING = tokens_of(*PARTS["one"][0])


def write(folder: Path, parts: list, steps: int = 1, limit_gb: float = 1.0) -> None:
    start_record(folder, DIMS, after=0)
    for rank, (sequences, positions) in enumerate(parts):
        writer = RecordWriter(folder, rank=rank, world_size=len(parts), limit_gb=limit_gb)
        for step in range(1, steps + 1):
            experts = {
                name: x_NPK[np.ix_(sequences, positions)] for name, x_NPK in whole(step).items()
            }
            writer.write(step, tokens_of(sequences, positions), experts)


def experts(record: Record, tokens: Tokens, layers: list[str] = DIMS.layers) -> dict:
    """Returns the record's decisions of step 1 about these tokens, by layer."""
    return record.decisions(1, dict.fromkeys(layers, (tokens, DIMS.experts)))


@pytest.mark.parametrize("written", PARTS)
@pytest.mark.parametrize("read", PARTS)
def test_record_is_read_by_other_ranks(tmp_path: Path, written: str, read: str) -> None:
    write(tmp_path, PARTS[written])
    record, open_files = Record(tmp_path), len(os.listdir("/proc/self/fd"))
    assert record.dims == DIMS and list(record.steps) == [1]
    for sequences, positions in PARTS[read]:
        for name, experts_NPK in experts(record, tokens_of(sequences, positions)).items():
            assert (experts_NPK == whole()[name][np.ix_(sequences, positions)]).all()
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_step_counts_when_every_rank_wrote_its_layers(tmp_path: Path) -> None:
    """Ranks of a pipeline have other layers, or none."""
    start_record(tmp_path, DIMS, after=0)
    for rank, layers in enumerate([["layers.1"], ["mtp.layers.0"], []]):
        assert list(Record(tmp_path).steps) == []
        writer = RecordWriter(tmp_path, rank=rank, world_size=3, limit_gb=1)
        writer.write(1, EVERYTHING, {layer: whole()[layer] for layer in layers})
    for name, experts_NPK in experts(Record(tmp_path), EVERYTHING).items():
        assert (experts_NPK == whole()[name]).all()
    part = tmp_path / "step-1.rank-1-of-3.npz"
    part.rename(tmp_path / f".{part.name}.tmp")
    assert list(Record(tmp_path).steps) == [], "half written"


def test_record_writer_stops_at_its_limit(tmp_path: Path, caplog) -> None:
    size = sum(x_NPK.nbytes for x_NPK in whole().values())
    with caplog.at_level(logging.WARNING):
        write(tmp_path, PARTS["one"], steps=4, limit_gb=2.5 * size / 1e9)
    assert list(Record(tmp_path).steps) == [1, 2]
    (warning,) = caplog.messages
    assert f"{tmp_path} ends before step 3: a rank reached debug.routing_record_gb=" in warning
    # A run that goes on counts what is there.
    writer = RecordWriter(tmp_path, rank=0, world_size=1, limit_gb=2.5 * size / 1e9)
    writer.write(3, EVERYTHING, whole(3))
    assert list(Record(tmp_path).steps) == [1, 2]


def test_start_record_drops_steps_that_run_again(tmp_path: Path) -> None:
    folder = tmp_path / "record"
    write(folder, PARTS["dp 2, cp 2"], steps=3)
    start_record(folder, DIMS, after=2)
    assert list(Record(folder).steps) == [1, 2]
    # In another layout.
    RecordWriter(folder, rank=0, world_size=1, limit_gb=1).write(3, EVERYTHING, whole(3))
    assert list(Record(folder).steps) == [1, 2, 3]
    again = partial(start_record, folder, Dims(DIMS.layers, E, 3), after=2)
    assert "was recorded with top_k=2, this run has 3" in refusal(again)


def test_start_record_sets_earlier_records_aside(tmp_path: Path) -> None:
    for steps in (3, 2, 1):
        write(tmp_path / "record", PARTS["one"], steps=steps)
    lengths = [len(Record(tmp_path / name).steps) for name in ("record.1", "record.2", "record")]
    assert lengths == [3, 2, 1]


def test_damaged_record_is_one_line(tmp_path: Path) -> None:
    write(tmp_path, PARTS["one"])
    part = tmp_path / "step-1.rank-0-of-1.npz"
    content = part.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 3] ^= 1
    np.save(single := io.BytesIO(), np.zeros(3))
    for damaged in (content[:-100], b"", b"text", bytes(flipped), single.getvalue()):
        part.write_bytes(damaged)
        line = failure(experts, Record(tmp_path), EVERYTHING)
        assert "0-of-1.npz is damaged, or no file of a " in line


def test_record_names_what_it_lacks(tmp_path: Path) -> None:
    nothing = f"{tmp_path}: there is no routing record (record.json)"
    assert refusal(Record, tmp_path) == nothing
    (tmp_path / "record.json").write_text('{"layers": []}')
    assert refusal(Record, tmp_path) == nothing
    write(tmp_path, PARTS["one"])
    record = Record(tmp_path)
    line = failure(experts, record, Tokens([SequenceName(0xBAD, 0)], np.arange(P)))
    assert line.startswith("step 1 of ")
    assert "no routing of layers.1 for the sequence 00000bad" in line
    further = Tokens(name_sequences(FINGERPRINTS), np.arange(P + 1))
    line = failure(experts, record, further)
    assert "for the sequence 00000007 at position 8: it is of other data" in line
    assert "no routing of layers.2" in failure(experts, record, EVERYTHING, ["layers.2"])
    sparse = DIMS._replace(index_top_k=6, across_documents=True)
    differs, key = partial(record.check, key="debug.routing_replay"), "debug.routing_replay="
    first, second = refusals(differs, sparse)
    assert first.startswith(key) and "with index_top_k=0, this run has 6: name a record" in first
    assert "with across_documents=False, this run has True" in second
    start_record(tmp_path / "sparse", sparse, after=0)
    assert Record(tmp_path / "sparse").dims == sparse


def test_layer_follows_microbatches_one_after_the_other(tmp_path: Path) -> None:
    torch.manual_seed(0)
    moe = MoE(8, MoEConfig(num_experts=4, top_k=2, hidden_dim=8), None)
    for parameter in moe.parameters():
        parameter.data.normal_()
    select, form = moe.router.select, Dims(["layers.1"], 4, 2).experts
    moe.router.select = replay = Replay(select, form, tmp_path, flipped_experts)
    assert f"Replay(\n      decisions of {tmp_path}" in repr(moe), "a printed model says it"
    kept = Kept(replay, form)
    ahead = [[0, 1], [1, 2], [3, 0], [2, 3], [0, 1]]
    # No expert: the router decides.
    replay.follow(torch.tensor([[*ahead, [4, 4]]], dtype=torch.uint16))
    x_BSD = torch.cat([torch.randn(1, 5, 8), torch.randn(1, 1, 8)], 1)
    moe(x_BSD[:, :2])
    moe.train(False)
    moe(x_BSD)
    moe.train(True)
    with pytest.raises(AssertionError, match="tokens without a decision"):
        replay.take_flips()
    moe(x_BSD[:, 2:])
    scores_TE = moe.router(x_BSD[0]).scores_TE.detach()
    (*followed, decided) = kept.take(1)[0].tolist()
    assert followed == ahead and decided == scores_TE[-1].topk(2).indices.tolist()
    scores_TE = scores_TE[:-1]
    own = [set(chosen) for chosen in select(scores_TE, moe.router.expert_bias).tolist()]
    flips = sum(len(mine - set(e)) for mine, e in zip(own, ahead, strict=True))
    replayed, slots, tokens, margins, largest = replay.take_flips().tolist()
    assert replayed == 5
    found = [
        max(s[e] for e in mine - set(theirs)) - min(s[e] for e in set(theirs) - mine)
        for s, mine, theirs in zip(scores_TE / scores_TE.std(1)[:, None], own, ahead, strict=True)
        if mine != set(theirs)
    ]
    assert slots == flips > 0 and tokens == len(found) < flips
    assert margins == pytest.approx(sum(map(float, found))) and largest == pytest.approx(max(found))
    counts = torch.tensor([*ahead, decided]).flatten().bincount(minlength=4)
    assert moe.router.tokens_per_expert.tolist() == counts.tolist()
