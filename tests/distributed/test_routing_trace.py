"""Experts and keys recorded in one layout, or returned by an inference engine, are followed in any
other, token by token."""

import base64
import io
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import pytest
import torch

from tests.support.commands import run_command
from tests.support.paths import DEBUG_CONFIGS
from tests.support.tiers import tiered
from tests.support.trainings import train_curve
from titan_moe.config.parse import load_job
from titan_moe.data.batch import fingerprints, stack_sequences
from titan_moe.data.build import build_reader
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.debug import routing_record
from titan_moe.debug.routing_record import Record, SequenceName, Tokens, opened_file
from titan_moe.debug.routing_trace import FLIPS_FILE, RoutingTrace
from titan_moe.distributed.dtensor import local_part, local_slices
from titan_moe.metrics.jsonl import read_json_lines
from titan_moe.runtime.ranks import RankError
from titan_moe.training.trainer import Trainer
from titan_moe.verify.compare.records import RunRecord
from titan_moe.verify.compare.run_spec import RunSpec, parse_run_spec

ROWS, SEQ_LEN, LAST = 16, 64, "mtp.layers.0"
FIRST_KEYS, LAST_KEYS = "layers.0.attention.indexer", "mtp.layers.0.attention.indexer"
KEYS = {
    "training.steps": "2",
    "training.global_batch_size": str(ROWS),
    "training.local_batch_size": "8",
    # No trace may see an evaluation.
    "validation.enable": "true",
    "validation.freq": "1",
    "validation.steps": "1",
}


def run(
    folder: Path,
    layout: str,
    *,
    family: str = "deepseek_v3",
    replay: Path | None = None,
    alter: Callable[[Trainer], None] | None = None,
    **keys: Any,
) -> RunRecord:
    """Trains, records to the folder's `record`, and maybe follows another record. Keys without a
    table are those of [debug]."""
    named = {"routing_record": folder / "record", **keys}
    if replay is not None:
        named["routing_replay"] = replay
    words = tuple((k if "." in k else f"debug.{k}", str(value)) for k, value in named.items())
    spec = RunSpec(config=DEBUG_CONFIGS / f"gate_{family}.toml", overrides=tuple(KEYS.items()))
    return train_curve(parse_run_spec(f"layout={layout}", spec), folder / "run", words, alter=alter)


def flips(folder: Path) -> dict[str, list[int]]:
    """Returns how many decisions of each layer the run itself would make otherwise, by step."""
    lines = read_json_lines(folder / "run" / FLIPS_FILE)
    assert (lines[0]["slots"], lines[0].get("queries", 1024)) == (2048, 1024)
    return {layer: [line["flips"][layer] for line in lines] for layer in lines[0]["flips"]}


class Recorded(NamedTuple):
    record: Path
    curve: RunRecord


Records = Callable[[str], Recorded]
"""Makes a family's record, once."""


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Records:
    @cache
    def recorded(family: str) -> Recorded:
        folder = tmp_path_factory.mktemp("one")
        return Recorded(folder / "record", run(folder, "dp_shard=1", family=family))

    return recorded


def table(path: Path, step: int, layer: str) -> dict[tuple[SequenceName, int], tuple]:
    """(sequence, position) -> its experts, in their order, or its keys."""
    found: dict[tuple[SequenceName, int], tuple] = {}
    for file in Record(path).steps[step]:
        with opened_file(file) as ((sequences, positions), arrays):
            numbers_NPW = arrays[layer].tolist() if layer in arrays else []
        for sequence, numbers_PW in zip(sequences, numbers_NPW, strict=False):
            for position, numbers in zip(positions.tolist(), numbers_PW, strict=True):
                assert (sequence, position) not in found, "recorded twice"
                found[sequence, position] = tuple(numbers)
    return found


V3, V32 = "deepseek_v3", "deepseek_v32"
CASES = tiered(
    [(V3, "dp_shard=1", 3), (V3, "tp=2,ep=2", 0), (V32, "tp=2,recompute=full", 0)],
    slow=[
        (V3, "cp=2,recompute=op", 0),
        (V3, "pp=2,schedule=ZBVZeroBubble", 0),
        (V32, "cp=2,dp_shard=2,cp_method=allgather", 3),
    ],
    full=[
        (V3, "dp_shard=2,ep=2,recompute=full", 0),
        (V3, "pp=2,tp=2,schedule=DualPipeV", 0),
        (V3, "dp_replicate=2,cp=2,tp=2,ep=2,etp=2", 5),
        (V32, "pp=2,schedule=ZBVZeroBubble", 0),
        (V32, "pp=2,cp=2,tp=2,ep=2,cp_method=allgather,recompute=op", 5),
    ],
)


