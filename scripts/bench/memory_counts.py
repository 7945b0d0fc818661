"""Lays the memory estimate beside the bytes of all tensors that are alive in a step.

    python -m scripts.bench.memory_counts [PART OF A NAME ...]

The program's own step runs on one rank of a fake world (titan_moe/simulate/fake_rank.py), in
float32 and with a CPU's kernels; what these keep beside a GPU's is counted in `cpu_keeps`. Routing
is balanced. Layers of each model are few, and all its other dimensions are the model's.
"""

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from titan_moe.config.job_config import JobConfig
from titan_moe.config.pipeline import num_microbatches
from titan_moe.models.config import GQAConfig, MLAConfig, ModelConfig
from titan_moe.parallelize.memory import Memory, memory_of_ranks
from titan_moe.parallelize.plan import Plan
from titan_moe.parallelize.policies import make_plan
from titan_moe.runtime.process_pool import in_fresh_processes
from titan_moe.simulate.step import measure, rank_step

_DEGREES = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "ep": "expert_parallel_degree",
    "etp": "expert_tensor_parallel_degree",
}


class Case(NamedTuple):
    """A step whose tensors are counted."""

    model: str
    layers: int
    """Layers that are left of the model."""
    ranks: int
    recompute: str
    """none, op, 2 or full, with "+" and what is kept besides."""
    keys: dict[str, Any]
    """Degrees, keys of [training] and [parallelism], and whole tables."""

    @property
    def name(self) -> str:
        words = [f"{key}={value}" for key, value in self.keys.items()]
        return " ".join([self.model, f"{self.ranks} ranks", *words, self.recompute])

    def job(self) -> JobConfig:
        """Returns the configuration."""
        family, flavor = self.model.split("/")
        parallelism, training, tables = {}, {}, {}
        for key, value in self.keys.items():
            if isinstance(value, dict):
                tables[key] = value
            elif key in _DEGREES or key in JobConfig().parallelism.model_fields:
                parallelism[_DEGREES.get(key, key)] = value
            else:
                training[key] = value
        mode, *kept = self.recompute.split("+")
        how: dict[str, Any] = {"mode": mode}
        if mode in ("op", "2"):
            how = {"mode": "selective", "selective_ac_option": mode}
        how |= {f"keep_{each}": True for each in kept}
        defaults: dict[str, Any] = {"seq_len": 128, "local_batch_size": 32}
        defaults |= {"mixed_precision_param": "float32", "loss_chunk_size": 1024}
        return JobConfig.model_validate(
            {
                "model": {"name": family, "flavor": flavor},
                "parallelism": parallelism,
                "training": defaults | training,
                "activation_checkpoint": how,
                **tables,
            }
        )


