"""TOML, found by its name, and command line to one frozen config; every mistake at once."""

import re
import sys
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.paths import REPO
from tests.support.refusals import config_file, refusal, refusals
from titan_moe.config import named
from titan_moe.config.job_config import JobConfig, Parallelism
from titan_moe.config.parse import keys_that_read, known_keys, load_job, save_job

_NO_PATHS = ("training.dataset", "model.name", "model.flavor")
_PATHS = [
    key
    for key, field in known_keys().items()
    if "str" in str(field.annotation).replace("list[str]", "")
    and re.search(r"(?i)\b(folder|path|file)\b", f"{key.replace('_', ' ')} {field.description}")
    and key not in _NO_PATHS
]
_READ = (
    *("model.hf_assets_path", "model.tokenizer_path", "training.dataset_path"),
    "training.messages.template",
    *("validation.dataset_path", "checkpoint.initial_load_path", "debug.routing_replay"),
    "lora.initial_load_path",
)
_EXCLUDE = "checkpoint.exclude_from_loading"


@pytest.mark.parametrize("key", _PATHS)
def test_a_tilde_is_the_home_folder_in_every_key_that_is_a_path(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No shell has seen what stands in a file."""
    monkeypatch.setenv("HOME", "/home/me")
    values: Any = "~/x"
    for name in reversed(key.split(".")):
        values = {name: values}
    assert attrgetter(key)(JobConfig.model_validate(values)) == "/home/me/x"
    assert (key in keys_that_read()) == (key in _READ)


def test_a_tilde_is_the_home_folder_in_a_blend_and_in_the_name_of_a_config_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(_READ) < set(_PATHS) and len(_PATHS) == 15
    monkeypatch.setenv("HOME", str(tmp_path))
    config_file(tmp_path, '[[training.blend]]\ndataset = "c4"\ndataset_path = "~/x"\n')
    (part,) = load_job(["--job.config_file=~/job.toml"]).training.blend
    assert part.dataset_path == str(tmp_path / "x")


def test_command_line_goes_over_file_goes_over_default(tmp_path: Path) -> None:
    argv = config_file(tmp_path, "[training]\nsteps = 5\nseq_len = 64\n[optimizer]\nlr = 1\n")
    job = load_job([*argv, "--training.steps=7", "--training.dataloader.prefetch_factor", "9"])
    assert (job.training.steps, job.training.seq_len, job.optimizer.lr) == (7, 64, 1.0)
    assert job.training.dataloader.prefetch_factor == 9
    assert job.training.local_batch_size == JobConfig().training.local_batch_size


@pytest.mark.parametrize(
    ("argv", "dataset", "path"),
    [
        (["--training.dataset", "synthetic"], "synthetic", None),
        (["--training.dataset", "c4"], "c4", "data/x"),
        (["--training.dataset=stdlib", "--training.dataset_path=y"], "stdlib", "y"),
        (["--training.steps", "3"], "tokens", "data/x"),
    ],
)
def test_data_without_a_path_takes_the_place_of_a_file_s(
    tmp_path: Path, argv: list[str], dataset: str, path: str | None
) -> None:
    text = '[training]\ndataset = "tokens"\ndataset_path = "data/x"\n'
    training = load_job([*config_file(tmp_path, text), *argv]).training
    assert (training.dataset, training.dataset_path) == (dataset, path)


@pytest.mark.parametrize(
    ("argv", "key", "value"),
    [
        (["--checkpoint.enable"], "checkpoint.enable", True),
        (["--checkpoint.enable", "true"], "checkpoint.enable", True),
        (["--training.mask_documents=false"], "training.mask_documents", False),
        (["--checkpoint.enable", "--training.steps", "3"], "checkpoint.enable", True),
        (["--moe.row_alignment", "16"], "moe.row_alignment", 16),
        (["--job.dump_folder", "2"], "job.dump_folder", "2"),
        (["--training.max_norm", "inf"], "training.max_norm", float("inf")),
        (["--training.global_batch_size", "-1"], "training.global_batch_size", -1),
        (["--lr_scheduler.total_steps", "null"], "lr_scheduler.total_steps", None),
        (["--activation_checkpoint.mode", "none"], "activation_checkpoint.mode", "none"),
        ([f"--{_EXCLUDE}", "optimizer,dataloader"], _EXCLUDE, ["optimizer", "dataloader"]),
    ],
)
def test_texts_of_a_command_line_become_values(argv: list[str], key: str, value: object) -> None:
    table, name = key.split(".")
    assert getattr(getattr(load_job(argv), table), name) == value


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    argv = config_file(
        tmp_path,
        """
        profiling = 3
        [training]
        steps = "20"
        seq_len = true
        stepz = 4
        [optimizer]
        name = "SGD"
        [fault_tolerance]
        enable = true
        """,
    )
    file, cli = argv[1], "command line"
    argv += ["--training.lr=3", "--moe.row_alignment", "7", "stray"]
    assert sorted(refusals(load_job, argv)) == [
        "command line: 'stray' belongs to no --table.key",
        "fault_tolerance.enable = true "
        f"({file}): torchft is not used: restart the run and it resumes from its checkpoint",
        f'moe.row_alignment = "7" ({cli}): must be 1, 8, 16, 32, 64 or 128',
        f"optimizer.name = \"SGD\" ({file}): must be 'AdamW', 'Adam' or 'Muon'",
        f"profiling = 3 ({file}): must be a table: [profiling]",
        f'training.lr = "3" ({cli}): no such key; did you mean optimizer.lr?',
        f"training.seq_len = true ({file}): must be a valid integer",
        f'training.steps = "20" ({file}): must be a valid integer',
        f"training.stepz = 4 ({file}): no such key; did you mean training.steps?",
    ]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--training.steps"], "--training.steps: expected one argument"),
        (["--training.steps", "many"], "must be a valid integer"),
        (["--training.steps", "0"], "must be greater than 0"),
        (["--training.steps", "1000000001"], "must be at most 1000000000"),
        (["--training.steps", 5000 * "9"], "nable to parse"),
        (["--comm.init_timeout_seconds", 30 * "9"], "must be at most 1000000000"),
        (["--stages", '[{"from_step": 9999999999}]'], "must be at most 1000000000"),
        (["--debug.seed", str(2**63)], "must be less than 9223372036854775808"),
        (["--debug.seed", str(-(2**64))], "must be greater than or equal to -92233"),
        (["--job.dump_folder="], "job.dump_folder"),
        (["--checkpoint.load_step=-7"], "equal to -1"),
        (["--checkpoint.save_timeout_seconds", "0"], "must be greater than 0"),
        (["--checkpoint.enable", "maybe"], "must be a valid boolean"),
        (["--training", "3"], "must be a table: [training]"),
        (["--training.blend", '[{"weight": 1}]'], "training.blend.0.dataset"),
        (["--config", "n" * 300], "cannot be read: File name too long"),
        (["--job.config_file"], "expected one argument"),
        (["--comm.axes.epp.max_ctas", "8"], 'comm.axes.epp = "epp" (command line): must be '),
        (["--comm.axes.ep.ctas", "8"], "choose min_ctas, max_ctas, high_priority"),
        (["--comm.axes", '{"ep": {"max_ctas": 80}}'], "must be a table"),
        (["--comm.axes.ep", "8"], 'comm.axes.ep = "8" (command line): must be a table'),
        (["--stages", "[8]"], "stages.0 = 8 (command line): must be a table"),
        (["--stages", '[{"seq_len": 16}]'], "stages.0.from_step (command line): is required"),
        (
            ["--stages", '[{"from_step": 1}]'],
            "stages.0.from_step = 1 (command line): must be greater than 1",
        ),
        (
            ["--stages", '[{"from_step": 2, "seqlen": 16}]'],
            "stages.0.seqlen = 16 (command line): no such key; did you mean training.seq_len?",
        ),
        (
            ["--stages", '[{"from_step": 2, "parallelism": {"tensor_degree": 2}}]'],
            "stages.0.parallelism.tensor_degree = 2 (command line): no such key; did you mean "
            "parallelism.tensor_parallel_degree?",
        ),
        (
            ["--stages", '[{"from_step": 2, "global_batch_size": -1}]'],
            "stages.0.global_batch_size = -1 (command line): must be greater than 0",
        ),
        (["--comm.axes.ep.max_ctas=80"], "comm.axes.ep.max_ctas = "),
        (["--comm.axes.ep.min_ctas=9", "--comm.axes.ep.max_ctas=8"], "must be at most max_ctas"),
        (["--comm.mode=fake_backend"], "nothing would be trained: use titan-moe check"),
    ],
)
def test_one_mistake_is_one_line(argv: list[str], words: str) -> None:
    line = refusal(load_job, argv)
    assert words in line and "\n" not in line


@pytest.mark.parametrize(
    "content", [b"[training\nsteps = 3", b"[training]\nsteps = \xff\xfe", b"a = 1" + 5000 * b"0"]
)
def test_a_file_that_is_no_toml_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(content)
    line = refusal(load_job, ["--job.config_file", str(path)])
    assert line.startswith(f"job.config_file = {path}: is not ")


def test_a_saved_job_loads_equal(tmp_path: Path) -> None:
    job = load_job(
        [
            "--training.max_norm=inf",
            "--optimizer.lr=1e-3",
            "--job.description",
            'quotes " and\nlines',
            "--training.blend",
            '[{"dataset": "c4", "weight": 2.5}, {"dataset": "text", "dataset_path": "a"}]',
            "--checkpoint.exclude_from_loading=optimizer",
            "--moe.z_loss_weight=0.1",
            "--comm.axes.ep.max_ctas=8",
            "--comm.axes.edp.high_priority=true",
        ]
    )
    path = tmp_path / "config.toml"
    save_job(job, path)
    assert load_job(["--job.config_file", str(path)]) == job


def test_list_of_tables_that_is_written_as_a_table_is_one_line(tmp_path: Path) -> None:
    argv = config_file(
        tmp_path, "[stages]\nfrom_step = 3\nseq_len = 8\n[training.blend]\ndataset='c4'"
    )
    assert refusals(load_job, argv) == [
        f"stages.from_step, stages.seq_len ({argv[1]}): stages is a list of tables: write "
        "[[stages]], not [stages]",
        f"training.blend.dataset ({argv[1]}): training.blend is a list of tables: write "
        "[[training.blend]], not [training.blend]",
    ]


@pytest.mark.parametrize(
    ("misspelt", "right"),
    [
        ("trainig.steps", "training.steps"),
        ("parallelism.expert_paralel_degree", "parallelism.expert_parallel_degree"),
        ("expert_parallel_degree", "parallelism.expert_parallel_degree"),
        ("model.warmup_step", "lr_scheduler.warmup_steps"),
        ("validation.seqlen", "validation.seq_len"),
        ("training.prefetch_factor", "training.dataloader.prefetch_factor"),
    ],
)
def test_nearest_key_is_named(misspelt: str, right: str) -> None:
    line = refusal(load_job, [f"--{misspelt}", "3"])
    assert line.endswith(f"no such key; did you mean {right}?")
    line = refusal(load_job, ["--zzz.qqq", "3"])
    assert "did you mean" not in line and "--help" in line


@pytest.mark.parametrize("text", ["n" * 256, "d/" * 2048, "a\0b", "~no_such_user/data"])
@pytest.mark.parametrize("key", ["job.dump_folder", "model.tokenizer_path", "debug.routing_replay"])
def test_path_that_no_file_can_have_is_refused(key: str, text: str) -> None:
    says = "there is no such user" if text[0] == "~" else "must be a path"
    assert f"(command line): {says}" in refusal(load_job, [f"--{key}={text}"])


def test_configuration_is_read_while_a_table_of_names_is_being_imported(monkeypatch):
    table = "titan_moe.distributed.expert_parallel"
    monkeypatch.setitem(sys.modules, table, ModuleType(table))
    assert Parallelism() == JobConfig().parallelism


# --- names of configurations ----------------------------------------------------------------------

MOE = REPO / "configs" / "qwen3" / "debugmodel_moe.toml"


_SHORT = "qwen3/debugmodel_moe"


@pytest.mark.parametrize(
    "text", [_SHORT, f"{_SHORT}.toml", f"configs/{_SHORT}.toml", "debugmodel_moe"]
)
def test_a_name_is_found_from_any_folder(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Path(named.find_config(text)).resolve() == MOE
    assert load_job(["--config", text]) == load_job(["--job.config_file", str(MOE)])


def test_a_file_goes_before_a_configuration_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3").mkdir()
    (tmp_path / "qwen3" / "debugmodel_moe").write_text("[training]\nsteps = 7\n")
    assert load_job(["--config", "qwen3/debugmodel_moe"]).training.steps == 7


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("qwen3/debugmodel_mo", "did you mean qwen3/debugmodel or qwen3/debugmodel_moe or "),
        ("debugmodel", "did you mean deepseek_v3/debugmodel or deepseek_v32/debugmodel or "),
        ("nowhere.toml", "nor does titan_moe bring a configuration of this name along"),
    ],
)
def test_a_name_that_is_none_is_one_line(text: str, says: str) -> None:
    line = refusal(load_job, ["--config", text])
    assert says in line
    assert line.startswith(f"job.config_file = {text}: cannot be read: No such file")