@pytest.mark.parametrize(("family", "layout", "order"), CASES)
def test_record_is_followed_in_any_layout(
    tmp_path: Path, one_process: Records, family: str, layout: str, order: int
) -> None:
    record, theirs = one_process(family)
    ours = run(tmp_path, layout, family=family, replay=record, permute_rows=order)
    np.testing.assert_allclose(ours.scalars["loss"], theirs.scalars["loss"], rtol=1e-12)
    assert all((ours.loads[layer] == loads).all() for layer, loads in theirs.loads.items())
    layers = flips(tmp_path)
    assert not any(map(any, layers.values()))
    assert list(layers)[-1] == (LAST if family == V3 else LAST_KEYS)
    for step in (1, 2):
        for layer in layers:
            expected = table(record, step, layer)
            assert len(expected) == ROWS * SEQ_LEN
            assert table(tmp_path / "record", step, layer) == expected


def route(ids: np.ndarray) -> np.ndarray:
    """Experts that an engine chooses for the last of these tokens, in 8 layers, the first dense."""
    every = np.tile(np.arange(8), (8, 1))
    experts_LK = np.random.default_rng(crc32(ids.tobytes())).permuted(every, axis=1)[:, :2]
    experts_LK[0] = 0
    return experts_LK


def sglang(experts_TLK: np.ndarray) -> dict[str, Any]:
    content = base64.b64encode(experts_TLK[2:-1].astype(np.uint8)).decode()
    about = {"routed_experts_dtype": "uint8", "routed_experts_start_len": 2}
    return {"routed_experts": content, **about}


def vllm(experts_TLK: np.ndarray) -> dict[str, Any]:
    """Experts in another order; of the first two tokens none are known."""
    experts_TLK = np.flip(experts_TLK, -1).astype(np.int16)
    experts_TLK[:2] = -1
    np.save(file := io.BytesIO(), experts_TLK[:-1])
    moe_layers = [*experts_TLK[:-1, 1:].tolist(), [[-1, -1]] * 7]
    forms = base64.b64encode(file.getvalue()).decode(), moe_layers
    return {"routed_experts": forms[len(experts_TLK) % 2]}


class Engine(NamedTuple):
    """A training in one process that follows the routes of SGLang's form."""

    folder: Path
    """The folder of the training, which also has a record for each form."""
    curve: RunRecord
    expected: dict[tuple[int, SequenceName, int], np.ndarray]
    """Experts by step, sequence and position."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Responses are the documents that begin in the midst of a sequence, a last one with more
    tokens than that has. The first tokens of most sequences end a document, and have no routes."""
    folder = tmp_path_factory.mktemp("engine")
    keys = [word for key, value in KEYS.items() for word in (f"--{key}", value)]
    words = ["--job.config_file", str(DEBUG_CONFIGS / "gate_deepseek_v3.toml"), *keys]
    job = load_job(words)
    tokenizer = load_tokenizer(job.model.tokenizer_path, job.training)
    reader = build_reader(job.training, tokenizer, seed=0, validation=job.validation)
    expected, responses = {}, {}
    for step in (1, 2):
        sequences = [each for microbatch in reader.read_step() for each in microbatch]
        names = routing_record.name_sequences(fingerprints(stack_sequences(sequences)))
        for name, sequence in zip(names, sequences, strict=True):
            for number in range(1, len(sequence.samples)):
                (at,) = (sequence.documents_S == number).nonzero()
                more = [97, 98, 99] if at[-1] == SEQ_LEN - 1 else []
                ids = np.append(sequence.tokens_S[at], more).astype(int)
                routes = [route(ids[: t + 1]) for t in range(len(ids))]
                responses[ids.tobytes()] = ids.tolist(), np.stack(routes)
                covered = range(2, min(len(at), len(ids) - 1))
                expected |= {(step, name, int(at[t])): routes[t] for t in covered}
    for form in (sglang, vllm):
        file, out = folder / f"{form.__name__}.jsonl", folder / form.__name__
        lines = [{"token_ids": ids, **form(routes)} for ids, routes in responses.values()]
        file.write_text("\n".join(map(json.dumps, lines)))
        done = run_command("routes", "import", file, *words, "--ranks", 1, "--out", out)
        assert done.returncode == 0 and "responses" in done.stdout, done.stderr
    return Engine(folder, run(folder, "dp_shard=1", replay=folder / "sglang"), expected)


