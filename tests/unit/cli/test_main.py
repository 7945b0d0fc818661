"""titan-moe: its help, its common options, and how it ends."""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import TITAN_MOE, run_command
from tests.support.paths import REPO
from titan_moe.cli.command import Answer, Command, out_file, path_of
from titan_moe.cli.main import COMMANDS, load_command
from titan_moe.config.errors import ConfigError
from titan_moe.config.parse import known_keys
from titan_moe.runtime.errors import RunError

_INTERRUPTED = """
import signal, sys
import titan_moe.prepare.job
from titan_moe.cli.main import main
titan_moe.prepare.job.check_all = lambda *_: signal.raise_signal(signal.SIGINT)
sys.exit(main(["train", "--ranks", "1"]))
"""


def test_a_launcher_that_is_interrupted_in_its_checks_says_so() -> None:
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "\ninterrupted\n")


_HELP = """
import json, os, sys
from contextlib import redirect_stdout
from io import StringIO
from titan_moe.cli.main import COMMANDS, main
shown = {}
for words in ("", "verify", *COMMANDS):
    with redirect_stdout(StringIO()) as out:
        try:
            main([*words.split(), "--help"])
        except SystemExit as stop:
            assert not stop.code, stop.code
    shown[words] = out.getvalue()
heavy = {"torch", "numpy", "matplotlib", "transformers"} & set(sys.modules)
assert not heavy, heavy
print(json.dumps([shown, sum(os.times()[:2])]))
"""


def test_help_of_every_command_imports_no_torch_and_takes_no_time() -> None:
    run = subprocess.run([sys.executable, "-c", _HELP], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    shown, seconds = json.loads(run.stdout)
    assert seconds < 1, "of processor time, for all commands"
    for words in COMMANDS:
        assert "exit code" in shown[words].lower() and f"titan-moe {words}" in shown[words]
    assert [key for key in known_keys() if f"--{key} " not in shown["train"]] == []


@pytest.mark.parametrize("module", ["train", "cli.generation", "cli.main"])
def test_a_module_started_by_python_runs_its_command(module: str) -> None:
    command = [sys.executable, "-m", f"titan_moe.{module}", "--bogus"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and not done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("bogus", "titan-moe bogus: no such command"),
        ("verify bogus", "titan-moe verify bogus: no such command"),
        ("report run x --bogus", "report run: unknown argument '--bogus'"),
        ("config init qwen3", "qwen3 for --ranks 8: choose a --flavor of 30B-A3B, 8B"),
        ("config init qwen3 --ranks 7", "for --ranks 8: choose a --flavor of 30B-A3"),
        ("config init qwen3 --flavor B", "no configuration of qwen3 B: choose from 2"),
        ("memory --parallelism.tp 2", "did you mean parallelism.tensor_parallel_degree?"),
        ("memory --etp 2", "did you mean parallelism.expert_tensor_parallel_degree?"),
        ("memory --parallelism.dp_shard=2", "did you mean parallelism.data_parallel_shard_degree?"),
        ("config init none", "choose from bench, deepseek_v3, deepseek_v32, gemma4, glm4_moe, gpt"),
        ("memory --ranks 0", "--ranks: 0 must be a positive number"),
        ("memory --ranks 2 --parallelism.expert_parallel_degree 4", "must divide"),
        ("check --ranks 3 --nodes 2", "--ranks 3 must be a multiple of --nodes 2"),
        ("train --ranks 2 --nodes 2", "2 nodes need --endpoint HOST:PORT"),
        ("train --ranks 2 --max-restarts 1 --training.steps 1", "-restarts 1 (MAX_RESTARTS of "),
        ("train --ranks 2 --nodes 2 --endpoint a", "number 0, not 'a'"),
        (
            "train --ranks=2 --nodes=2 --endpoint=a:1 --node-rank=2",
            "--node-rank 2 (NODE_RANK of run_train.sh) must be one of 0 to 1, for --nodes 2",
        ),
        (f"check --ranks {30 * '9'}", "must be a positive number, at most 1000000"),
        (f"simulate step --layers {5000 * '9'}", "must be a positive number, at most 10"),
        (f"generate x --prompt a --seed {30 * '9'}", "must be 0 or more, at most 1"),
        ("generate x --prompt a --temperature nan", "nan must be 0 or more"),
        ("generate x --chat", "one of the arguments --prompt --messages is required"),
        ("generate x --prompt a --messages b", "--messages: not allowed with argument --prompt"),
        ("generate x --prompt a --system b", "--system 'b' goes with --chat and --prompt: add"),
        ("generate x --messages a --system b", "or write it as the first of --messages"),
        ("generate x --messages none.json", "--messages none.json: No such file or directory: "),
        ("generate x --messages pyproject.toml", "--messages pyproject.toml: Expecting value"),
        ("generate x --messages configs/schema.json", "schema.json: it has no 'messages': write a"),
        ("train --max-restarts -1", "--max-restarts: -1 must be 0 or more"),
        ("verify losses --repeats x", "--repeats: x must be 0 or more"),
        ("check ~no_such_user/run", "error: ~no_such_user/run: there is no such user: write the p"),
    ],
)
def test_a_wrong_argument_is_one_line(words: str, says: str) -> None:
    done = run_command(*words.split())
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and says in line
    assert done.returncode == 2 and not done.stdout


