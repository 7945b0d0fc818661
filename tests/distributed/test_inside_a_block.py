"""The types that meet in a block, which a gradient cannot show."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.tiny import FirstGradients, batch_of, make_job, tiny_step, whole
from titan_moe.config.job_config import JobConfig, Model
from titan_moe.models.registry import model_config
from titan_moe.runtime.ranks import run_on_ranks


def types_in_a_block(job: JobConfig) -> dict[str, str]:
    """The types that meet in an MoE block."""
    from titan_moe.moe import experts
    from titan_moe.ops.gated import gated_rows

    sharded, step = tiny_step(job)
    (model,) = sharded.parts
    types: dict[str, str] = {}

    def note_block(block, args):
        types.update(stream=str(args[0].dtype), cos=str(args[1].cos_BSC.dtype))

    def noted(gate_RF, up_RF, weights_R1, activation):
        types.update(rows=str(gate_RF.dtype), weights=str(weights_R1.dtype))
        return gated_rows(gate_RF, up_RF, weights_R1, activation)

    experts.gated_rows = noted
    moe_block = list(model.layers.values())[-1]
    moe_block.register_forward_pre_hook(note_block)
    moe_block.moe.router.register_forward_hook(
        lambda router, args, scores: types.update(scores=str(scores.scores_TE.dtype))
    )
    step([batch_of(0, slice(1))])
    return types


def test_bfloat16_compute_keeps_angles_scores_and_routing_weights_in_float32():
    training = {"dtype": "float32", "mixed_precision_param": "bfloat16", "max_norm": 1.0}
    job = make_job("deepseek_v3", training=training, parallelism={"expert_parallel_degree": 2})
    types = run_on_ranks(types_in_a_block, 2, job)[0]
    bfloat16, float32 = "torch.bfloat16", "torch.float32"
    assert types == {
        "stream": bfloat16,
        "rows": bfloat16,
        "cos": float32,
        "scores": float32,
        "weights": float32,
    }


def rates_in_a_layer(job: JobConfig) -> dict[str, Any]:
    """Decay rates as a recurrent layer sees them in a step, and as they are kept; their gradients.

    Values are those of all ranks together."""
    config = replace(model_config(job.model.name, "gate"), num_layers=1)
    sharded, step = tiny_step(job, config)
    decay = next(m for n, m in sharded.parts[0].named_modules() if n.endswith("attention.decay"))
    kept = {n: whole(p.detach()).clone() for n, p in decay.named_parameters()}
    found: dict[str, Any] = {"types": {str(p.dtype) for p in sharded.parts[0].parameters()}}

    def note(module, args, output):
        found["seen"] = {n: p.detach().clone() for n, p in module.named_parameters()}

    decay.register_forward_hook(note)
    gradients = FirstGradients(sharded)
    rank = dist.get_rank()
    step([batch_of(0, slice(rank, rank + 1))], observer=gradients)
    rates = {n: g for n, g in gradients.found.items() if ".decay." in n}
    return found | {"kept": kept, "gradients": rates}


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "nemotron_h"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decay_rates_are_never_rounded_to_bfloat16(family: str, dtype: str):
    training = {"dtype": dtype, "mixed_precision_param": "bfloat16", "max_norm": 1.0}
    job = make_job("qwen3", training=training)
    job = job.model_copy(update={"model": Model(name=family, flavor="gate")})
    for found in run_on_ranks(rates_in_a_layer, 2, job):
        assert found["types"] == {"torch.float32", f"torch.{dtype}"}
        assert len(found["gradients"]) == 2 + (family == "nemotron_h")
        for name, value in found["kept"].items():
            assert found["seen"][name].dtype == value.dtype == torch.float32
            assert torch.equal(found["seen"][name], value)
        for gradient in found["gradients"].values():
            assert gradient.dtype == torch.float32 and gradient.norm() > 0
    assert not torch.equal(found["kept"]["A_log.weight"].bfloat16(), found["kept"]["A_log.weight"])
