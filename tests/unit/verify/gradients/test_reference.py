"""The reference knows nothing of what it judges, and its fixture is hard to pass."""

import ast
from dataclasses import replace
from pathlib import Path

import torch

from tests.support.paths import DEBUG_CONFIGS
from titan_moe.config.parse import load_job
from titan_moe.models.registry import model_config
from titan_moe.verify.gradients import reference
from titan_moe.verify.gradients.fixture import easy, make_fixture
from titan_moe.verify.layouts.layouts import SEQ_LEN

_ALLOWED = ("titan_moe.models", "titan_moe.moe", "titan_moe.config.", "titan_moe.data.batch")


def test_the_reference_imports_nothing_of_what_it_judges():
    tree = ast.parse(Path(reference.__file__).read_text())
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    ours = [module for module in modules if module and module.startswith("titan_moe")]
    assert ours and all(module.startswith(_ALLOWED) for module in ours)
    assert "titan_moe.moe.balance" not in ours, "the auxiliary losses are the reference's own"


def test_easy_fixture_is_named_with_its_reasons():
    job = load_job(["--job.config_file", str(DEBUG_CONFIGS / "gate_qwen3.toml")])
    job = job.with_values(training={"seq_len": SEQ_LEN})
    config = replace(model_config(job.model.name, job.model.flavor), num_layers=3)
    case = make_fixture(job, config, 16)
    assert easy(case, job) == []
    batches = [
        replace(
            batch,
            labels_BS=torch.zeros_like(batch.labels_BS),
            documents_BS=torch.zeros_like(batch.documents_BS),
        )
        for batch in case.batches
    ]
    found = easy(replace(case, batches=batches), job)
    assert "every sequence has the same number of targets" in found
    assert "documents are not packed" in found
    unclipped = job.with_values(training={"max_norm": 1e9})
    assert "clipping is not active" in easy(case, unclipped)
    other = replace(case, idle=(case.idle[0], range(0, 1)))
    assert "idle experts have tokens" in easy(other, job)
