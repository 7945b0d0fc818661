"""Routing records: what was written by some ranks is read by any others."""

import logging
from pathlib import Path

import numpy as np
import pytest

from titan_moe.config.errors import ConfigError
from titan_moe.routing.record import (
    Dims,
    Record,
    RecordWriter,
    Routing,
    RowName,
    Tokens,
    name_rows,
    start_record,
)
from titan_moe.runtime.errors import RunError

R, P, K, E = 6, 8, 2, 300
DIMS = Dims(["layers.1", "mtp.layers.0"], E, K)
# The same row three times.
FINGERPRINTS = [7, 4_000_000_000, 7, 1, 2, 7]


def whole(step: int = 1) -> dict[str, Routing]:
    """Of all rows and positions."""
    generator = np.random.default_rng(step)
    return {
        name: Routing(
            generator.permuted(np.tile(np.arange(E), (R, P, 1)), axis=-1)[..., :K].astype(
                np.uint16
            ),
            generator.random((R, P, K), dtype=np.float32),
        )
        for name in DIMS.layers
    }


def tokens_of(rows: list[int], positions: list[int]) -> Tokens:
    names = name_rows(FINGERPRINTS)
    return Tokens([names[row] for row in rows], np.array(positions))


def cut(routings: dict[str, Routing], rows: list[int], positions: list[int]) -> dict[str, Routing]:
    box = np.ix_(rows, positions)
    return {name: Routing(*(x_RPK[box] for x_RPK in both)) for name, both in routings.items()}


PARTS = {
    # Two data ranks by two parts of the sequence, of which one is head and tail.
    "dp 2, cp 2": [(r, p) for r in ([0, 1, 2], [3, 4, 5]) for p in ([0, 1, 6, 7], [2, 3, 4, 5])],
    "rows in another order": [([5, 3, 1], list(range(P))), ([0, 2, 4], list(range(P)))],
    "one": [(list(range(R)), list(range(P)))],
}


def write(folder: Path, parts: list, steps: int = 1, limit_gb: float = 1.0) -> None:
    start_record(folder, DIMS, after=0)
    for rank, (rows, positions) in enumerate(parts):
        writer = RecordWriter(folder, rank=rank, world_size=len(parts), limit_gb=limit_gb)
        for step in range(1, steps + 1):
            routings = cut(whole(step), rows, positions)
            writer.write(step, tokens_of(rows, positions), routings)


@pytest.mark.parametrize("written", PARTS)
@pytest.mark.parametrize("read", PARTS)
def test_any_ranks_read_what_others_wrote(tmp_path: Path, written: str, read: str) -> None:
    write(tmp_path, PARTS[written])
    record = Record(tmp_path)
    assert record.dims == DIMS and record.steps == [1]
    for rows, positions in PARTS[read]:
        for name, expected in cut(whole(), rows, positions).items():
            tokens = tokens_of(rows, positions)
            assert (record.step(1).experts(name, tokens) == expected.experts_RPK).all()
            assert (record.step(1).weights(name, tokens) == expected.weights_RPK).all()


def test_a_pipelines_ranks_hold_other_layers(tmp_path: Path) -> None:
    start_record(tmp_path, DIMS, after=0)
    everything = list(range(R)), list(range(P))
    for rank, layer in enumerate(DIMS.layers):
        writer = RecordWriter(tmp_path, rank=rank, world_size=3, limit_gb=1)
        writer.write(1, tokens_of(*everything), {layer: whole()[layer]})
    assert Record(tmp_path).steps == [], "rank 2, of no MoE layer, has not written yet"
    writer = RecordWriter(tmp_path, rank=2, world_size=3, limit_gb=1)
    writer.write(1, tokens_of(*everything), {})
    step = Record(tmp_path).step(1)
    for name, routing in whole().items():
        assert (step.experts(name, tokens_of(*everything)) == routing.experts_RPK).all()


def test_equal_rows_are_numbered_over_all_ranks() -> None:
    first = name_rows(FINGERPRINTS[:3])
    second = name_rows(FINGERPRINTS[3:], before=FINGERPRINTS[:3])
    assert first + second == name_rows(FINGERPRINTS)
    assert [row.number for row in name_rows(FINGERPRINTS)] == [0, 0, 1, 0, 0, 2]
    assert second[2] == RowName(7, 2)


def test_a_rank_stops_at_the_size_it_is_given(tmp_path: Path, caplog) -> None:
    write(tmp_path, PARTS["one"], steps=3)
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("step-*"))]
    (size, *_), total = sizes, sum(sizes)
    # Two of three, and then no more, even if one would be small enough.
    with caplog.at_level(logging.WARNING):
        write(tmp_path / "less", PARTS["one"], steps=4, limit_gb=(total - 1) / 1e9)
    assert Record(tmp_path / "less").steps == [1, 2]
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("no routings are recorded from step 3 on: a rank's part of ")
    assert "has reached debug.routing_record_gb=" in warning
    assert not list((tmp_path / "less").glob(".*")), "nothing half written stays"
    # A run that goes on counts what is there.
    writer = RecordWriter(tmp_path / "less", rank=0, world_size=1, limit_gb=2.5 * size / 1e9)
    writer.write(3, tokens_of(*PARTS["one"][0]), whole(3))
    assert Record(tmp_path / "less").steps == [1, 2]


