"""Runs as users write them."""

from pathlib import Path

import pytest

from tests.support.refusals import refusal
from tests.support.stub_runs import COMMON, COMPARE
from titan_moe.verify.compare.control_runs import batch_words, control_specs
from titan_moe.verify.compare.run_spec import RunSpec, parse_overrides, parse_run_spec


def argument(side: RunSpec, key: str) -> str | None:
    words = side.arguments()
    return words[words.index(f"--{key}") + 1] if f"--{key}" in words else None


def test_run_takes_what_it_leaves_out_from_the_common_options():
    side = parse_run_spec("", COMMON, default_ranks=2)
    assert (side.ranks, side.revision, side.layout) == (2, "", None)
    assert side.arguments() == ["--training.steps", "6"] and side.job().training.steps == 6


def test_run_is_written_as_words_and_then_overrides():
    words = "revision=main ranks=4 layout=tp=2,ep=2 --training.steps=7 --x.on"
    side = parse_run_spec(words, COMMON)
    assert (side.revision, side.ranks) == ("main", 4)
    assert side.layout is not None and side.layout.dp_shard == 2
    assert argument(side, "training.steps") == "7"
    assert argument(side, "x.on") == "true"
    assert argument(side, "parallelism.tensor_parallel_degree") == "2"
    assert argument(side, "parallelism.data_parallel_shard_degree") == "2"


def test_layout_sets_only_the_options_that_are_written():
    side = parse_run_spec("layout=pp=2,schedule=GPipe", COMMON)
    assert argument(side, "parallelism.pipeline_parallel_schedule") == "GPipe"
    assert argument(side, "parallelism.fsdp_reshard_after_forward") is None
    assert argument(side, "activation_checkpoint.mode") is None
    side = parse_run_spec("layout=tp=2,recompute=op", COMMON)
    assert argument(side, "activation_checkpoint.selective_ac_option") == "op"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("branch=main", "no such run"),
        ("ranks=2 branch=main", "'branch=main' means nothing"),
        ("outputs/nowhere", "no such run"),
        ("ranks=none", "ranks=none must be a positive number"),
        ("ranks=4 layout=tp=3", "has 3 ranks"),
        ("layout=zz=2", "'zz' is unknown"),
        ("config=nowhere.toml", "no such file"),
        (f"{COMPARE} --optimizer.lr 1", "takes no overrides"),
        ("ranks=2 --a.b 1 2", "overrides are"),
    ],
)
def test_text_that_is_no_run_is_refused_in_a_line(text: str, told: str):
    assert told in refusal(parse_run_spec, text, COMMON)


def test_paths_of_overrides_become_absolute(monkeypatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("x")
    (path,) = parse_overrides(["--training.dataset_path", "text"])
    assert path == ("training.dataset_path", str(tmp_path / "text"))
    assert parse_overrides(["--model.tokenizer_path", "bytes"])[0][1] == "bytes"


def test_microbatches_fit_the_layout():
    side = parse_run_spec("layout=dp_shard=4", COMMON)
    job = parse_run_spec("", COMMON).job()
    sizes = {"training.global_batch_size": "8", "training.local_batch_size": "2"}
    assert dict(batch_words(side, job)) == sizes


def test_control_runs_differ_in_order_and_layout():
    side = parse_run_spec("", COMMON, default_ranks=1)
    found = control_specs(side, 8, num_gpus=0)
    assert [dict(words)["debug.permute_rows"] for _, words in found] == list("12345678")
    layouts = [str(turn.layout) for turn, _ in found]
    assert layouts[::2] == ["None"] * 4 and len(set(layouts[1::2])) == 4


def test_control_runs_on_gpus_keep_the_number_of_ranks():
    found = control_specs(parse_run_spec("ranks=8", COMMON), 6, num_gpus=8)
    assert {turn.ranks for turn, _ in found} == {8}
    assert any(turn.layout and turn.layout.tp == 2 for turn, _ in found)


def test_control_runs_take_turns_over_the_given_layouts_that_are_legal():
    side = parse_run_spec("", COMMON, default_ranks=1)
    found = control_specs(side, 3, layouts=["tp=2", "tp=3"], num_gpus=0)
    assert [turn.layout.tp if turn.layout else 1 for turn, _ in found] == [1, 2, 1]
