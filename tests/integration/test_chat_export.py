"""A folder made of a run on conversations has its chat template, and stops where a turn ends."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.support.chat_templates import TEMPLATES, tokenizer_file
from tests.support.conversations import talk, write
from tests.support.hf_folders import make_folder, small_model
from tests.support.trainings import make_job, train_here
from titan_moe.cli.generation import load_model
from titan_moe.cli.hf import COMMANDS
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.runtime.ranks import run_on_ranks

OTHER = "{{ messages[0].content }}"
NAMED = [{"name": name, "template": OTHER} for name in ("default", "tool_use")]
TOOLS = TEMPLATES["chatml"] + "{# with tools #}"
OF_BASE = {"default": TEMPLATES["chatml"], "tool_use": TOOLS}
# Templates and ends of texts where models have them.
PLACES = {
    "chat_template.jinja": OTHER,
    "chat_template.json": json.dumps({"chat_template": OTHER}),
    "special_tokens_map.json": '{"eos_token": "</s>"}',
    "generation_config.json": '{"eos_token_id": 1}',
}


def make_base(folder, *, trained):
    """Makes a model whose texts end with token 1. Its templates are those that are trained, or
    others are everywhere."""
    named = [{"name": name, "template": text} for name, text in OF_BASE.items()]
    small = small_model("qwen3", 1)
    make_folder(folder, replace(small, config=replace(small.config, vocab_size=512)), torch.float32)
    tokenizer_file(folder, chat_template=named if trained else NAMED)
    (folder / "generation_config.json").unlink()
    for name, text in {} if trained else PLACES.items():
        (folder / name).write_text(text)


def check(folder, talked, ids, end):
    """transformers reads the ids that were trained, and stops after the turn."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template(talked, tools=[{}])["input_ids"] == ids
    assert tokenizer.eos_token_id == end
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [end, 1]
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == [end, 1]

    def write_turn(written, scores):
        return scores.index_fill(1, torch.tensor(end if written.shape[1] == 7 else 65), 1e9)

    model, how = AutoModelForCausalLM.from_pretrained(folder), {"logits_processor": [write_turn]}
    text = model.generate(torch.full((1, 5), 65), max_new_tokens=9, **how)
    assert text[0].tolist() == [65] * 7 + [end]


@pytest.mark.parametrize("command", ["export", "merge"])
def test_an_export_has_the_template_that_was_trained_and_stops_after_a_turn(command, tmp_path):
    """The template is a file that is gone later, or of adapters' runs the tokenizer's own."""
    base, file, talked = tmp_path / "base", tmp_path / "own", talk("a", "b")
    merges = command == "merge"
    make_base(base, trained=merges)
    file.write_text(TEMPLATES["chatml"] + "{# é #}\n")
    data = write(tmp_path / "talks.jsonl", [{"messages": talked}] * 8)
    training = {"dataset": "json", "dataset_path": str(data), "dataset_format": "messages"}
    training |= {"repeat_dataset": True, "messages": {} if merges else {"template": str(file)}}
    training["messages"] |= {"date": "2026-01-31", "template_kwargs": {"enable_thinking": False}}
    saves = {"initial_load_in_hf": True, "last_save_in_hf": True, "export_dtype": "float32"}
    tables = {"training": training, "checkpoint": saves, "lora": {"rank": 2} if merges else {}}
    model = {"name": "qwen3", "flavor": "hf", "hf_assets_path": str(base)}
    job = make_job(tmp_path / "run", steps=1, model=model, **tables)
    tokenizer = load_tokenizer(str(base), job.training)
    ids = tokenizer.conversations.encode("", json.dumps({"messages": talked})).ids.tolist()
    texts = tokenizer.text_format()
    # A later run on texts passes it on, unless its tokenizer lacks the token that ends a turn.
    assert load_tokenizer(str(base)).text_format(texts) == texts
    assert load_tokenizer("bytes").text_format(texts).template is None
    run_on_ranks(train_here, 1, job)
    file.unlink()
    step, out = tmp_path / "run/checkpoint/step-1", tmp_path / "out"
    assert COMMANDS[command].main(f"hf {command}", [str(step), "--out", str(out)]) == 0
    for folder in [out] if merges else [out, step.with_name("step-1-hf")]:
        assert (folder / "chat_template.jinja").read_bytes() == texts.template.encode()
        assert OTHER not in "".join(path.read_text() for path in folder.glob("*.j*"))
        check(folder, talked, ids, *texts.turn_ends.values())
        templates = AutoTokenizer.from_pretrained(folder).chat_template
        assert templates == (OF_BASE if merges else texts.template)
    asked = load_model(out if merges else step, chat=True)[1].conversations
    assert asked.template.source == texts.template
    assert merges or asked.identity == tokenizer.conversations.identity
