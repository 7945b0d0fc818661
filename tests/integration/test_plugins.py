"""Words that a package from outside registers are those of a run; what cannot be imported is one
line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import TITAN_MOE
from tests.support.jobs import run_to_end
from tests.support.markdown import fences
from tests.support.paths import REPO
from tests.support.refusals import refusal
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Training
from titan_moe.config.parse import load_job
from titan_moe.data.build import build_reader
from titan_moe.data.loader import ReaderProcess
from titan_moe.metrics.jsonl import read_json_lines

WORDS = {
    "job.imports": "my_package.extras",
    "lr_scheduler.decay_type": "late",
    "moe.score": "softplus",
    "training.dataset": "squares",
    "parallelism.expert_parallel_comm_backend": "mine",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with the package that docs/extending.md shows."""
    page = fences((REPO / "docs/extending.md").read_text())
    (text,) = (each.text for each in page if each.comment == "file: outside my_package/extras.py")
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package/extras.py").write_text(text)
    return tmp_path


def _run(package: Path, *command: object, **keys: object) -> subprocess.CompletedProcess[str]:
    words = [f"--{key}={value}" for key, value in keys.items()]
    return run_to_end(*TITAN_MOE, *command, *words, PYTHONPATH=f"{package}:{REPO}")


@pytest.mark.slow
def test_launcher_and_ranks_know_what_a_package_registers(package: Path) -> None:
    keys = WORDS | {"parallelism.expert_parallel_degree": 2, "training.steps": 3}
    keys |= {"training.seq_len": 64, "metrics.log_freq": 1, "lr_scheduler.warmup_steps": 0}
    keys |= {"job.dump_folder": package / "run", "checkpoint.enable": "true"}
    done = _run(package, "train", "--config", "qwen3/debugmodel_moe", "--ranks", "2", **keys)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    lines = read_json_lines(package / "run/metrics.jsonl")
    assert all(line["my/squared_gradient"] > 0 for line in lines)
    assert [line["lr"] / 3e-4 for line in lines] == pytest.approx([80 / 81, 65 / 81, 0])
    manifest = json.loads((package / "run/checkpoint/step-3/manifest.json").read_text())
    assert manifest["model"]["moe"]["score"] == "softplus"
    state = json.loads((package / "run/checkpoint/step-3/train_state.json").read_text())
    assert "squares:1" in state["data"]["identity"]["fingerprint"]


_WRONG = """
class Wrong(Mine):
    def add_up(self, home, route):
        return 2 * super().add_up(home, route)


DISPATCHERS["wrong"] = lambda config, meshes, options: Wrong(
    meshes.group("ep"), meshes.group("etp"), config
)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("dispatcher", "code"), [("mine", 0), ("wrong", 1)])
def test_gate_proves_a_dispatcher_and_a_score_from_outside(
    package: Path, dispatcher: str, code: int
) -> None:
    with (package / "my_package/extras.py").open("a") as file:
        file.write(_WRONG)
    keys = {name: WORDS[name] for name in ("job.imports", "moe.score")}
    keys |= {"parallelism.expert_parallel_comm_backend": dispatcher, "out": str(package / "out")}
    words = ("--config", REPO / "configs/debug/gate_qwen3.toml", "--layouts", "dp_shard=2,ep=2")
    done = _run(package, "verify", "gradients", *words, **keys)
    assert done.returncode == code, done.stderr
    (result,) = json.loads((package / "out/results.json").read_text())["results"]
    assert f"dispatch={dispatcher}" in result["layout"]


@pytest.mark.slow
def test_process_that_reads_data_beside_a_gpu_knows_them_too(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(package)
    training = Training(dataset="squares", seq_len=16, local_batch_size=1, global_batch_size=1)
    reader = ReaderProcess(build_reader, training, "bytes", ["my_package.extras"], seed=0)
    ((sequence,),) = reader.read_step()
    assert {chr(token) for token in sequence.tokens_S} <= set("0123456789 ")
    reader.close()
    with pytest.raises(ConfigError, match=r"^job\.imports: no_such_package: No module"):
        ReaderProcess(build_reader, training, "bytes", ["no_such_package"], seed=0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            None,
            "job.imports: broken.module: No module named 'broken': install the package, or name",
        ),
        (
            "import no_such_thing",
            "job.imports: broken.module: No module named 'no_such_thing': ins",
        ),
        ("x = 1\n1 / 0", "broken.module raises ZeroDivisionError: division by zero ("),
        ("x = (", "raises SyntaxError: '(' was never closed ({folder}/broken/module.py:1): mend"),
        ("raise SystemExit(3)", "broken.module raises SystemExit: 3 ("),
    ],
)
def test_module_that_is_missing_or_raises_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, says: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    if text is not None:
        (tmp_path / "broken").mkdir()
        (tmp_path / "broken/module.py").write_text(text)
    line = refusal(load_job, ["--job.imports", "broken.module"])
    assert says.format(folder=tmp_path) in line
    monkeypatch.delitem(sys.modules, "broken", raising=False)


@pytest.mark.parametrize("name", [".module", "../module", "extras.py/", ""])
def test_what_is_no_name_of_a_module_is_refused(name: str) -> None:
    line = refusal(load_job, [f'--job.imports=["{name}"]'])
    assert line == f"job.imports: {name} must be a module, such as my_package.extras"


def test_word_that_nobody_registered_is_refused_and_a_registered_one_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from titan_moe.optim.schedules import DECAYS

    argv = ["--lr_scheduler.decay_type", "early"]
    assert "must be 'linear', 'sqrt', 'cosine' or 'inverse_sqrt'" in refusal(load_job, argv)
    monkeypatch.setitem(DECAYS, "early", lambda at: 1.0)
    assert load_job(argv).model_dump(mode="json")["lr_scheduler"]["decay_type"] == "early"
