"""Nothing gathers a tensor over one axis after another: not training, not Muon, not an export."""

import logging
from pathlib import Path

from tests.support.trainings import make_job, train_here
from titan_moe.config.job_config import JobConfig
from titan_moe.runtime.ranks import run_on_ranks


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _warnings_of_torch(job: JobConfig) -> list[str]:
    """What DTensor's redistribution says during a run that ends with an export."""
    said, logger = _Said(), logging.getLogger("torch.distributed.tensor._redistribute")
    logger.addHandler(said)
    try:
        train_here(job)
    finally:
        logger.removeHandler(said)
    return said.lines


def test_torch_warns_of_no_gathers_one_after_another(tmp_path: Path) -> None:
    job = make_job(
        tmp_path,
        steps=2,
        optimizer={"name": "Muon"},
        parallelism={"tensor_parallel_degree": 2, "expert_tensor_parallel_degree": 2},
        checkpoint={"last_save_in_hf": True},
    )
    assert run_on_ranks(_warnings_of_torch, 4, job) == [[]] * 4
    assert list(tmp_path.rglob("*.safetensors"))
