"""A step sends one all-reduce besides tokens and gradients."""

import json
import logging
import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support import trainings
from tests.support.documents import write_jsonl
from tests.support.operations import watch_collectives
from tests.support.tiny import batch_of, make_job, tiny_step
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig
from titan_moe.metrics.jsonl import read_json_lines
from titan_moe.models.hf import model_of_job
from titan_moe.parallelize.policies import make_plan
from titan_moe.runtime.position import POSITION
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.training.train_data import TrainData


def collectives_of_training(job: JobConfig) -> dict[int, list[str]]:
    """Trains; returns the collectives over the world in each step from the second on, in which the
    communicators and timeouts of the first are made."""
    found: defaultdict[int, list[str]] = defaultdict(list)

    def note(name, group):
        if group is dist.group.WORLD:
            found[POSITION.last().step].append(name)

    names = ("all_reduce", "broadcast", "all_gather_object", "all_gather", "barrier")
    watch_collectives(names, note)
    trainings.train_here(job)
    return {step: found[step] for step in range(2, job.training.steps)}


def test_a_step_is_one_all_reduce_also_if_it_is_logged_with_all_norms(tmp_path: Path):
    job = trainings.make_job(
        tmp_path,
        steps=5,
        metrics={"log_freq": 2, "log_parameter_norms": True},
        parallelism={"expert_parallel_degree": 2, "tensor_parallel_degree": 2},
        checkpoint={"enable": False},
    )
    expected = {step: ["all_reduce"] for step in (2, 3, 4)}
    assert run_on_ranks(collectives_of_training, 2, job) == [expected] * 2
    for name, key in {"metrics": "data", "parameter_norms": "output.weight"}.items():
        lines = read_json_lines(tmp_path / f"{name}.jsonl")
        assert [line["step"] for line in lines if key in line] == [1, 2, 4, 5]


def figures(job: JobConfig, logged: bool) -> list[float]:
    """Losses and norms of three steps, every one logged or none."""
    _, step = tiny_step(job)
    numbers = []
    for last in (False, False, True):
        result = step([batch_of(0, slice(2))], logged=logged or last)
        numbers += [result.loss, result.grad_norm]
    return [*numbers, result.metrics["balance_loss"]]


def gradient_sums(job: JobConfig) -> tuple[list[float], set[str]]:
    """Figures of three steps, and what the groups serve over which FSDP reduces."""
    descriptions = set()
    # Tokens travel by functional collectives.
    watch_collectives(["all_to_all_single"], lambda _, group: descriptions.add(group.group_desc))
    return figures(job, logged=True), descriptions


def test_gradients_travel_apart_from_parameters_and_their_sums_stay_the_same() -> None:
    parallelism, found = {"expert_parallel_degree": 2}, []
    for is_apart in (False, True):
        comm = {"separate_reduce_scatter": is_apart}
        job = make_job("qwen3", parallelism=parallelism, comm=comm)
        found.append(run_on_ranks(gradient_sums, 4, job))
    shared, apart = ([names for _, names in ranks] for ranks in found)
    assert shared == [{"default_pg", "edp"}] * 4
    assert apart == [{"gradients of dp_shard+fsdp+batch+loss", "gradients of edp"}] * 4
    assert [numbers for numbers, _ in found[0]] == [numbers for numbers, _ in found[1]]


def worst_loss(job: JobConfig, *rows: slice) -> tuple[float, float]:
    """The loss of a first step and the largest of a rank; each data rank reads some rows."""
    sharded, step = tiny_step(job)
    own = rows[sharded.meshes.dims.coordinate(sharded.meshes.rank, "batch")]
    result = step([batch_of(0, own)])
    return result.loss, result.metrics["max_loss"]


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_max_loss_is_that_of_one_data_rank_over_its_own_targets(axis: str):
    """Along tp, ranks share a batch; along pp, one counts its targets and another has its loss."""
    rows = slice(2), slice(7, 9)
    alone = [run_on_ranks(worst_loss, 1, make_job("qwen3"), each)[0] for each in rows]
    assert all(loss == worst for loss, worst in alone) and alone[0] != alone[1]
    degrees = {f"{axis}_parallel_degree": 2}
    job = make_job("qwen3", parallelism=degrees, training={"local_batch_size": 2})
    for loss, worst in run_on_ranks(worst_loss, 4, job, *rows):
        assert worst == pytest.approx(max(alone)[0], rel=1e-12) and worst > loss + 1e-3


