"""routes import: a file that is not of the model or the data is one line, and leaves nothing."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.commands import run_command
from tests.support.paths import DEBUG_CONFIGS

# The first document of a sequence, and its experts in 8 layers, of which the first is dense.
TEXT = "One times one is one."
IDS = list(TEXT.encode())
ROUTES = [[[0, 0], *([t % 8, (t + 1) % 8] for _ in range(7))] for t in range(len(IDS))]
LINE = {"token_ids": IDS, "routed_experts": ROUTES[:-1]}


def run_import(folder: Path, *lines: str | dict[str, Any], family: str = "deepseek_v3", **keys):
    """Imports a file of these lines into folder/record."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / "responses.jsonl").write_text("\n".join(texts))
    (folder / "data.txt").write_text(f"{TEXT}\n\nTwo.\n\n" * 40)
    keys = {"training.dataset_path": folder / "data.txt", "training.steps": 1, **keys}
    keys |= {"training.global_batch_size": 2, "training.prepend_bos": False}
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    files = folder / "responses.jsonl", "--config", DEBUG_CONFIGS / f"gate_{family}.toml"
    out = "--out", folder / "record"
    return run_command("routes", "import", *files, *out, "--ranks", 1, *words)


@pytest.mark.parametrize("last", [[], [[[0, 0]] * 8], [[[2, 3]] * 8], [[[9, -1]] * 8]])
def test_import_says_what_it_found(tmp_path: Path, last: list[Any]) -> None:
    line = {**LINE, "routed_experts": ROUTES[:-1] + last}
    done = run_import(tmp_path, line, {**line, "token_ids": [*IDS[:-1], 0]}, "")
    first, second = done.stdout.splitlines()
    assert "record: routes of 70 tokens" in first
    assert "1 of 2 responses are whole in a document" in first
    assert second.endswith("responses.jsonl:2 and 0 more are whole in no document")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_ids": [0, *IDS[1:]]}, "no document in steps 1 to 1 begins with the token_ids"),
        ({"routed_experts": [[*t[:-1], t[0][:1]] for t in ROUTES]}, "inhomogeneous"),
        ({"routed_experts": [[k[:1] for k in t] for t in ROUTES]}, "1 experts of each .* top_k=2"),
        ({"routed_experts": [t[:6] for t in ROUTES]}, "6 layers, the model has 8, 7 with experts"),
        ({"routed_experts": [t[::-1] for t in ROUTES]}, "token 0 has an expert twice in layers.7"),
        ({"routed_experts": [[[7, 8]] * 8] * len(IDS)}, "expert 8, the model has num_experts=8"),
        ({"routed_experts": ROUTES[:-2]}, "routes of tokens 0 to 18, .* last of 21 token_ids or"),
        ({"routed_experts_start_len": 2}, "routes of tokens 2 to 21, which must end with the last"),
        ({"routed_experts": "AAAA"}, "buffer size must be a multiple"),
        ({"routed_experts": "AAAAAAAA" * 2}, "3 integers are routes of no tokens, layers"),
        (
            {"routed_experts": [[[2, 3], *t[1:]] for t in ROUTES]},
            r"in layers that are dense in the model: \[0\]",
        ),
        ({"routed_experts": "k05VTVBZAQ=="}, "responses.jsonl:2: "),
        ({"routed_experts": [1.5]}, r"no array \[tokens, layers, top_k\] of whole numbers"),
        ({"token_ids": TEXT}, "token_ids is no list of numbers"),
        ("{", "jsonl:2: "),
        ("{}", "jsonl:2: .*token_ids"),
        ("", "no document"),
    ],
)
def test_bad_line_is_one_line(tmp_path: Path, change: Any, words: str) -> None:
    line = change if isinstance(change, str) else {**LINE, **change}
    assert_refused(words, tmp_path, "", line)


@pytest.mark.parametrize("routed", [[0, 0], [3, 4]])
def test_integers_without_a_shape_have_the_one_that_fits(tmp_path: Path, routed: list[int]) -> None:
    """8 tokens of 7 layers with experts are as many integers as 7 tokens of all 8 layers."""
    sparse = [token[1:] for token in ROUTES[:8]]
    sparse[-1][0] = routed
    integers = np.array(sparse, np.int32).tobytes()
    for name, routes in (("lists", sparse), ("integers", base64.b64encode(integers).decode())):
        (tmp_path / name).mkdir()
        done = run_import(tmp_path / name, {"token_ids": IDS[:8], "routed_experts": routes})
        assert done.returncode == 0, done.stderr
    lists, ints = (
        {path.name: path.read_bytes() for path in (tmp_path / name / "record").iterdir()}
        for name in ("lists", "integers")
    )
    assert lists == ints


def test_integers_of_two_shapes_are_refused(tmp_path: Path) -> None:
    zeros = base64.b64encode(bytes(4 * 2 * 56)).decode()
    line = {"token_ids": IDS[:8], "routed_experts": zeros}
    assert_refused(r"of \[7, 8, 2\] and of \[8, 7, 2\] tokens", tmp_path, line)


def test_expert_0_in_each_of_many_layers_with_one_expert_is_no_route(tmp_path: Path) -> None:
    line = {"token_ids": IDS[:3], "routed_experts": [[[0]] * 4, [[1]] * 4]}
    assert_refused("token 0 has expert 0 in each layer", tmp_path, line, family="llama4")


def assert_refused(words: str, folder: Path, *lines: str | dict[str, Any], **how: Any) -> None:
    """The import of these lines fails in one line, and leaves no record."""
    done = run_import(folder, *lines, **how)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and re.search(words, line), line
    assert sorted(path.name for path in folder.iterdir()) == ["data.txt", "responses.jsonl"]


STAGES = {"training.steps": 3, "stages": '[{"from_step": 2, "seq_len": 32}]'}
DENSE = {"model.name": "qwen3", "model.flavor": "debugmodel"}


def test_import_refuses_what_has_no_record(tmp_path: Path) -> None:
    assert_refused("selects keys too", tmp_path, LINE, family="deepseek_v32")
    assert_refused("no experts", tmp_path, LINE, **DENSE)
    assert_refused("stages change the batches", tmp_path, LINE, **STAGES)
    (tmp_path / "record").mkdir()
    done = run_import(tmp_path, LINE)
    assert done.returncode == 2 and "record exists: name another folder" in done.stderr