def _cases() -> Iterator[Case]:
    for model, layers in (
        ("qwen3/30B-A3B", 6), ("qwen3/8B", 6), ("deepseek_v3/16B", 6), ("gpt_oss/20b", 6),
        ("mixtral/8x7B", 4), ("glm4_moe/GLM-4.5-Air", 5), ("minimax_m2/MiniMax-M2", 4),
        ("qwen3_next/80B-A3B", 4), ("nemotron_h/30B-A3B", 10), ("llama4/17bx16e", 4),
    ):  # fmt: skip
        ep = {} if model == "qwen3/8B" else {"ep": 8}
        for recompute in ("none", "op", "full"):
            yield Case(model, layers, 8, recompute, ep)
    qwen = "qwen3/30B-A3B"
    piped: dict[str, Any] = {"local_batch_size": 32, "pipeline_parallel_microbatch_size": 4}
    for keys in (
        {}, {"tp": 2, "ep": 4}, {"tp": 2, "ep": 2, "etp": 2}, {"cp": 2, "ep": 8}, {"ep": 4},
        {"dp_replicate": 2, "ep": 4}, {"tp": 4, "cp": 2}, {"ep": 8, "global_batch_size": 512},
        {"pp": 2, "ep": 4} | piped, {"pp": 4, "tp": 2} | piped,
        {"pp": 2, "ep": 2, "pipeline_parallel_schedule": "Interleaved1F1B"} | piped,
    ):  # fmt: skip
        for recompute in ("none", "full"):
            yield Case(qwen, 8, 8, recompute, keys)
    for recompute in ("2", "full+attention", "full+exchanged_rows"):
        yield Case(qwen, 8, 8, recompute, {"ep": 8})
    for schedule in ("ZBVZeroBubble", "DualPipeV", "InterleavedZeroBubble"):
        keys = {"pp": 2, "ep": 4, "pipeline_parallel_schedule": schedule} | piped
        yield Case(qwen, 8, 8, "none", keys)
    for more in (
        {"optimizer": {"state_dtype": "bfloat16"}},
        {"optimizer": {"name": "Muon"}},
        {"lora": {"rank": 16}},
        {"fsdp_accumulation": "keep_gathered", "global_batch_size": 512},
        {"fsdp_accumulation": "keep_unsharded", "global_batch_size": 512},
        {"fsdp_reshard_after_forward": "never"},
        {"expert_parallel_overlap": True},
        {"expert_parallel_comm_backend": "deduplicated"},
        {"loss_chunk_size": 0},
    ):
        yield Case(qwen, 8, 8, "full", {"ep": 8, **more})
    for ranks in (2, 4):
        yield Case(qwen, 2, ranks, "full", {"ep": ranks})
    yield Case(qwen, 48, 8, "full", {"ep": 8})
    yield Case(qwen, 48, 64, "none", {"ep": 8})
    yield Case("qwen3/235B-A22B", 94, 64, "full", {"ep": 16})
    yield Case("qwen3/235B-A22B", 94, 256, "full", {"pp": 8, "ep": 16} | piped)
    yield Case("deepseek_v3/671B", 61, 1024, "full", {"pp": 8, "tp": 2, "ep": 64} | piped)


CASES = list(_cases())


def count(case: Case) -> tuple[int, Memory, float]:
    """Returns the bytes counted on rank 0, their estimate, and what a CPU keeps besides."""
    job, config, ranks, _ = rank_step(case.job(), case.ranks, layers=case.layers)
    plan = make_plan(job, config, ranks)
    facts = measure(job, config, ranks)
    return facts.most_bytes, memory_of_ranks(plan, 1.0)[0], cpu_keeps(plan)


def cpu_keeps(plan: Plan) -> float:
    """Returns the bytes that rank 0 keeps for the backward on a CPU alone: torch's norm of a CPU is
    made of parts, of which one keeps the normed values."""
    config, job, dims = plan.config, plan.job, plan.dims
    sequences = job.training.local_batch_size
    if dims.pp > 1:
        sequences = job.parallelism.pipeline_parallel_microbatch_size
    tokens = sequences * job.training.seq_len / dims.cp / dims.tp
    layers, flights = range(config.num_layers), 1
    if dims.pp > 1:
        layers = range(config.num_layers // dims.pp)
        flights = min(dims.pp, num_microbatches(job.parallelism, job.training.local_batch_size))
    per_layer = [_normed(config, layer) for layer in layers]
    normed = sum(per_layer) * flights
    if job.activation_checkpoint.mode != "none":
        normed = max(per_layer)
    return 4.0 * tokens * normed


def _normed(config: ModelConfig, layer: int) -> int:
    mixer = config.mixer(layer)
    found = config.dim * (
        (mixer is not None) + (config.is_moe_layer(layer) or config.is_dense_layer(layer))
    )
    if isinstance(mixer, GQAConfig) and mixer.qk_norm == "learned":
        found += (mixer.num_heads + mixer.num_kv_heads) * mixer.head_dim
    if isinstance(mixer, MLAConfig):
        found += mixer.kv_rank + (mixer.q_rank or 0)
    return found


if __name__ == "__main__":
    words = sys.argv[1:]
    chosen = (
        CASES[44:]
        if words == ["rest"]
        else [case for case in CASES if not words or any(word in case.name for word in words)]
    )
    print("| step | counted, MiB | estimated | error | at |\n|---|--:|--:|--:|---|")
    for number, (counted, found, besides) in in_fresh_processes(
        count, [(case,) for case in chosen], num_workers=2
    ):
        estimate = found.total + besides
        print(
            f"| {chosen[number].name} | {counted / 2**20:,.0f} | {estimate / 2**20:,.0f} "
            f"| {estimate / counted - 1:+.1%} | {found.moment} |  {found}",
            flush=True,
        )
