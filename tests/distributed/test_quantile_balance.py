"""The quantile rule in a layout beside one process: the same biases, and loads that get even."""

import torch
import torch.distributed as dist
from torch import Tensor

from scripts.bench.train_steps import random_batch
from titan_moe.runtime.ranks import run_on_ranks

STEPS, SEQUENCES = 3, 4


def biases(degrees: dict[str, int]) -> tuple[Tensor, list[Tensor]]:
    """Returns the layers' biases after some steps of one global batch, and each step's counts."""
    from titan_moe.config.job_config import JobConfig
    from titan_moe.data.batch import Batch
    from titan_moe.models.registry import model_config
    from titan_moe.training.train_step import build_step

    readers = dist.get_world_size() // degrees.get("tensor_parallel_degree", 1)
    job = JobConfig.model_validate(
        {
            "model": {"name": "qwen3", "flavor": "debugmodel_moe"},
            "moe": {"bias_update": "quantile", "bias_momentum": 0.1, "score": "sigmoid"},
            "parallelism": {"data_parallel_shard_degree": readers, **degrees},
            "optimizer": {"lr": 1e-9},
            "training": {"dtype": "float64", "seq_len": 32, "global_batch_size": SEQUENCES},
        }
    )
    job = job.with_values(training={"local_batch_size": SEQUENCES // readers})
    config = model_config("qwen3", "debugmodel_moe")
    sharded, _, step = build_step(job, config, device=torch.device("cpu"))
    sharded.train(True)
    whole = random_batch(SEQUENCES, 32, config.vocab_size)
    place = sharded.meshes.dims.coordinate(dist.get_rank(), "batch")
    tensors = whole.tokens_BS, whole.labels_BS, whole.documents_BS
    own_rows = (x_BS.chunk(readers)[place] for x_BS in tensors)
    batch = Batch(*own_rows, whole.samples[: SEQUENCES // readers])
    counts = [step([batch]).counts_LE for _ in range(STEPS)]
    routers = [moe.router for moe in sharded.moe_layers().values()]
    return torch.stack([router.expert_bias.clone() for router in routers]), counts


def test_biases_of_a_layout_are_those_of_one_process_and_loads_get_even() -> None:
    ((alone, counts),) = run_on_ranks(biases, 1, {})
    degrees = {"tensor_parallel_degree": 2, "expert_parallel_degree": 2}
    for found, _ in run_on_ranks(biases, 4, degrees):
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-9)
    assert alone.any() and alone.mean(-1).abs().max() < 1e-6
    first, *_, last = [(each.max(-1).values / each.double().mean(-1)).mean() for each in counts]
    assert last < 1.2 < 1.5 < first, (first, last)
