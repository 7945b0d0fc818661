"""A spike's event names the bad document, in any layout, and the run is none the worse for it."""

from pathlib import Path

import pytest

from tests.support.documents import build_loader, write_jsonl
from tests.support.tiers import tiered
from tests.support.trainings import make_job, train_with_faults
from titan_moe.config.job_config import JobConfig
from titan_moe.data.builtin import SyntheticCorpus
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.metrics.jsonl import EVENTS, read_json_lines
from titan_moe.runtime.ranks import run_on_ranks

STEP = 11


def documents_of(job: JobConfig) -> list[str]:
    """The documents of one sequence of the step."""
    place = {"seed": 0, "rank": 0, "num_ranks": 1, "global_batch_size": 4}
    loader = build_loader(job.training, load_tokenizer("bytes"), validation=job.validation, **place)
    for _ in range(STEP):
        (*_, batch) = loader.next_step()
    loader.close()
    return batch.samples[-1]


@pytest.mark.parametrize(
    ("ranks", "parallelism"),
    tiered(
        [(1, {})],
        slow=[
            (2, {"context_parallel_degree": 2}),
            (4, {"context_parallel_degree": 2, "pipeline_parallel_degree": 2}),
            (2, {"expert_parallel_degree": 2}),
            (4, {"tensor_parallel_degree": 2, "expert_parallel_degree": 4}),
            (4, {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"}),
        ],
    ),
)
def test_spike_names_worst_sequences(tmp_path: Path, ranks: int, parallelism: dict[str, object]):
    corpus, dump = tmp_path / "corpus.jsonl", tmp_path / "run"
    words = SyntheticCorpus(0)
    texts = [str(words[number].content)[:80].ljust(80, ".") for number in range(300)]

    write_jsonl(corpus, texts)
    job = make_job(
        dump,
        steps=STEP + 1,
        training={
            "seq_len": 128,
            "global_batch_size": 4,
            "dataset": "json",
            "dataset_path": str(corpus),
            "spike_factor": 10,
            "on_spike": "skip",
        },
        optimizer={"lr": 3e-3},
        checkpoint={"enable": False},
        parallelism=parallelism,
    )
    holds = documents_of(job)
    number = int("".join(filter(str.isdecimal, holds[1].rpartition("/")[2] or holds[1])))
    texts[number] = "~\x01" * 40
    write_jsonl(corpus, texts)
    run_on_ranks(train_with_faults, ranks, job, {STEP: "spike"})
    (event,) = read_json_lines(dump / EVENTS)
    worst = event["worst_sequences"]
    assert (event["step"], event["event"], len(worst)) == (STEP, "spike", 4)
    assert worst[0]["documents"] == holds
    losses = [sequence["loss"] for sequence in worst]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[1] + 0.3
    total = sum(sequence["loss"] * sequence["targets"] for sequence in worst)
    targets = sum(sequence["targets"] for sequence in worst)
    assert total / targets == pytest.approx(event["loss"], rel=1e-5)
