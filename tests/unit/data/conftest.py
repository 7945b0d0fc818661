"""Keeps what `datasets` converts out of the user's own cache, and the hub out of reach."""

import pytest

from tests.support.chat_templates import tokenizer_file


@pytest.fixture(autouse=True)
def _private_cache(tmp_path_factory, monkeypatch):
    import datasets
    import huggingface_hub

    folder = tmp_path_factory.getbasetemp() / "hf"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder / "datasets"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "datasets"))
    monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", str(folder / "downloads"))
    monkeypatch.setattr(datasets.config, "EXTRACTED_DATASETS_PATH", str(folder / "extracted"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The folder of a tokenizer that has the special tokens of all templates."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer_file(folder, bos_token="<s>")
    return folder
