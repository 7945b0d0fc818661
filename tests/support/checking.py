"""A model to check, and a short way to write command lines about it."""

from dataclasses import replace

from titan_moe.checks.job import check
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import load_job
from titan_moe.models.config import GQAConfig, ModelConfig, RopeConfig
from titan_moe.models.registry import model_config
from titan_moe.moe.config import MoEConfig

MODEL = replace(
    model_config("deepseek_v3", "debugmodel"),
    vocab_size=272,
    dim=64,
    num_layers=4,
    attention=GQAConfig(16, 8, 4, RopeConfig(10_000.0)),
    hidden_dim=512,
    moe=MoEConfig(num_experts=8, top_k=2, hidden_dim=256, num_shared_experts=1),
)
EP = "--p.expert_parallel"
ASYNC = "--p.enable_async_tensor_parallel true"
SYMMETRIC = f"{EP}_comm_backend symmetric"
_SHORT = {
    **{"pp": "pipeline_parallel_degree", "cp": "context_parallel_degree"},
    **{"tp": "tensor_parallel_degree", "ep": "expert_parallel_degree"},
}


def job_of(arguments: str) -> JobConfig:
    """Loads a command line in which `pp 2` is --parallelism.pipeline_parallel_degree 2.

    --p.key is --parallelism.key.
    """
    words = [f"--p.{_SHORT[word]}" if word in _SHORT else word for word in arguments.split()]
    return load_job([word.replace("--p.", "--parallelism.") for word in words])


def problems(arguments: str, ranks: int = 1, model: ModelConfig = MODEL) -> list[str]:
    return check(job_of(arguments), model, ranks)