def test_check_says_what_of_a_torchtitan_file_has_no_effect() -> None:
    done = run_command("check", "--ranks", 1, "--training.gc_debug")
    note = "training.gc_debug=true has no effect here: use Python's gc.set_debug"
    found = "nothing is wrong: 1 rank(s) on each machine, output in ./outputs"
    lines = done.stdout.splitlines()
    assert lines[0] == found and note in lines
    assert " parameters, " in lines[1] and " documents, " in lines[2] and " tokens" in lines[2]


def test_check_reads_the_data(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"url": "a"}\n')
    data = ["--training.dataset", "json", "--training.dataset_path", path]
    done = run_command("check", "--ranks", 1, *data)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and "training.text_column='text'" in line and not done.stdout


def test_check_says_that_data_of_the_hub_was_not_read() -> None:
    done = run_command("check", "--ranks", 1, "--training.dataset", "c4")
    assert done.returncode == 0 and "not read: 'c4' is on the Hugging Face hub" in done.stdout


def test_json_is_all_that_standard_output_has(tmp_path: Path) -> None:
    found = json.loads(run_command("memory", "--ranks", 8, "--json").stdout)
    assert found["parameters"] > found["active_parameters"] > 0 and "stored" in found["bytes"]
    command = Command(lambda options: print("progress") or Answer([1], ["one"]))  # type: ignore[func-returns-value]
    assert _ended(command, "--json") == (0, "[\n 1\n]\n", "progress\n")
    assert _ended(command) == (0, "progress\none\n", "")


def test_check_and_memory_speak_of_every_training_stage() -> None:
    name = ["--config", "debug/context_extension", "--ranks", 2]
    checked = run_command("check", *name).stdout.splitlines()
    assert checked[1] == (
        "stages[0] (from_step=31): training.local_batch_size 4 -> 2, training.seq_len 128 -> 512, "
        "parallelism.context_parallel_degree 1 -> 2"
    )
    estimated = run_command("memory", *name).stdout.splitlines()
    assert estimated[1].startswith("MiB: ") and estimated[2].startswith("MiB from step 31: ")
    assert estimated[4].startswith("from step 31: 4 microbatches") and " 9.4 MiB" in estimated[4]
    longer = ["--stages", '[{"from_step": 2, "seq_len": 256}]']
    found = json.loads(run_command("memory", *name, *longer, "--json").stdout)
    (stage,) = found["stages"]
    assert stage["from_step"] == 2 and stage["bytes"]["kept"] == 2 * found["bytes"]["kept"]


