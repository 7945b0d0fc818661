"""Every key that a torchtitan 0.2 file may hold is read, does without, or is refused."""

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.support.torchtitan_keys import DEFAULTS, SWITCHED_ON
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import known_keys, load_job, read_job
from titan_moe.config.torchtitan import TABLES, VALUE_REMEDIES, VALUES
from titan_moe.config.translate import KEYS, put, unknown_key


def _file(folder: Path, keys: dict[str, Any]) -> list[str]:
    tables: dict[str, Any] = {}
    for key, value in keys.items():
        put(tables, key, value)
    path = folder / "job.toml"
    path.write_text(tomli_w.dumps(tables))
    return ["--job.config_file", str(path)]


def _refusal(argv: list[str]) -> str:
    with pytest.raises(ConfigError) as error:
        load_job(argv)
    (line,) = error.value.lines
    return line


def _value(job: JobConfig, key: str) -> Any:
    value: Any = job
    for name in key.split("."):
        value = getattr(value, name)
    return value


def test_the_table_is_torchtitans() -> None:
    assert {key: row.default for key, row in KEYS.items()} == DEFAULTS


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_ours_or_says_what_becomes_of_it(key: str) -> None:
    row = KEYS[key]
    assert (row.fate == "same") == (key in known_keys())
    assert row.fate == "same" or row.note


def test_a_file_of_defaults_asks_for_nothing(tmp_path: Path) -> None:
    keys = {key: value for key, value in DEFAULTS.items() if value is not None}
    job, notes = read_job(_file(tmp_path, keys))
    assert notes == []
    for key, value in keys.items():
        if KEYS[key].fate == "same":
            assert _value(job, key) == value, key


@pytest.mark.parametrize("key", sorted(set(KEYS) - set(known_keys())))
def test_a_key_that_asks_for_something(tmp_path: Path, key: str) -> None:
    table = key.rpartition(".")[0]
    switched_on = {"model.converters": [table]} if table == "quantize.linear.float8" else {}
    argv = _file(tmp_path, {key: SWITCHED_ON[key]} | switched_on)
    if KEYS[key].fate == "refused":
        assert KEYS[key].note in _refusal(argv)
        return
    job, notes = read_job(argv)
    told = (
        []
        if table == "quantize.linear.mx"
        else [f"without effect here: {key} (docs/coming-from-torchtitan.md)"]
    )
    assert notes == told
    assert job == load_job([*_file(tmp_path, switched_on)])


@pytest.mark.parametrize("key", VALUES)
def test_a_value_with_another_name(tmp_path: Path, key: str) -> None:
    for theirs, ours in VALUES[key].items():
        listed = isinstance(KEYS[key].default, list)
        wanted = [ours] if listed else ours
        note = f"{key} {theirs!r} is read as {ours!r} (docs/coming-from-torchtitan.md)"
        for argv in (_file(tmp_path, {key: [theirs] if listed else theirs}), [f"--{key}", theirs]):
            job, notes = read_job(argv)
            assert _value(job, key) == wanted and notes == [note]


@pytest.mark.parametrize("key", VALUE_REMEDIES)
def test_a_value_that_is_refused_has_a_remedy(tmp_path: Path, key: str) -> None:
    for value, remedy in VALUE_REMEDIES[key].items():
        for argv in (_file(tmp_path, {key: [value]}), [f"--{key}", value]):
            line = _refusal(argv)
            assert line.startswith(key) and f'"{value}"' in line and line.endswith(remedy)


@pytest.mark.parametrize("name", ["interleaved1f1b", "INTERLEAVED1F1B", "Interleaved1F1B"])
def test_schedules_in_any_case(tmp_path: Path, name: str) -> None:
    job, notes = read_job(_file(tmp_path, {"parallelism.pipeline_parallel_schedule": name}))
    assert job.parallelism.pipeline_parallel_schedule == "Interleaved1F1B" and notes == []


def test_a_list_as_one_text(tmp_path: Path) -> None:
    job = load_job(_file(tmp_path, {"quantize.linear.float8.filter_fqns": "output, router.gate"}))
    assert job.quantize.linear.float8.filter_fqns == ["output", "router.gate"]


def test_a_table_matters_where_its_converter_is_named(tmp_path: Path) -> None:
    argv = _file(tmp_path, {"quantize.linear.float8.enable_fsdp_float8_all_gather": True})
    assert read_job(argv)[1] == []
    assert "gathered in the compute type" in _refusal([*argv, "--model.converters", "float8"])


def test_what_has_no_effect_is_one_line() -> None:
    argv = ["--training.gc_debug", "--parallelism.disable_loss_parallel=True"]
    argv += ["--model.print_after_conversion", "false"]
    argv += ["--parallelism.context_parallel_load_balancer", "ptrr"]
    _, notes = read_job(argv)
    assert notes == [
        "without effect here: training.gc_debug, parallelism.disable_loss_parallel; "
        "parallelism.context_parallel_load_balancer 'ptrr' is read as 'headtail' "
        "(docs/coming-from-torchtitan.md)"
    ]


def test_tables_without_keys(tmp_path: Path) -> None:
    tables = [*TABLES, "quantize", "quantize.linear"]
    (tmp_path / "job.toml").write_text("\n".join(f"[{table}]" for table in tables))
    argv = ["--job.config_file", str(tmp_path / "job.toml")]
    assert read_job(argv) == (JobConfig(), [])


@pytest.mark.parametrize("argv", [["--experimental", "3"], ["--quantize.linear.mx", "3"]])
def test_a_table_that_is_none(argv: list[str]) -> None:
    assert "no such key" in _refusal(argv)


@pytest.mark.parametrize(
    ("misspelt", "right"),
    [
        ("training.stepz", "training.steps"),
        ("trainig.steps", "training.steps"),
        ("training.lr", "optimizer.lr"),
        ("parallelism.expert_paralel_degree", "parallelism.expert_parallel_degree"),
        ("expert_parallel_degree", "parallelism.expert_parallel_degree"),
        ("model.warmup_step", "lr_scheduler.warmup_steps"),
        ("validation.seqlen", "validation.seq_len"),
        ("training.prefetch_factor", "training.dataloader.prefetch_factor"),
    ],
)
def test_the_nearest_key_is_named(misspelt: str, right: str) -> None:
    line = unknown_key(misspelt, "3", known_keys(), source="command line")
    assert line.endswith(f"did you mean {right}?")


def test_a_key_like_no_other_names_none() -> None:
    line = unknown_key("zzz.qqq", "3", known_keys(), source="command line")
    assert "did you mean" not in line and "--help" in line
