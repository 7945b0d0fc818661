"""verify gradients on a user's own configuration: what it sets for itself, and what it refuses."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from titan_moe.cli import verify_gradients as command
from titan_moe.cli.main import main
from titan_moe.config.job_config import JobConfig
from titan_moe.distributed.expert_parallel import DISPATCHERS
from titan_moe.runtime.files import lock_folder
from titan_moe.verify.gradients import gate
from titan_moe.verify.gradients.compare import TensorDifference
from titan_moe.verify.gradients.fixture import NUM_STEPS, make_batch
from titan_moe.verify.gradients.worker import RankReport, Task

OWN = ["--config", "configs/debug/compare.toml"]
OWN += ["--model.name", "mixtral", "--model.flavor", "gate"]
UNFIT = [
    *("--training.max_norm", "inf", "--optimizer.weight_decay", "0", "--moe.z_loss_weight", "0"),
    *("--moe.row_alignment", "1", "--debug.moe_force_load_balance", "true"),
]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    """Tasks that ranks were given; the ranks report equal tensors."""
    given: list[Task] = []

    def run(_, world_size: int, task: Task, *, device: str, share_gpus: bool) -> list[RankReport]:
        given.append(task)
        equal = TensorDifference(NUM_STEPS, 0, "gradient", "norm.weight", 1e-15, 1.0)
        return [RankReport([equal], [], tails=1, paddings=1)] * world_size

    def fixture(job: JobConfig, _, num_sequences: int) -> SimpleNamespace:
        return SimpleNamespace(batches=[make_batch(num_sequences, job.training.seq_len, 9, seed=1)])

    monkeypatch.setattr(gate, "run_on_ranks", run)
    monkeypatch.setattr(gate, "make_fixture", fixture)
    monkeypatch.setattr(gate, "easy", lambda *_: [])
    return given


def verify(folder: Path, *words: str) -> int:
    return main(["verify", "gradients", *words, "--out", str(folder)])


def test_an_own_configuration_gets_what_the_proof_needs(ranks: list[Task], tmp_path: Path, capsys):
    assert verify(tmp_path, *OWN, *UNFIT, "--layouts", "dp_shard=2") == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("for the proof: ")]
    for word in ("training.max_norm=0.5", "optimizer.weight_decay=0.1", "moe.row_alignment=16"):
        assert word in line
    assert "debug.moe_force_load_balance=False" in line and "moe.z_loss_weight=0.001" in line
    (task,) = ranks
    assert task.job.training.max_norm == 0.5 and task.job.moe.z_loss_weight == 1e-3
    assert json.loads((tmp_path / "results.json").read_text())["own_keys"]


def test_a_second_command_on_one_folder_is_refused(ranks: list[Task], tmp_path: Path, capsys):
    with lock_folder(tmp_path, "--out"):
        assert verify(tmp_path, *OWN, "--layouts", "dp_shard=2") == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path} is in use by process " in line and "choose another --out" in line
    assert not ranks and verify(tmp_path, *OWN, "--layouts", "dp_shard=2") == 0


def test_a_model_that_proves_nothing_is_no_failed_layout(
    ranks: list[Task], tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gate, "easy", lambda *_: ["both steps route alike"])
    assert verify(tmp_path, *OWN, "--layouts", "dp_shard=2") == 2
    said = "".join(capsys.readouterr())
    assert "this model proves nothing: both steps route alike" in said
    assert "0 of 1 pass" in said and "worst error" not in said and not ranks


def test_an_illegal_layout_starts_nothing(ranks: list[Task], tmp_path: Path, capsys):
    assert verify(tmp_path, *OWN, "--layouts", "tp=x") == 2
    assert verify(tmp_path, *OWN, "--layouts", "dp_shard=2", "ep=16,dp_shard=16") == 2
    said = capsys.readouterr()
    assert "must divide num_experts" in said.err and "pass" not in said.out and not ranks


def test_ranks_share_the_gpus_that_are_here(
    ranks: list[Task], tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*OWN, "--layouts", "dp_shard=2", "tp=4", "--device", "cuda")
    assert verify(tmp_path, *words) == 2 and not ranks
    assert "--device cuda: no GPU is here\n" in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for gpus, said in ((4, ""), (1, "4 ranks share 1 GPU(s); collectives go through the host\n")):
        monkeypatch.setattr(command, "count_gpus", lambda environment, gpus=gpus: gpus)
        assert verify(tmp_path, *words) == 0
        assert capsys.readouterr().out.startswith(said or "for the proof")
    shared = [task.job.comm.share_gpus for task in ranks]
    assert shared == [False, False, True, True]


def test_dispatcher_from_outside_is_known_to_its_configuration_alone(
    ranks: list[Task], tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DISPATCHERS, "mine", DISPATCHERS["standard"])
    monkeypatch.setattr(command, "count_gpus", lambda environment: 8)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    words = (*OWN, "--layouts", "dp_shard=2,ep=2,dispatch=mine")
    mine = ("--parallelism.expert_parallel_comm_backend", "mine")
    assert verify(tmp_path, *words, *mine, "--device", "cuda") == 0
    assert [task.layout.dispatch for task in ranks] == ["mine"] and verify(tmp_path, *words) == 2
    assert "dispatch=mine: choose standard, deduplicated" in capsys.readouterr().err


def test_results_of_a_cpu_are_not_those_of_gpus(ranks, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(command, "count_gpus", lambda environment: 8)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    words = (*OWN, "--layouts", "dp_shard=2", "--float32")
    for device in ("cpu", "cuda", "cuda"):
        assert verify(tmp_path, *words, "--device", device) == 0
    assert [(task.device, task.job.training.dtype) for task in ranks] == [
        ("cpu", "float64"),
        ("cpu", "float32"),
        ("cuda", "float64"),
        ("cuda", "float32"),
    ]