def test_config_init_starts_a_file(tmp_path: Path) -> None:
    name = ["config", "init", "qwen3", "--flavor", "30B-A3B"]
    mine, shipped = tmp_path / "mine.toml", REPO / "configs/qwen3/30B-A3B_8gpu.toml"
    assert run_command(*name, "--out", mine).returncode == 0
    first, rest = mine.read_text().split("\n", 1)
    assert first == f"#:schema {(REPO / 'configs/schema.json').as_uri()}"
    assert rest == shipped.read_text().split("\n", 1)[1]
    assert run_command(*name).stdout == mine.read_text()
    more = run_command(*name, "--ranks", 10).stdout.splitlines()
    assert more[1] == "# Made for 8 GPUs: titan-moe check --config FILE --ranks 10."
    assert more[2:] == rest.splitlines()
    assert run_command(*name, "--ranks", 48).stdout.partition("\n")[2].startswith("# Made for 64 G")
    of_16 = (REPO / "configs/bench/qwen3_30B-A3B_16gpu.toml").read_text().partition("\n")[2]
    assert run_command(*name, "--ranks", 16).stdout.partition("\n")[2] == of_16


@pytest.mark.parametrize(
    "words", ["config init qwen3 --flavor 30B-A3B", "config schema", "simulate step --layers 1"]
)
def test_out_replaces_no_file_without_force(words: str, tmp_path: Path) -> None:
    path = tmp_path / "made" / "result"
    out = [*words.split(), "--out", path]
    assert run_command(*out).returncode == 0
    made = path.read_text()[:20]
    path.write_text("kept")
    again = run_command(*out)
    (line,) = again.stderr.splitlines()
    assert again.returncode == 2 and f"--out {path}: is there already: name another" in line
    assert path.read_text() == "kept"
    assert run_command(*out, "--force").returncode == 0 and path.read_text()[:20] == made
    assert run_command(*out[:-1], path.parent, "--force").returncode == 2


def test_out_takes_its_name_at_once_and_gives_it_back_after_a_failure(tmp_path: Path) -> None:
    options = argparse.Namespace(out=tmp_path / "result", force=False)
    with pytest.raises(ZeroDivisionError), out_file(options):
        with pytest.raises(ConfigError, match="is there already"), out_file(options):
            pass
        raise ZeroDivisionError
    assert not options.out.exists()


def test_every_path_argument_knows_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    parsers = {name: argparse.ArgumentParser() for name in COMMANDS}
    for name, parser in parsers.items():
        load_command(name).add_arguments(parser)
    actions = [(name, each) for name, parser in parsers.items() for each in parser._actions]
    texts = [each for name, each in actions if each.type in (str, None) and not each.const]
    files = {each.dest for each in texts if re.search("(?i)folder|file", each.help or "")}
    assert files == {"family"}
    paths = [(name, each) for name, each in actions if each.type is path_of]
    assert len(paths) > 10 and not any(each.type is Path for _, each in actions)
    assert path_of("~/x") == Path("/home/me/x")


