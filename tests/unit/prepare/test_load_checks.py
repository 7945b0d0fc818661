"""A checkpoint that cannot be loaded is refused before any rank starts, by `check` and by the
launcher, whose checks are `check_all`; the one that can is not."""

import shutil
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers.models import WordLevel

from tests.support.documents import write_jsonl
from tests.support.hf_folders import make_folder, small_model
from tests.support.trainings import make_job, train_here
from titan_moe.config.errors import ConfigError
from titan_moe.config.parse import save_job
from titan_moe.prepare.job import check_all
from titan_moe.runtime.ranks import run_on_ranks

WORDS = [f"some words of document {number}, and more of them" for number in range(200)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run of two steps on one rank, its TOML file, its data, and other files."""
    folder = tmp_path_factory.mktemp("trained")
    training = {"dataset": "json", "dataset_path": write_jsonl(folder / "a.jsonl", WORDS)}
    training |= {"local_batch_size": 4, "global_batch_size": 4}
    job = make_job(folder / "run", steps=2, training=training)
    save_job(job, folder / "run.toml")
    run_on_ranks(train_here, 1, job)
    write_jsonl(folder / "b.jsonl", WORDS[1:])
    make_folder(folder / "hf", small_model("mixtral"), torch.float32)
    (folder / "empty").mkdir()
    (folder / "tokenizer").mkdir()
    tokenizers.Tokenizer(WordLevel({"a": 0, "</s>": 1}, "a")).save(
        f"{folder}/tokenizer/tokenizer.json"
    )
    (folder / "tokenizer/tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return folder


def lines_of(folder: Path, words: str, ranks: int = 1) -> list[str]:
    """Returns what the check says of the run with other keys."""
    try:
        check_all(["--config", str(folder / "run.toml"), *words.split()], ranks, 1, {})
    except ConfigError as error:
        return error.lines
    return []


NEW = "--job.dump_folder {}/new --checkpoint.initial_load_path {}"
STEP_2 = f"{NEW}/run/checkpoint/step-2"
INITIAL = "checkpoint.initial_load_path={}"
PEFT = "--job.dump_folder {}/new --lora.initial_load_path {}/empty"
LAST_IN_HF = "--job.dump_folder {}/new --lora.rank 4 --checkpoint.last_save_in_hf"
MIXTRAL = "--model.name mixtral --model.flavor debugmodel"
WHOLE = "--checkpoint.initial_load_model_only false"
REFUSED = [
    ("--checkpoint.load_step 77", "checkpoint.load_step=77: {}/run/checkpoint has steps 2: choose"),
    ("--training.seq_len 32", "training.seq_len=32: the data position of {}/run/checkpoint/step-2"),
    ("--training.global_batch_size 8", "taken with 4: choose 4, or begin in another job.dump_fol"),
    ("--training.dataset_path {}/b.jsonl", "checkpoint"),
    ("--model.tokenizer_path {}/tokenizer", "checkpoint"),
    ("--optimizer.lr 1 --training.seq_len 32 --checkpoint.exclude_from_loading dataloader", None),
    ("--debug.seed 7", "debug.seed=7, and {}/run/checkpoint/step-2 is of a run with 0: set it to"),
    ("--training.freeze router", "freeze=['router'], and {}/run/checkpoint/step-2 is of a run w"),
    ("--training.freeze router --checkpoint.exclude_from_loading optimizer", None),
    (f"{STEP_2} --training.freeze router", None),
    (f"{NEW}/none", f"{INITIAL}/none: checkpoint {{}}/none does not exist: name a step-N folder"),
    (f"{NEW}/none --checkpoint.initial_load_in_hf", "none does not exist, or is no folder"),
    ("--checkpoint.initial_load_path {}/none", None),
    (f"{NEW}/empty", f"{INITIAL}/empty: {{}}/empty is no checkpoint of titan_moe: it has no mani"),
    (f"{STEP_2} --model.flavor debugmodel", "it is of model.name=deepseek_v3, model.flavor=2M: s"),
    (f"{STEP_2} --training.seq_len 32 {WHOLE}", "taken with seq_len=64, this run has seq_len=32"),
    (f"{STEP_2} --training.seq_len 32", None),
    (f"{NEW}/hf", f"{INITIAL}/hf: {{}}/hf is no checkpoint of titan_moe"),
    (f"{NEW}/hf --checkpoint.initial_load_in_hf", f"{INITIAL}/hf: {{}}/hf holds a model of the fa"),
    (f"{PEFT} --lora.rank 4", "lora.initial_load_path={}/empty: {}/empty is no PEFT folder: adap"),
    (PEFT, "lora.initial_load_path={}/empty without lora.rank: set it to the adapters' r"),
    (f"{LAST_IN_HF} --model.num_mtp_layers 1", "checkpoint.last_save_in_hf=true: mtp.layers.0.bl"),
    (LAST_IN_HF, None),
    (f"{LAST_IN_HF} {MIXTRAL} --moe.bias_update_speed 0.1", None),
    (f"{NEW}/hf --checkpoint.initial_load_in_hf {MIXTRAL}", "there 272); model.flavor=hf with"),
]


@pytest.mark.parametrize(("words", "says"), REFUSED)
def test_checkpoint_that_ranks_would_refuse_is_one_line_before_they_start(
    trained: Path, words: str, says: str | None
) -> None:
    before = sorted(trained.rglob("*"))
    lines = lines_of(trained, words.replace("{}", str(trained)))
    if says is None:
        assert lines == []
    else:
        (line,) = lines
        assert says.replace("{}", str(trained)) in line
    assert sorted(trained.rglob("*")) == before, "nothing is written"


def test_incomplete_checkpoint_is_refused(trained: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained / "run", tmp_path / "run")
    (run / "checkpoint/step-2/train_state.json").unlink()
    (line,) = lines_of(trained, f"--job.dump_folder {run}")
    assert "step-2 is damaged or incomplete: train_state.json is missing" in line


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (
            "--training.global_batch_size -1",
            "set training.global_batch_size=4 and training.local_batch_size=1",
        ),
        ("", "set training.local_batch_size=1"),
    ],
)
def test_remedy_for_other_ranks_keeps_the_data_position(
    trained: Path, words: str, remedy: str
) -> None:
    (line,) = lines_of(trained, words, ranks=4)
    first, *_ = line.partition(": ")[2].rpartition(": ")[2].split(", or ")
    assert first == remedy
    keys = [word.replace("=", " ") for word in remedy.split() if "=" in word]
    assert lines_of(trained, " ".join(f"--{key}" for key in keys), ranks=4) == []
