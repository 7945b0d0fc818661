"""As planted_bugs.py: mistakes in what only some families have."""

from tests.support.planting import Bug

_DISTRIBUTED = "titan_moe.distributed"
_EMBEDDING = "gradient tok_embeddings.weight"
_OUTPUT = "gradient output.weight"
_PIPELINE = "pp=2,schedule=1F1B,recompute=op,reshard=never"
_GATHERED = "cp=2,cp_method=allgather,cp_balancer=headtail,recompute=op,reshard=always"
_SINKS = "gradient layers.*.attention.sinks.weight"

FAMILY_BUGS: dict[str, Bug] = {
    # --- tied embeddings ---
    "a tie not summed between the ends of a pipeline": Bug(
        "titan_moe.distributed.tied_weights:sum_tied_grads",
        "if tied.partner is not None:",
        "if False:",
        caught_on=_PIPELINE,
        named=(f"{_EMBEDDING}*", f"{_OUTPUT}*"),
        spared=("loss *", "counts *", "gradient layers.*", "gradient norm.weight"),
        harmless_on="dp_shard=2",
        family="qwen3",
    ),
    "a tie not summed on a rank that has both": Bug(
        "titan_moe.distributed.tied_weights:sum_tied_grads",
        "total = torch.stack(grads).sum(0)",
        "total = grads[0]",
        caught_on="dp_shard=2,recompute=none",
        named=(f"{_EMBEDDING}*", f"{_OUTPUT}*"),
        spared=("loss *", "counts *", "gradient layers.*", "gradient norm.weight"),
        harmless_on="pp=2,schedule=1F1B",
        family="qwen3",
    ),
    "a tie counted twice in the norm": Bug(
        "titan_moe.train_step:TrainStep.__init__",
        "if each not in replicas]",
        "]",
        caught_on="dp_shard=2,recompute=none",
        named=("grad_norm*",),
        spared=("loss *", "counts *", "gradient *"),
        family="qwen3",
    ),
    "one end of a pipeline adds the other's part of a tie twice": Bug(
        "titan_moe.distributed.tied_weights:sum_tied_grads",
        "_exchanged(total.to(device), tied.partner, group)",
        "(1 + tied.partner) * _exchanged(total.to(device), tied.partner, group)",
        caught_on=_PIPELINE,
        named=(f"{_EMBEDDING}*",),
        spared=("loss *", "counts *", "gradient layers.*", _OUTPUT),
        harmless_on="dp_shard=2",
        family="qwen3",
    ),
    # --- multi-token prediction ---
    "labels ahead from the next document": Bug(
        "titan_moe.train_step:look_ahead",
        "labels.append(label_BS.masked_fill(document_BS != batch.documents_BS, IGNORE_INDEX))",
        "labels.append(label_BS)",
        caught_on="dp_shard=2,recompute=none",
        named=("mtp_loss*", "gradient *"),
        spared=("loss *", "counts *", "num_targets *", "balance_loss *"),
    ),
    "tokens and labels ahead shifted at a border of cp": Bug(
        "titan_moe.train_step:local_batch",
        "(x_BKS[..., own] for x_BKS",
        "(x_BKS[..., positions_S.roll(-1) - 1] for x_BKS",
        caught_on=_GATHERED,
        named=("mtp_loss*",),
        spared=("loss *", "counts layers.*", "num_targets *"),
        harmless_on="dp_shard=2",
    ),
    "multi-token prediction's loss lost": Bug(
        "titan_moe.models.mtp:MultiTokenPrediction.losses",
        "return output(torch.cat(list(hidden)), labels, factors, self.loss_sum)",
        "return output(hidden[0], labels_BS)",
        caught_on="dp_shard=2,recompute=none",
        named=("mtp_loss*", "gradient mtp.layers.*"),
        spared=("loss *", "counts *", "num_targets *"),
    ),
    "multi-token prediction's loss counted by every tp rank": Bug(
        "titan_moe.models.mtp:MultiTokenPrediction.losses",
        "factors = (1.0, *[self.loss_weight] * len(self.layers))",
        "factors = (1.0, *[2 * self.loss_weight] * len(self.layers))",
        caught_on="tp=2,recompute=none,reshard=default",
        named=("mtp_loss*exactly 2, *",),
        spared=("loss *", "counts *", "num_targets *"),
    ),
    "multi-token prediction's gradients without its weight": Bug(
        "titan_moe.ops.linear_cross_entropy:_LinearCrossEntropy.forward",
        "grad_tV *= factor",
        "grad_tV *= 1.0",
        caught_on="dp_shard=2,recompute=none",
        named=("gradient mtp.layers.*",),
        spared=("loss *", "mtp_loss *", "counts *", "num_targets *"),
    ),
    "routing bias of multi-token prediction not updated": Bug(
        "titan_moe.moe.router:update_routers",
        "if name in routers]",
        "if name in routers and not name.startswith('mtp')]",
        caught_on="dp_shard=2,recompute=none",
        named=("expert_bias mtp.layers.0.block*",),
        spared=("loss *", "counts *", "gradient *", "parameter *", "expert_bias layers.*"),
    ),
    # --- expert biases ---
    "every rank adds its slice of the experts' biases to the first one": Bug(
        f"{_DISTRIBUTED}.expert_parallel:on_local_shards",
        "around = (place * width, (slices - 1 - place) * width)",
        "around = (0, (slices - 1) * width)",
        caught_on="cp=2,etp=2,recompute=none,reshard=default",
        named=("gradient layers.*.moe.experts.b2*", "loss*"),
        spared=("num_targets *",),
        harmless_on="dp_shard=2,ep=2",
        family="gpt_oss",
    ),
    "expert biases not weighted by the router": Bug(
        "titan_moe.moe.experts:expert_outputs",
        "return add_bias(y_RD, weights.b2, offsets_E, after_R1)",
        "return add_bias(y_RD, weights.b2, offsets_E, after_R1.detach())",
        caught_on="dp_shard=2,recompute=none",
        named=("gradient layers.*.moe.router.gate.*",),
        spared=("loss *", "num_targets *"),
        family="gpt_oss",
    ),
    # --- sinks and windows ---
    "a rank's heads get the first heads' sinks": Bug(
        "titan_moe.distributed.context_parallel.apply:Ulysses.__call__",
        "sinks_H = sinks_H.chunk(self._group.size())[self._group.rank()]",
        "sinks_H = sinks_H.chunk(self._group.size())[0]",
        caught_on="cp=2,cp_method=ulysses,cp_balancer=none,recompute=full,reshard=always",
        named=(f"{_SINKS}*", "loss*"),
        spared=("num_targets *",),
        harmless_on="cp=2,cp_method=ring",
        family="gpt_oss",
    ),
    "sinks' gradients whole on every rank of a ring": Bug(
        "titan_moe.distributed.context_parallel.ring:_gradient_of_sinks",
        "return -(weights_BHS * upstream.delta_BHS).sum((0, 2)).to(sinks_H.dtype)",
        "return -2 * (weights_BHS * upstream.delta_BHS).sum((0, 2)).to(sinks_H.dtype)",
        caught_on="cp=2,cp_method=ring,recompute=none",
        named=(f"{_SINKS}*exactly 2, *",),
        spared=("loss *", "counts *", "gradient layers.2.attention.w?.weight", _OUTPUT),
        harmless_on="cp=2,cp_method=ulysses",
        family="gpt_oss",
    ),
    "all layers see everything under cp": Bug(
        "titan_moe.distributed.context_parallel.apply:AllGather.mask",
        "return self._attention.blocks(documents_BS, queries_S, keys_S, local)",
        "return self._attention.blocks(documents_BS, queries_S, keys_S)",
        caught_on=_GATHERED,
        named=("loss*", "gradient layers.*"),
        spared=("num_targets *",),
        harmless_on="cp=2,cp_method=ulysses",
        family="llama4",
    ),
    "temperature from positions in a rank's own part": Bug(
        "titan_moe.models.attention:_tempered",
        "steps_BS = ((rotation.positions_BS + 1) // temperature.floor).to(dtype)",
        "steps_BS = ((rotation.positions_BS % 24 + 1) // temperature.floor).to(dtype)",
        caught_on=_GATHERED,
        named=("loss*", "gradient layers.*"),
        spared=("num_targets *",),
        family="llama4",
    ),
}
