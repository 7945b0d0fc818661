"""The types that meet in a block, which a gradient cannot show."""

import torch

from tests.support.tiny import SEQ_LEN, global_batch, make_job, tiny
from titan_moe.config.job_config import JobConfig
from titan_moe.runtime.ranks import run_on_ranks


def types_in_a_block(job: JobConfig) -> dict[str, str]:
    """The types that meet in an MoE block."""
    from titan_moe.data.batch import Batch
    from titan_moe.distributed.parallelize import build_sharded_model
    from titan_moe.moe import experts
    from titan_moe.ops.gated import gated_rows
    from titan_moe.train_step import local_batch

    device = torch.device("cpu")
    sharded = build_sharded_model(job, tiny(job), device=device, world_size=2)
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
    tokens, labels, documents = (x[:1] for x in global_batch(0, 96))
    sharded.execution.train(local_batch(Batch(tokens, labels, documents, [[]]), sharded, device))
    assert tokens.shape[1] == SEQ_LEN
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