OTHERS = tiered(["tp=2,ep=2"], slow=["cp=2,recompute=full", "pp=2,schedule=ZBVZeroBubble"])


@pytest.mark.parametrize("layout", OTHERS)
def test_routes_of_an_engine_are_followed_in_any_layout(
    tmp_path: Path, engine: Engine, layout: str
) -> None:
    ours = run(tmp_path, layout, replay=engine.folder / "vllm", permute_rows=3)
    np.testing.assert_allclose(ours.scalars["loss"], engine.curve.scalars["loss"], rtol=1e-12)
    both = (read_json_lines(folder / "run" / FLIPS_FILE) for folder in (tmp_path, engine.folder))
    for line, other in zip(*both, strict=True):
        assert all(line[key] == other[key] for key in ("replayed", "flips", "tokens"))
        # Chance: few of a token's 2 of 8 experts are the router's own.
        assert line["replayed"].pop(LAST) == line["tokens"].pop(LAST) == 0
        assert 300 < min(line["replayed"].values()) == max(line["replayed"].values()) < 1000
        assert all(line["tokens"][n] > 0.8 * total for n, total in line["replayed"].items())
    assert len(engine.expected) > 600
    for step in (1, 2):
        for layer in range(1, 8):
            found = table(tmp_path / "record", step, f"layers.{layer}")
            for (of, name, position), experts_LK in engine.expected.items():
                if of == step:
                    assert sorted(found[name, position]) == sorted(experts_LK[layer])


def shift_positions(trainer: Trainer) -> None:
    tokens = RoutingTrace._tokens

    def shifted(self: RoutingTrace, batches: Any) -> Tokens:
        sequences, positions = tokens(self, batches)
        return Tokens(sequences, np.roll(positions, 1))

    RoutingTrace._tokens = shifted  # type: ignore[method-assign]


def test_wrong_tokens_change_the_routing(tmp_path: Path, one_process: Records) -> None:
    record, theirs = one_process(V3)
    ours = run(tmp_path, "dp_shard=1", replay=record, alter=shift_positions)
    assert all(counts[0] > 50 for counts in flips(tmp_path).values())
    assert not np.allclose(ours.scalars["loss"], theirs.scalars["loss"], rtol=1e-6, atol=0)


def disturb(trainer: Trainer) -> None:
    """Changes routers, and indexers a little."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in trainer.sharded.named_parameters():
        if "router.gate" in name or "indexer.wk.weight" in name:
            noise = torch.randn(parameter.shape, generator=generator)
            local_part(parameter.data)[:] += 1e-2 * noise[local_slices(parameter)]


@pytest.mark.parametrize("family", tiered([V3], slow=[V32]))
def test_replay_binds_a_disturbed_model(tmp_path: Path, one_process: Records, family: str) -> None:
    record, _ = one_process(family)
    run(tmp_path, "tp=2", family=family, replay=record, alter=disturb)
    counts = flips(tmp_path)
    for layer in counts:
        assert table(tmp_path / "record", 1, layer) == table(record, 1, layer)
    assert counts[LAST][0] > 0, "the router itself would have chosen otherwise"
    run(tmp_path / "one", "dp_shard=1", family=family, replay=record, alter=disturb)
    ours, theirs = (read_json_lines(d / "run" / FLIPS_FILE) for d in (tmp_path, tmp_path / "one"))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["tokens"] == other["tokens"]
        for layer, margins in other["margins"].items():
            assert mine["margins"][layer] == pytest.approx(margins, rel=1e-6)
    if family == V32:  # Nothing comes before the first layer's keys.
        run(tmp_path / "live", "dp_shard=2", family=family, alter=disturb)
        live = table(tmp_path / "live/record", 1, FIRST_KEYS)
        recorded = table(record, 1, FIRST_KEYS)
        assert counts[FIRST_KEYS][0] == sum(keys != recorded[q] for q, keys in live.items()) > 0


def test_record_of_other_data_is_refused(tmp_path: Path, one_process: Records) -> None:
    with pytest.raises(
        RankError, match=r"step 1 of .* has no routing of layers.1 for the sequence"
    ):
        run(tmp_path, "dp_shard=1", replay=one_process(V3).record, seed=1)


def test_record_of_another_document_mask_is_refused(tmp_path: Path, one_process: Records) -> None:
    record, crosses = one_process(V32).record, {"training.mask_documents": "false"}
    with pytest.raises(RankError, match="with across_documents=False, this run has True"):
        run(tmp_path, "dp_shard=1", family=V32, replay=record, **crosses)
