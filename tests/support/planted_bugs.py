"""Mistakes that the gradient gate must find: each changes one line of production code."""

from tests.support.planting import Bug

_DISTRIBUTED = "titan_moe.distributed"

_EXPERTS = "gradient layers.*.moe.experts.w*"
_ROUTERS = "gradient layers.*.moe.router.gate.weight"
_OUTPUT = "gradient output.weight"
_LAST_EXPERTS = "gradient mtp.layers.0.block.moe.experts.*"
_TP = "tp=2,recompute=none,reshard=default"
_EP = "dp_shard=2,ep=2,recompute=2,reshard=default"
_FULL = "dp_shard=2,recompute=full,reshard=always"
_GATHERED = "cp=2,cp_method=allgather,recompute=none"

BUGS = {
    # --- data parallelism and the divisor ---
    "replicas averaged": Bug(
        f"{_DISTRIBUTED}.fsdp:_shard",
        "set_gradient_divide_factor(1.0)",
        "set_gradient_divide_factor(float(mesh.size(0)) if mesh.ndim > 1 else 1.0)",
        caught_on="dp_replicate=2,dp_shard=2,recompute=2,reshard=always",
        named=("gradient *exactly 1/2, *averaged over dp_replicate *", "grad_norm*exactly 1/2*"),
        spared=("loss *", "counts *", "balance_loss *", "num_targets *"),
        harmless_on="dp_shard=2",
    ),
    "replicas counted again in the norm": Bug(
        f"{_DISTRIBUTED}.grad_norm:_num_pieces",
        "for cut in sharding.cuts for axis in cut",
        "for axis in axes",
        caught_on="dp_replicate=2,recompute=2,reshard=never",
        named=("grad_norm*", "exp_avg *"),
        spared=("gradient *", "loss *", "counts *"),
        harmless_on="dp_shard=2",
    ),
    "each rank divides by its own targets": Bug(
        "titan_moe.train_step:TrainStep._reduce",
        "return self._result(sums, read(sums))",
        "return replace(self._result(sums, read(sums)), "
        "num_targets=int(terms['num_targets']) * self._ranks_per_stage)",
        caught_on="dp_shard=2,recompute=none",
        named=("gradient *", "num_targets*"),
        spared=("loss *", "counts *", "balance_loss *", "grad_norm *"),
        harmless_on="dp_shard=1",
    ),
    "each microbatch divided by its own targets": Bug(
        f"{_DISTRIBUTED}.execution:WholeModel.train",
        "loss.backward()",
        # Not far off: times the mean number of targets, nearly.
        "(loss * rows.labels_BS.numel() / (rows.labels_BS != -100).sum()).backward()",
        caught_on="dp_shard=2,recompute=none",
        named=("gradient *", "grad_norm*"),
        spared=("loss *", "counts *", "balance_loss *", "num_targets *"),
        harmless_on="pp=2",
    ),
    # --- what the microbatches of a step share ---
    "the last microbatch reduces nothing": Bug(
        f"{_DISTRIBUTED}.fsdp:StepSync.begin",
        "self._is_last = last",
        "pass",
        caught_on="dp_shard=2,recompute=full,reshard=always,accumulation=keep_gathered",
        named=("gradient *", "grad_norm*"),
        spared=("loss *", "counts *", "num_targets *"),
        harmless_on="dp_shard=2,accumulation=reduce_each",
    ),
    "a step's gradients reduced after its first microbatch": Bug(
        "titan_moe.train_step:TrainStep._accumulate",
        "last=number == len(batches)",
        "last=number == 1",
        caught_on="dp_replicate=2,dp_shard=2,accumulation=keep_gathered",
        named=("gradient *", "grad_norm*"),
        spared=("loss *", "counts *", "num_targets *"),
        harmless_on="dp_shard=2,accumulation=reduce_each",
    ),
    "parameters kept gathered over the update": Bug(
        f"{_DISTRIBUTED}.fsdp:StepSync.begin",
        "unit.set_reshard_after_backward(last, recurse=False)",
        "unit.set_reshard_after_backward(False, recurse=False)",
        caught_on="dp_shard=2,recompute=op,accumulation=keep_gathered",
        named=("gradient *", "loss*"),
        spared=("loss *", "gradient *", "counts *"),
        harmless_on="dp_shard=2,accumulation=reduce_each",
    ),
    # --- experts ---
    "experts' gradients divided by ep": Bug(
        f"{_DISTRIBUTED}.fsdp:apply_fsdp",
        "_shard(moe.experts, expert_mesh, policy, reshard=reshard)",
        "_shard(moe.experts, expert_mesh, policy, reshard=reshard); "
        "moe.experts.set_gradient_divide_factor(float(meshes.dims.ep))",
        caught_on="dp_shard=4,ep=2,recompute=2,reshard=default",
        named=(f"{_EXPERTS}exactly 1/2, *averaged over *ep*",),
        spared=("loss *", "counts *", _ROUTERS, "gradient *.attention*", _OUTPUT),
        harmless_on="dp_shard=2",
    ),
    "experts left out of the norm under ep": Bug(
        f"{_DISTRIBUTED}.grad_norm:sum_of_squares",
        "if parameter.grad is not None]",
        "if parameter.grad is not None and 'ep' not in parameter.device_mesh.mesh_dim_names]",
        caught_on=_EP,
        named=("grad_norm*", "exp_avg *"),
        spared=("gradient *", "loss *", "counts *"),
        harmless_on="dp_shard=2",
    ),
    "rows come home off by one shard": Bug(
        "titan_moe.moe.dispatch.exchange:ExchangeDispatcher.combine_wait",
        "return combine_rows(y_ND,",
        "return combine_rows(y_ND.roll(route.rows.sent[0], 0),",
        caught_on=_EP,
        named=("loss*", "counts layers.2*", "gradient *"),
        spared=("counts layers.1", "num_targets *"),
        harmless_on="dp_shard=2",
    ),
    "gathered rows' gradients not summed over etp": Bug(
        f"{_DISTRIBUTED}.collectives:_AllGatherRows.backward",
        "return _reduce_scatter(grad_RD, *ctx.layout)",
        "return grad_RD.split(ctx.layout[0])[dist.get_rank(ctx.layout[1])]",
        caught_on="cp=2,etp=2,recompute=none,reshard=default",
        named=("gradient *",),
        spared=("loss *", "counts *", _LAST_EXPERTS, _OUTPUT),
        harmless_on="dp_shard=2,ep=2",
    ),
    # --- tensor parallelism ---
    "router's gradient not summed over tp": Bug(
        f"{_DISTRIBUTED}.tensor_parallel:_held_whole",
        "if id(parameter) not in routed",
        "if '.router.' not in name and id(parameter) not in routed",
        caught_on=_TP,
        named=(f"{_ROUTERS}*",),
        spared=("loss *", "counts *", "gradient *norm.weight", "gradient *.experts.*"),
        harmless_on="cp=2",
    ),
    "a norm's gradient not summed over tp": Bug(
        f"{_DISTRIBUTED}.tensor_parallel:_held_whole",
        "if id(parameter) not in routed",
        "if not name.endswith('norm.weight') and id(parameter) not in routed",
        caught_on=_TP,
        named=("gradient *norm.weight*",),
        spared=("loss *", "counts *", _ROUTERS, "gradient *.bias", "gradient *.wkv_a.weight"),
        harmless_on="cp=2",
    ),
    "replicas over tp diverge": Bug(
        f"{_DISTRIBUTED}.tensor_parallel:sum_grads",
        "dist.all_reduce(flat, group=group)",
        "dist.reduce(flat, group_dst=0, group=group)",
        caught_on=_TP,
        named=("step 0, rank 1: gradient layers.*",),
        spared=("loss *", "counts *", "gradient *.experts.*", _OUTPUT),
        harmless_on="cp=2",
    ),
    "a bias added on every rank of a partial sum": Bug(
        f"{_DISTRIBUTED}.tensor_parallel:RowParallelLinear.forward",
        "y = scatter_tokens(self.product(x, local_part(self.weight)), self.group)",
        "return scatter_tokens(self.product(x, local_part(self.weight)) + "
        "(0 if self.bias is None else self.bias), self.group)",
        caught_on=_TP,
        named=("gradient layers.*.attention.wo.bias*", "loss*"),
        spared=("num_targets *",),
        harmless_on="cp=2",
    ),
    "the embedding's gradient without the vocabulary's mask": Bug(
        f"{_DISTRIBUTED}.tensor_parallel:VocabParallelEmbedding.forward",
        "x_BSD.masked_fill(elsewhere_BS[..., None], 0)",
        "x_BSD - x_BSD.detach().masked_fill(~elsewhere_BS[..., None], 0)",
        caught_on=_TP,
        named=("gradient tok_embeddings.weight*",),
        spared=("loss *", "counts *", "gradient layers.*", "gradient norm.weight", _OUTPUT),
        harmless_on="cp=2",
    ),
    "targets counted by every tp rank": Bug(
        "titan_moe.distributed.parallelize:_counts_targets",
        'for axis in ("tp", "pp")',
        'for axis in ("pp",)',
        caught_on=_TP,
        named=("gradient *exactly 1/2, *over tp*", "num_targets*exactly 2, *over tp*"),
        spared=("counts *",),
        harmless_on="pp=2",
    ),
    "loss counted by every tp rank": Bug(
        f"{_DISTRIBUTED}.tensor_parallel:VocabParallelCrossEntropy.__call__",
        "return loss_T.tensor_split(group.size())[rank].sum(), grad_TV",
        "return loss_T.sum(), grad_TV",
        caught_on=_TP,
        named=("loss*exactly 2, *over tp*",),
        spared=("gradient *", "counts *", "num_targets *", "balance_loss *", "parameter *"),
        harmless_on="cp=2",
    ),
    # --- context parallelism ---
    "labels shifted at a border of cp": Bug(
        "titan_moe.train_step:local_batch",
        "labels_BS=whole.labels_BS[:, own]",
        # The token after this one, here: the same but where the next one is on another rank.
        "labels_BS=whole.labels_BS[:, positions_S.roll(-1) - 1]",
        caught_on=_GATHERED,
        named=("loss*", "gradient *"),
        spared=("counts *", "num_targets *", "balance_loss *"),
        harmless_on="dp_shard=2",
    ),
    "positions counted from each rank's first token": Bug(
        "titan_moe.train_step:local_batch",
        "positions_BS=positions_S.expand(num_rows, -1)",
        "positions_BS=torch.arange(len(positions_S), device=device).expand(num_rows, -1)",
        caught_on=_GATHERED,
        named=("loss*", "gradient *.attention.*"),
        spared=("num_targets *",),
        harmless_on="dp_shard=2",
    ),
    "gathered keys' and values' gradients not summed over cp": Bug(
        "titan_moe.distributed.context_parallel.apply:_GatherKeysValues.backward",
        "reduce_scatter_rows(torch.cat(parts, -1), [1] * size, ctx.group)[0]",
        "torch.cat(parts, -1)[ctx.group.rank()]",
        caught_on=_GATHERED,
        named=("gradient layers.*.attention.kv_norm.weight*",),
        spared=("loss *", "counts *", "gradient mtp.*.attention.wq_?.weight", _OUTPUT),
        harmless_on="cp=2,cp_method=ulysses",
    ),
    "the ring's last block skipped": Bug(
        "titan_moe.distributed.context_parallel.apply:RingAttention.mask",
        "if source in seen[rank]:",
        "if source in seen[rank] and distance + 1 < size:",
        caught_on="cp=2,cp_method=ring,recompute=none",
        named=("loss*", "gradient layers.*.attention.*"),
        spared=("num_targets *",),
        harmless_on="cp=2,cp_method=allgather",
    ),
    "sequences' counts not summed over cp and tp": Bug(
        f"{_DISTRIBUTED}.expert_parallel:join_sequences",
        "dist.all_reduce(counts_BE, group=group)",
        "pass",
        caught_on="tp=2,recompute=none,reshard=default",
        named=(f"{_ROUTERS}*", "balance_loss*"),
        spared=("loss *", "counts *", "num_targets *", _OUTPUT, _LAST_EXPERTS),
        harmless_on="dp_shard=2",
    ),
    # --- recompute ---
    "tokens counted twice by recompute": Bug(
        "titan_moe.moe.layer:RoutingMemo.decide",
        "self._recorded.append(decision)",
        # In the forward: a recomputation that counts is refused by the run itself.
        "self._recorded.append(route(scores_BSE))",
        caught_on=_FULL,
        named=("counts layers.*exactly 2, *",),
        spared=("loss *", "gradient *", "balance_loss *"),
        harmless_on="dp_shard=2",
    ),
    "recompute routes anew": Bug(
        "titan_moe.moe.layer:RoutingMemo.decide",
        "return next(self._replayed)",
        # In float64 the same scores come back; rounded, as low precision would, they do not. The
        # plan is replayed still: with another one torch itself finds tensors of other shapes.
        "return next(self._replayed)._replace(experts_TK="
        "route.__self__.router.select_experts(scores_BSE.flatten(0, 1).bfloat16()))",
        caught_on=_FULL,
        named=(f"{_ROUTERS}*", "gradient layers.*"),
        spared=("loss *", "balance_loss *", "counts *", _OUTPUT),
        harmless_on="dp_shard=2",
    ),
    "recomputed rows without their routing weight": Bug(
        "titan_moe.ops.gated:gated_rows_backward_reference",
        "hidden_RF.mul_(weights_R1)",
        "pass",
        caught_on="dp_shard=2,recompute=none",
        named=("gradient layers.*.moe.experts.w2*",),
        spared=("loss *", "counts *", "balance_loss *", _OUTPUT, "gradient *.experts.w[13]*"),
    ),
    # --- the loss in chunks ---
    "every chunk of the loss gets the first one's labels": Bug(
        "titan_moe.ops.linear_cross_entropy:_LinearCrossEntropy.forward",
        "plan.cross_entropy(logits_tV, labels_T[first : first + size])",
        "plan.cross_entropy(logits_tV, labels_T[:size])",
        caught_on="dp_shard=2,recompute=none",
        named=("loss*", "gradient *"),
        spared=("counts *", "num_targets *"),
    ),
    "the output layer's gradient of the last chunk alone": Bug(
        "titan_moe.ops.linear_cross_entropy:_added",
        "return sum_VD.addmm_(grad_tV.T, x_tD)",
        "return grad_tV.T @ x_tD",
        caught_on="dp_shard=2,recompute=none",
        named=(f"{_OUTPUT}*",),
        spared=("loss *", "counts *", "gradient layers.*", "gradient norm.weight"),
    ),
    "the vocabulary's other ranks left out of the largest logit": Bug(
        f"{_DISTRIBUTED}.tensor_parallel:VocabParallelCrossEntropy.__call__",
        "dist.all_reduce(largest_T, dist.ReduceOp.MAX, group=group)",
        "pass",
        caught_on=_TP,
        named=("loss*", "gradient *"),
        spared=("counts *", "num_targets *"),
        harmless_on="cp=2",
    ),
    # --- pipeline parallelism ---
    "a schedule divides by its microbatches": Bug(
        "titan_moe.distributed.pipeline.schedule:Pipeline._build",
        "scale_grads=False",
        "scale_grads=True",
        caught_on="pp=2,schedule=1F1B,recompute=op,reshard=never",
        named=("gradient *", "grad_norm*"),
        spared=("loss *", "counts *", "num_targets *"),
        harmless_on="dp_shard=2",
    ),
    "routing biases of a rank's first stage alone": Bug(
        "titan_moe.train_step:TrainStep._update",
        "update_routers(self._routers,",
        "update_routers({n: m.router for n, m in self._sharded.parts[0].moe_layers().items()},",
        caught_on="pp=2,schedule=Interleaved1F1B,recompute=op,reshard=never",
        named=("expert_bias layers.2*", "expert_bias layers.3*"),
        spared=("loss *", "counts *", "gradient *", "parameter *"),
        harmless_on="pp=2,schedule=1F1B",
    ),
    "parameters freed before a split backward": Bug(
        "titan_moe.distributed.pipeline.schedule:_keep_gathered",
        "part.set_reshard_after_forward(False)",
        "pass",
        caught_on="pp=2,schedule=InterleavedZeroBubble,recompute=none,reshard=always",
        named=("gradient layers.*",),
        spared=("loss *", "counts *", "num_targets *"),
        harmless_on="pp=2,schedule=1F1B,reshard=always",
    ),
    # --- everywhere ---
    "routing biases from a rank's own tokens": Bug(
        "titan_moe.train_step:TrainStep._reduce",
        "sums = sum_over_world(terms)",
        "sums = sum_over_world(terms); sums['counts_LE'] = terms['counts_LE'].clone()",
        caught_on="dp_shard=2,recompute=none",
        named=("counts layers.*",),
        spared=("loss *", "gradient *", "balance_loss *"),
        harmless_on="dp_shard=1",
    ),
    "global balance loss with this step's load": Bug(
        "titan_moe.moe.layer:MoE._balance_loss",
        "balance.global_loss(shares_BSE, self.router.previous_load)",
        "balance.global_loss(shares_BSE, "
        "self.router.tokens_per_expert / self.router.tokens_per_expert.sum())",
        caught_on="dp_shard=2,recompute=none",
        named=("balance_loss*", f"{_ROUTERS}*"),
        spared=("loss *", "counts *", _OUTPUT, _LAST_EXPERTS),
    ),
    "balance losses not attached": Bug(
        "titan_moe.moe.layer:MoE.forward",
        "weights_TK = balance.attach_loss(weights_TK, loss, self.router.balance_loss)",
        "pass",
        caught_on="dp_shard=2,recompute=none",
        named=("balance_loss*", f"{_ROUTERS}*"),
        spared=("loss *", "counts *", _OUTPUT, _LAST_EXPERTS),
    ),
    "weight decay on norms": Bug(
        "titan_moe.optim.optimizers:decays",
        "return param.ndim > 1 and not is_bias(name)",
        "return not is_bias(name)",
        caught_on="dp_shard=2,recompute=none",
        named=("parameter *norm.weight*",),
        spared=("gradient *", "exp_avg*", "parameter *.bias", "parameter *w?.weight"),
    ),
}