def test_whether_a_step_is_logged_changes_nothing():
    """The layers' sums start again from zero after each step, logged or not."""
    job = make_job("deepseek_v3")
    assert run_on_ranks(figures, 1, job, True) == run_on_ranks(figures, 1, job, False)


def train_and_listen(job: JobConfig) -> list[str]:
    """Trains; returns the warnings of this rank."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("titan_moe").addHandler(handler)
    trainings.train_here(job)
    return lines


def test_documents_without_a_text_are_counted_once_in_every_layout(tmp_path: Path):
    """Ranks that read the same sequences do not count them twice; the log warns once."""
    words = [None, "a b c d", "e f", "g h i"] * 40
    training = {"dataset": "json", "dataset_path": write_jsonl(tmp_path / "a.jsonl", words)}
    key, says = "data/documents_without_text", "documents have no text"
    training |= {"repeat_dataset": True, "global_batch_size": 4, "seq_len": 16}
    counts = []
    for degree in (1, 2):
        folder = tmp_path / f"tp-{degree}"
        parallelism = {"tensor_parallel_degree": degree}
        how = {"training": training, "parallelism": parallelism, "checkpoint": {"enable": False}}
        said = run_on_ranks(train_and_listen, 2, trainings.make_job(folder, steps=3, **how))
        counts.append([line.get(key) for line in read_json_lines(folder / "metrics.jsonl")])
        (line,) = (line for line in said[0] if says in line)
        assert line.startswith(f"{counts[-1][0]} {says} by step 1") and not said[1]
        assert re.search(r"such as json/\d*[048]; data/", line)
    assert counts[0] == counts[1] and counts[0][0] < counts[0][-1]


@pytest.mark.slow
def test_epochs_of_conversations_end_after_the_same_steps_in_every_layout(tmp_path: Path):
    """The last batch is not full: some microbatches have no target. The log says once what is
    refused. One more epoch is packed where the others ended, and takes a step more."""
    pairs = [("a", None), *(("b" * (n % 5), "c" * (1 + n % 7)) for n in range(20))]
    lines = [json.dumps({"prompt": one, "completion": two}) + "\n" for one, two in pairs]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    training = {"dataset": "json", "dataset_path": str(tmp_path / "a.jsonl"), "seq_len": 16}
    training |= {"dataset_format": "messages", "epochs": 2, "global_batch_size": 4}
    training |= {"local_batch_size": 1, "dtype": "float64", "messages": {"max_refused": 0.05}}
    losses = []
    for degree in (1, 2):
        folder = tmp_path / f"tp-{degree}"
        parallelism = {"tensor_parallel_degree": degree}
        how = {"training": training, "parallelism": parallelism}
        said = run_on_ranks(train_and_listen, 2, trainings.make_job(folder, steps=90, **how))
        lines = read_json_lines(folder / "metrics.jsonl")
        losses.append([line["loss"] for line in lines])
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
        (line,) = (line for line in said[0] if "refused" in line)
        assert line.endswith(
            "1 of 21 conversations are refused: json/0: it is no conversation (1 so)"
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    training["epochs"] = 3
    run_on_ranks(train_and_listen, 2, trainings.make_job(folder, steps=90, **how))
    assert [line["step"] for line in read_json_lines(folder / "metrics.jsonl")][-1] == 8


def lines_about_roles(job: JobConfig) -> str:
    """Opens the data on this rank; returns the mistake in it."""
    try:
        process = trainings.process_here()
        TrainData(job, make_plan(job, model_of_job(job.model), process.world_size), process)
    except ConfigError as error:
        return " ".join(error.lines)
    return ""


def test_a_role_to_learn_must_be_in_a_conversation_that_any_rank_reads(tmp_path: Path):
    roles = [["user", "assistant"], ["user", "assistant", "tool"]] * 4
    talks = [{"messages": [{"role": role, "content": "a"} for role in each]} for each in roles]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    training = {"dataset": "json", "dataset_path": str(tmp_path / "a.jsonl")}
    training |= {"dataset_format": "messages", "global_batch_size": 2, "local_batch_size": 1}
    found = []
    for role in ("tool", "tol"):
        keys = {"training": training | {"messages": {"targets": ["assistant", role]}}}
        found.append(run_on_ranks(lines_about_roles, 2, trainings.make_job(tmp_path, **keys)))
    line = "training.messages.targets=['assistant', 'tol']: no conversation has the role 'tol': "
    assert found == [["", ""], [line + "leave it out, or mend it"] * 2]
