"""Each mistake about data: one line that names key, value and remedy, before anything starts."""

import subprocess
import sys

import pytest

from tests.support.documents import write_jsonl
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Training, Validation
from titan_moe.data.build import build_loader, check_data
from titan_moe.data.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer("bytes")
OFF = Validation()


def build(**keys):
    return build_loader(
        Training(**keys), TOKENIZER, seed=0, rank=0, num_ranks=1, global_batch_size=8
    )


# Wrong without a look into the data: found by check_data too.
PATHS = [
    ({"dataset": "json"}, "training.dataset='json' needs training.dataset_path"),
    ({"dataset": "tokens"}, "training.dataset='tokens' needs training.dataset_path"),
    ({"dataset": "json", "dataset_path": "{}/none"}, "none' does not exist"),
    ({"dataset": "json", "dataset_path": "{}/*.none"}, "none' does not exist"),
    ({"dataset": "text", "dataset_path": "{}"}, "holds no file that ends in .txt or .txt.gz or"),
    ({"dataset": "parquet", "dataset_path": "{}"}, "holds no file that ends in .parquet$"),
    ({"dataset": "json", "dataset_path": "{}/empty.json"}, "is empty: 1 file\\(s\\) of 0 bytes"),
    ({"dataset": "tokens", "dataset_path": "{}"}, "no manifest.json can be read there"),
    ({"dataset": "tokens", "dataset_path": "{}"}, "titan-moe tokenize --out .* --training.dataset"),
    ({"dataset": "c4", "dataset_path": "{}/none"}, "none' does not exist"),
    ({"dataset": "stdlib", "dataset_path": "{}"}, "has no use with training.dataset='stdlib'"),
    (
        {"blend": [{"dataset": "stdlib"}, {"dataset": "json", "dataset_path": "{}/none"}]},
        r"training.blend\[1\].dataset_path='.*none' does not exist",
    ),
]

CONTENTS = [
    ({"dataset": "json", "dataset_path": "{}/broken.json"}, "broken.json' cannot be read as json"),
    ({"dataset": "parquet", "dataset_path": "{}/broken.json"}, "cannot be read as parquet"),
    (
        {"dataset": "json", "dataset_path": "{}/column.json"},
        "text_column='text': .* has no such column, but url, size",
    ),
    (
        {"dataset": "json", "dataset_path": "{}/column.json", "text_column": "size"},
        "training.text_column='size': that column of .*column.json' holds int64, not text; it has "
        "url",
    ),
    (
        {
            "text_column": "url",
            "blend": [
                {"dataset": "json", "dataset_path": "{}/column.json"},
                {"dataset": "json", "dataset_path": "{}/column.json", "text_column": "uri"},
            ],
        },
        r"training.blend\[1\].text_column='uri': .* has no such column, but url, size: set ",
    ),
    (
        {"dataset": "json", "dataset_path": "{}/few.json"},
        "has 5 documents to train on, fewer than the 8 sequences of training.global_batch_size.*"
        "training.repeat_dataset=true",
    ),
    (
        {"blend": [{"dataset": "stdlib"}, {"dataset": "json", "dataset_path": "{}/few.json"}]},
        r"training.blend\[1\].dataset='json' has 5 documents",
    ),
    (
        {"dataset": "stdlb"},
        "training.dataset='stdlb', read from the Hugging Face hub, cannot be opened",
    ),
]


def fill(keys, folder):
    if isinstance(keys, dict):
        return {key: fill(value, folder) for key, value in keys.items()}
    if isinstance(keys, list):
        return [fill(value, folder) for value in keys]
    return keys.replace("{}", str(folder))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "empty.json").touch()
    (tmp_path / "broken.json").write_text('{"text": "a"}\n{"text": ')
    (tmp_path / "column.json").write_text('{"url": "a", "size": 3}\n')
    write_jsonl(tmp_path / "few.json", ["text"] * 5)
    return tmp_path


@pytest.mark.parametrize(("keys", "line"), PATHS + CONTENTS)
def test_building_says_it_in_one_line(folder, keys, line):
    with pytest.raises(ConfigError, match=line) as error:
        build(**fill(keys, folder))
    assert len(error.value.lines) == 1 and "\n" not in error.value.lines[0]


@pytest.mark.parametrize(("keys", "line"), PATHS)
def test_the_check_before_the_run_says_it_too(folder, keys, line):
    keys = fill(keys, folder)
    with pytest.raises(ConfigError, match=line) as error:
        build(**keys)
    assert check_data(Training(**keys), OFF, "bytes") == error.value.lines


def test_the_check_says_everything_at_once(folder):
    lines = check_data(
        Training(dataset="json", dataset_path="/none"),
        Validation(enable=True, dataset="tokens", dataset_path=str(folder)),
        "/no/tokenizer",
    )
    assert [line.split("=")[0] for line in lines] == [
        "model.tokenizer_path",
        "training.dataset_path",
        "validation.dataset_path",
    ]
    endless = check_data(Training(dataset="c4"), Validation(enable=True), "bytes")
    assert len(endless) == 1 and endless[0].startswith("validation.steps=-1")
    assert check_data(Training(), Validation(enable=True), "bytes") == []


def test_few_documents_do_when_repeated(folder):
    path = str(folder / "few.json")
    loader = build(dataset="json", dataset_path=path, repeat_dataset=True, seq_len=16)
    assert len(loader.next_step()) == 1
    loader.close()


def test_the_check_imports_neither_torch_nor_datasets():
    program = (
        "import sys; from titan_moe.config.job_config import Training, Validation; "
        "from titan_moe.data.build import check_data; "
        "assert check_data(Training(), Validation(), 'bytes') == []; "
        "assert not {'torch', 'datasets', 'pandas', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
