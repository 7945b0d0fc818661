"""The command that trains a run of a comparison, on one machine or on several."""

from pathlib import Path

import pytest

from titan_moe.verify.compare.launch import EVERY_NODE, _command, _inputs
from titan_moe.verify.compare.run_spec import RunSpec

ALL = {EVERY_NODE: "env all"}


@pytest.mark.parametrize(
    ("variables", "ranks", "words", "found"),
    [
        ({"NNODES": "2"}, 8, "code/run_train.sh", {"NGPU": "8", "NNODES": "1"}),
        (ALL | {"NGPU": "8"}, 12, "env all code/run_train.sh", {"NGPU": "6", "NNODES": "2"}),
        (
            {"SLURM_JOB_NUM_NODES": "4", "SLURM_GPUS_ON_NODE": "4"},
            8,
            "bash code/scripts/slurm_train.sh",
            {"NGPU": "4", "NNODES": "2", "SLURM_SUBMIT_DIR": "code"},
        ),
    ],
)
def test_run_starts_on_as_many_machines_as_its_ranks_need(
    monkeypatch: pytest.MonkeyPatch, variables: dict, ranks: int, words: str, found: dict
) -> None:
    for name in ("NGPU", "NNODES", "SLURM_JOB_NUM_NODES", "SLURM_GPUS_ON_NODE", EVERY_NODE):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert _command(RunSpec(ranks=ranks), Path("code")) == (words.split(), found)


def test_all_files_that_a_configuration_names_are_inputs(tmp_path: Path) -> None:
    table = {"training": {"dataset_path": "rows.json", "messages": {"template": "chat.jinja"}}}
    found = {path.name for path in _inputs(table, tmp_path)}
    assert {"rows.json", "chat.jinja"} <= found
