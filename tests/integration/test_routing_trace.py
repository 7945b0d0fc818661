"""Routing records, replays and workloads of whole runs, as a user makes them."""

from pathlib import Path

import pytest

from tests.support.jobs import run_train
from tests.support.trainings import make_job, train_here
from titan_moe.config.parse import load_job
from titan_moe.debug.router_load import Place, rows_of_experts
from titan_moe.debug.routing_record import Record
from titan_moe.metrics.jsonl import read_json_lines
from titan_moe.runtime.ranks import run_on_ranks


@pytest.mark.slow
def test_resumed_run_continues_its_record(tmp_path: Path) -> None:
    record = tmp_path / "record"
    tables = {
        "debug": {"routing_record": str(record)},
        "checkpoint": {"enable": True, "interval": 1},
    }
    run_on_ranks(train_here, 1, make_job(tmp_path / "run", steps=2, **tables))
    first = (record / "step-2.rank-0-of-1.npz").read_bytes()
    # A step that is run again, as after a kill between its part and its checkpoint.
    (record / "step-3.rank-0-of-1.npz").write_bytes(b"")
    run_on_ranks(train_here, 2, make_job(tmp_path / "run", steps=3, **tables))
    steps = Record(record).steps
    assert {step: len(parts) for step, parts in steps.items()} == {1: 1, 2: 1, 3: 2}
    assert (record / "step-2.rank-0-of-1.npz").read_bytes() == first


def test_a_workload_gives_experts_the_rows_that_it_names(tmp_path: Path) -> None:
    keys = {"parallelism__expert_parallel_degree": 4, "metrics__log_expert_counts": True}
    keys |= {"parallelism__expert_parallel_comm_backend": "balanced", "debug__router_load": "W6"}
    done = run_train(tmp_path / "run", {"NGPU": 4}, **keys)
    assert done.returncode == 0 and "debug.router_load=W6" in done.stdout, done.stderr
    config = load_job(["--job.config_file", str(tmp_path / "run" / "config.toml")])
    tokens = config.training.local_batch_size * config.training.seq_len
    counts = read_json_lines(tmp_path / "run" / "expert_counts.jsonl")
    for line in counts:
        step = line.pop("step")
        for of_layer in line.values():
            top_k = sum(of_layer) // (4 * tokens)
            places = [Place(n, 4, len(of_layer), top_k, config.debug.seed) for n in range(4)]
            rows = [rows_of_experts("W6", step, place, tokens) for place in places]
            assert of_layer == [sum(of_expert) for of_expert in zip(*rows, strict=True)]
    first, second = (next(iter(line.values())) for line in counts)
    assert first != second
