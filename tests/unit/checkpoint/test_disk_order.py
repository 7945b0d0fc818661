"""A checkpoint gets its name when all of it is on disk, and is told of when its name is."""

import pytest
import torch

from tests.support.disk_order import watched_disk
from tests.support.hf_folders import make_folder, small_model
from tests.support.saved_runs import Run
from titan_moe.checkpoint.hf.read import import_folder
from titan_moe.runtime.files import write_whole


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_checkpoint(tmp_path, mode):
    run = Run(tmp_path, interval=1, async_mode=mode, keep_latest_k=1)
    with watched_disk() as disk:
        for step in (1, 2, 2):  # Another one, one that replaces it.
            run.checkpointer.maybe_save(step, {"step": step})
            run.checkpointer.finish()
            assert disk.lost_names() == []
    assert disk.renamed == ["step-1", "step-2", "step-2.abandoned-1", "step-2"] and disk.lost == []


def test_an_export(tmp_path):
    make_folder(tmp_path / "in", small_model("qwen3"), torch.bfloat16)
    with watched_disk() as disk:
        import_folder(tmp_path / "in", tmp_path / "out", torch.float32)
    assert disk.renamed[-1] == "out" and disk.lost == disk.lost_names() == []


def test_a_file_that_others_read(tmp_path):
    with watched_disk() as disk:
        write_whole(tmp_path / "run.json", "{}")
    assert disk.renamed == ["run.json"] and disk.lost == []