def test_help_of_one_table() -> None:
    command = [*TITAN_MOE, "train", "--help"]
    shown = subprocess.run([*command, "quantize"], capture_output=True, text=True)
    keys = re.findall(r"^  --(\S+)", shown.stdout, re.MULTILINE)
    assert shown.returncode == 0 and keys
    assert all(key.startswith("quantize.") for key in keys)
    wrong = subprocess.run([*command, "quantise"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "no such table: choose from job, " in wrong.stderr


def test_memory_counts_the_moments_of_the_optimizer_that_it_names() -> None:
    words = ["memory", "--config", "qwen3/30B-A3B_8gpu", "--ranks", 8]
    words += ["--parallelism.fsdp_accumulation", "reduce_each", "--optimizer.name"]
    stored = {}
    for optimizer in ("AdamW", "Muon"):
        line = f"stored has the moments of optimizer.name={optimizer}"
        assert line in run_command(*words, optimizer).stdout
        stored[optimizer] = json.loads(run_command(*words, optimizer, "--json").stdout)["bytes"]
    # Of 30.5 billion parameters 0.6 are embedding and output, which keep two moments.
    saved = (stored["AdamW"]["stored"] - stored["Muon"]["stored"]) / 4 * 8
    assert saved == pytest.approx(30.5e9 - 0.62e9, rel=0.01)


def test_memory_of_parts_that_the_model_lacks_is_refused() -> None:
    words = ["memory", "--config", "qwen3/30B-A3B_8gpu", "--training.freeze", "nothing"]
    done = run_command(*words)
    assert done.returncode == 2
    assert "training.freeze=nothing matches nothing in this model" in done.stderr


def test_memory_counts_what_microbatches_share_where_the_key_is_auto() -> None:
    name = ["--config", "qwen3/sft_30B-A3B_8gpu", "--ranks", 8, "--lora.rank", 16]
    _, estimate, _, shared, verdict = run_command("memory", *name).stdout.splitlines()
    assert " + accumulated 8.7 = 19.4 in the last " in estimate
    assert shared.endswith(", with 8.7 GiB of sums and weights")
    assert verdict.startswith("fits: 30.0 of 79.0 GiB")


def test_memory_ends_with_a_verdict() -> None:
    name = ["--config", "qwen3/30B-A3B_8gpu", "--ranks", 8]
    found = json.loads(run_command("memory", *name, "--json").stdout)
    gib = found["needed"] / 2**30
    assert found["fits"] and gib == pytest.approx(sum(found["bytes"].values()) / 2**30 + 3)
    line = run_command("memory", *name).stdout.splitlines()[-1]
    assert line.startswith(f"fits: {gib:.1f} of 79.0 GiB")
    for small, code, verdict in ((gib + 0.1, 0, "fits: "), (gib - 0.1, 1, "does not fit: ")):
        done = run_command("memory", *name, "--gpu-gib", small)
        assert done.returncode == code
        assert done.stdout.splitlines()[-1].startswith(verdict)


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (ConfigError(["a", "b"]), 2, "error: a\nerror: b\n"),
        (RunError("a\n  | b"), 4, "error: a\n  | b\n"),
        (OSError("full"), 4, "error: full\n"),
        (ValueError("ours"), 70, "ValueError: ours\n"),
        (AssertionError("ours"), 70, "AssertionError: ours\n"),
        (KeyboardInterrupt(), 130, "\ninterrupted; the same command goes on where it stopped\n"),
    ],
)
def test_how_a_command_ends(error: BaseException, code: int, says: str) -> None:
    def run(options: object) -> Answer:
        raise error

    ended = _ended(Command(run, resumable=True, failed=4))
    assert ended[:2] == (code, "") and ended[2].endswith(says)


def _ended(command: Command, *words: str) -> tuple[int, str, str]:
    """Its exit code and both outputs, as a command of the name "x"."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(COMMANDS, "x", "")
        patch.setattr("titan_moe.cli.main.load_command", lambda name: command)
        done = run_command("x", *words)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["train", "--help"], 0),
        (["--help"], 141),
        (["config", "init", "qwen3", "--flavor", "30B-A3B"], 0),
        (["bogus"], 2),
    ],
)
def test_command_whose_reader_has_left_ends_quietly(
    words: list[str], code: int, unbuffered: str
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    command = [*TITAN_MOE, *words]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=env)
    os.close(writer)
    assert "Broken" not in done.stderr and "Traceback" not in done.stderr
    assert done.returncode in (code, 0 if code == 141 else code)


def test_of_several_ranks_the_first_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setitem(os.environ, name, "1")
    assert _ended(Command(lambda options: Answer(1, ["one"]))) == (0, "", "")
