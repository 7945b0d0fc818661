"""Conversions hold little memory: one chunk ahead, some experts at a time."""

import torch

from tests.support.hf_folders import make_folder, small_model
from titan_moe.checkpoint.hf import read, read_back, write
from titan_moe.checkpoint.hf.read import import_folder
from titan_moe.checkpoint.hf.write import export_checkpoint


def test_an_import_reads_one_chunk_ahead_and_holds_two_at_most(tmp_path, monkeypatch):
    made, held = [], []

    def watched(*arguments):
        values = read_chunk(*arguments)
        made.append(values.untyped_storage())
        held.append(sum(storage.nbytes() > 0 for storage in made))
        return values

    read_chunk = read.read_chunk
    monkeypatch.setattr(read, "read_chunk", watched)
    monkeypatch.setattr(read, "LARGEST_CHUNK", 700)
    make_folder(tmp_path / "in", small_model("qwen3"), torch.bfloat16)
    import_folder(tmp_path / "in", tmp_path / "out", torch.float32)
    assert len(made) > 100
    assert max(held) == 2


def test_an_export_reads_some_experts_at_a_time(tmp_path, monkeypatch):
    model, boxes = small_model("qwen3"), []
    make_folder(tmp_path / "in", model, torch.bfloat16)
    import_folder(tmp_path / "in", tmp_path / "step-0", torch.float32)
    source = write.checkpoint_source

    def watched(*arguments):
        found = source(*arguments)

        def read_box(name, box):
            boxes.append((name, box[0]))
            return found.read(name, box)

        return found._replace(read=read_box)

    monkeypatch.setattr(write, "checkpoint_source", watched)
    two_experts = 2 * model.config.dim * model.config.moe.hidden_dim
    monkeypatch.setattr(read_back, "LARGEST_BOX", two_experts)
    export_checkpoint(tmp_path / "step-0", tmp_path / "out", torch.bfloat16)
    rows = [rows for name, rows in boxes if name == "layers.1.moe.experts.w1"]
    assert rows == [slice(n, n + 2) for n in range(0, model.config.moe.num_experts, 2)]