def test_ranks_stop_together(tmp_path: Path) -> None:
    """The step of which one rank's part does not fit is on no rank."""
    start_record(tmp_path, DIMS, after=0)
    votes: list[bool] = []

    def agree(fits: bool) -> bool:
        votes.append(fits)
        return len(votes) == 1

    writer = RecordWriter(tmp_path, rank=0, world_size=1, limit_gb=1, agree=agree)
    for step in (1, 2, 3):
        writer.write(step, tokens_of(*PARTS["one"][0]), whole(step))
    assert votes == [True, True] and writer.full
    assert Record(tmp_path).steps == [1]


def test_a_run_that_resumes_drops_what_it_runs_again(tmp_path: Path) -> None:
    folder = tmp_path / "record"
    write(folder, PARTS["dp 2, cp 2"], steps=3)
    start_record(folder, DIMS, after=2)
    assert Record(folder).steps == [1, 2]
    # In another layout.
    writer = RecordWriter(folder, rank=0, world_size=1, limit_gb=1)
    writer.write(3, tokens_of(*PARTS["one"][0]), whole(3))
    assert Record(folder).steps == [1, 2, 3]
    with pytest.raises(ConfigError, match=r"is of a model with top_k=2, this one has 3"):
        start_record(folder, Dims(DIMS.layers, E, 3), after=2)


def test_a_run_that_begins_sets_an_earlier_record_aside(tmp_path: Path) -> None:
    folder = tmp_path / "record"
    for steps in (3, 2, 1):
        write(folder, PARTS["one"], steps=steps)
    assert Record(folder).steps == [1]
    assert Record(tmp_path / "record.1").steps == [1, 2, 3]
    assert Record(tmp_path / "record.2").steps == [1, 2]


def test_what_is_half_written_is_never_read(tmp_path: Path) -> None:
    write(tmp_path, PARTS["dp 2, cp 2"], steps=2)
    part = tmp_path / "step-2.rank-1-of-4.npz"
    part.rename(tmp_path / f".{part.name}.tmp")
    assert Record(tmp_path).steps == [1]


def test_damage_is_one_line(tmp_path: Path) -> None:
    tokens = tokens_of(*PARTS["one"][0])
    write(tmp_path, PARTS["one"])
    part = tmp_path / "step-1.rank-0-of-1.npz"
    content = part.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 3] ^= 1
    for damaged in (content[:-100], b"", b"text", bytes(flipped)):
        part.write_bytes(damaged)
        with pytest.raises(
            RunError, match=r"step-1.rank-0-of-1.npz is damaged, or no part of a record: "
        ) as error:
            for layer in DIMS.layers:
                Record(tmp_path).step(1).experts(layer, tokens)
                Record(tmp_path).step(1).weights(layer, tokens)
        assert "\n" not in str(error.value)
    part.write_bytes(content)
    (tmp_path / "record.json").write_text('{"layers": ["layers.1"], "num_experts": 9, "top_k": 2}')
    with pytest.raises(RunError, match=r"is damaged, .*: expert \d+ of 9 in layers.1"):
        Record(tmp_path).step(1).experts("layers.1", tokens)


def test_a_changed_header_is_one_line(tmp_path: Path) -> None:
    write(tmp_path, PARTS["one"])
    header = tmp_path / "record.json"
    header.write_text(header.read_text().replace(f'"top_k": {K}', f'"top_k": {K + 1}'))
    with pytest.raises(ConfigError, match=r"record.json is damaged: wrong CRC32$"):
        Record(tmp_path)


def test_a_part_that_claims_to_be_huge_is_not_unpacked() -> None:
    from titan_moe.routing.record import _pack, _unpack

    with pytest.raises(ValueError, match="134217728 bytes instead of 8"):
        _unpack(_pack(np.zeros(2**25, np.float32)), np.float32, (2,))


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no routing record \(record.json\)"):
        Record(tmp_path)
    write(tmp_path, PARTS["one"])
    step = Record(tmp_path).step(1)
    stranger = Tokens([RowName(0xBAD, 0)], np.arange(P))
    with pytest.raises(RunError, match=r"step 1 of .* no routing of layers.1 for the row 00000bad"):
        step.experts("layers.1", stranger)
    further = Tokens(name_rows(FINGERPRINTS), np.arange(P + 1))
    with pytest.raises(RunError, match=r"for the row 00000007 at position 8: it is of other data"):
        step.experts("layers.1", further)
    with pytest.raises(RunError, match=r"no routing of layers.2"):
        step.experts("layers.2", Tokens(name_rows(FINGERPRINTS), np.arange(P)))


def test_numbers_of_experts_take_a_byte_at_most() -> None:
    """Their high bytes, all zero, cost nothing; nor do the exponents of weights."""
    from titan_moe.routing.record import _pack, _unpack

    generator = np.random.default_rng(0)
    experts = generator.integers(0, 64, (4096, 8)).astype(np.uint16)
    weights = generator.random((4096, 8), dtype=np.float32)
    assert (_unpack(_pack(experts), np.uint16, (4096, 8)) == experts).all()
    assert (_unpack(_pack(weights), np.float32, (4096, 8)) == weights).all()
    assert len(_pack(experts)) < 0.8 * experts.size
    assert len(_pack(weights)) < 3.4 * weights.size
