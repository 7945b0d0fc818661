"""FSDP, HSDP, DDP-only and expert parallelism train the same model as one plain process, in
float64.

The reference takes steps of its own: plain modules, a plain loop, torch's AdamW. It shares with
production only the models, their dimensions and the drawing of initial weights. The configuration
is not an easy one: packed documents with ignored targets, unequal over microbatches, clipping
active, weight decay, every auxiliary loss and the bias on, padded expert rows.
"""

import math
from dataclasses import replace
from itertools import cycle

import pytest
import torch
import torch.nn.functional as F

from titan_moe.config.job import JobConfig
from titan_moe.models.config import ModelConfig
from titan_moe.models.registry import model_config
from titan_moe.verify.ranks import run_ranks

STEPS, ROWS, SEQ_LEN, LR = 2, 24, 32, 1e-2
BOUND = 1e-9
COMMON = {
    "training": {"dtype": "float64", "local_batch_size": 1, "seq_len": SEQ_LEN, "max_norm": 0.3},
    "optimizer": {"lr": LR, "weight_decay": 0.3},
    "moe": {
        "row_alignment": 16,
        "bias_update_speed": 0.05,
        "sequence_aux_loss_weight": 0.01,
        "global_aux_loss_weight": 0.02,
        "z_loss_weight": 0.003,
    },
    "activation_checkpoint": {"mode": "none"},
}
FAMILIES = {"deepseek_v3": "2M", "qwen3": "debugmodel_moe"}


def tiny(job: JobConfig) -> ModelConfig:
    """A family's debug model, smaller: these runs are about layouts."""
    config = model_config(job.model.name, job.model.flavor)
    moe = replace(config.moe, hidden_dim=48)
    return replace(config, vocab_size=96, dim=64, num_layers=3, hidden_dim=96, moe=moe)


def make_job(family: str, **tables: dict) -> JobConfig:
    tables["model"] = {"name": family, "flavor": FAMILIES[family]}
    merged = {**COMMON, **{key: {**COMMON.get(key, {}), **table} for key, table in tables.items()}}
    return JobConfig.model_validate(merged)


def global_batch(step: int, vocab_size: int):
    """Tokens, labels, documents of all rows; the number of ignored targets differs from row to
    row."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, vocab_size, (ROWS, SEQ_LEN + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for row in range(ROWS):
        labels[row, : 2 * row % 19] = -100
    ends = torch.randint(3, SEQ_LEN, (ROWS, 1), generator=generator)
    documents = (torch.arange(SEQ_LEN) >= ends).int()
    return tokens[:, :-1], labels, documents


def plain_training(job: JobConfig) -> dict:
    """The reference: one process, no mesh, the rule of parallelism.md spelled out."""
    from titan_moe.build import resolve_model
    from titan_moe.distributed.initial_weights import fill_initial_weights
    from titan_moe.models.decoder import initial_std
    from titan_moe.models.layers.attention_core import DocumentSdpa
    from titan_moe.models.registry import build_model

    config = resolve_model(tiny(job), job)
    model = build_model(job.model.name, config, DocumentSdpa())
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    for module in model.modules():
        if hasattr(module, "init_buffers"):
            module.init_buffers()
    fill_initial_weights(model, job.debug.seed, lambda name: initial_std(name, config))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.3)
    routers = [moe.router for moe in model.moe_layers().values()]
    record: dict = {"loss": [], "norm": [], "grads": [], "counts": []}
    for step in range(STEPS):
        tokens, labels, documents = global_batch(step, config.vocab_size)
        positions = torch.arange(SEQ_LEN).expand_as(tokens)
        logits = model(tokens, documents, positions)
        num_targets = (labels != -100).sum()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss.backward()
        for parameter in model.parameters():
            parameter.grad /= num_targets
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
        record["loss"].append(loss.item() / num_targets.item())
        record["norm"].append(norm)
        record["grads"].append({name: p.grad.clone() for name, p in model.named_parameters()})
        record["counts"].append(torch.stack([r.tokens_per_expert.clone() for r in routers]))
        for parameter in model.parameters():
            parameter.grad *= min(1.0, 0.3 / norm)
        for router in routers:
            counts = router.tokens_per_expert.double()
            router.expert_bias += 0.05 * torch.sign(counts.mean() - counts).float()
            router.previous_load.copy_(counts / counts.sum())
            router.tokens_per_expert.zero_()
        optimizer.step()
        optimizer.zero_grad()
    record["parameters"] = {name: p.detach() for name, p in model.named_parameters()}
    record["bias"] = {n: m.router.expert_bias for n, m in model.moe_layers().items()}
    return record


def sharded_training(job: JobConfig, planted: str | None, only_finite: bool = False) -> dict:
    """The same steps through build.py and train_step.py; every rank returns whole tensors."""
    import torch.distributed as dist

    from titan_moe import train_step as module
    from titan_moe.build import build_sharded_model
    from titan_moe.data.batch import Batch
    from titan_moe.optim.optimizers import build_optimizer

    if planted is not None:
        plant(planted)
    sharded = build_sharded_model(
        job,
        tiny(job),
        device=torch.device("cpu"),
        world_size=dist.get_world_size(),
    )
    dims = sharded.meshes.dims
    optimizer = build_optimizer(job.optimizer, sharded.named_parameters())
    step_fn = module.TrainStep(sharded, optimizer, job.training, device=torch.device("cpu"))
    record: dict = {"loss": [], "norm": [], "grads": [], "counts": []}
    kept: dict = {}
    scale = module.grad_norm.scale_grads

    def keep_and_scale(parameters, factor):
        names = [name for name, _ in sharded.named_parameters()]
        kept.update({n: whole(p.grad) for n, p in zip(names, parameters, strict=True)})
        scale(parameters, factor)

    module.grad_norm.scale_grads = keep_and_scale
    local = job.training.local_batch_size
    own = ROWS // dims.size("batch")
    first = own * dims.coordinate(dist.get_rank(), "batch")
    for step in range(STEPS):
        tokens, labels, documents = global_batch(step, sharded.config.vocab_size)
        batches = [
            Batch(tokens[r : r + local], labels[r : r + local], documents[r : r + local], [[]])
            for r in range(first, first + own, local)
        ]
        result = step_fn(batches)
        if only_finite:
            return {"finite": [result.finite]}
        record["loss"].append(result.loss)
        record["norm"].append(result.grad_norm)
        record["grads"].append({n: g / result.num_targets for n, g in kept.items()})
        record["counts"].append(result.counts_LE)
    record["parameters"] = {name: whole(p) for name, p in sharded.named_parameters()}
    record["bias"] = {n: m.router.expert_bias for n, m in sharded.moe_layers().items()}
    return record


def whole(tensor):
    return tensor.detach().full_tensor().clone()


def plant(bug: str) -> None:
    """Break one line of production code in this process."""
    from titan_moe import train_step
    from titan_moe.distributed import collectives, grad_norm
    from titan_moe.distributed.cross_entropy import CrossEntropy
    from titan_moe.moe import balance

    if bug == "expert gradients divided by ep":
        backward = collectives._AllToAllRows.backward

        def halved(ctx, grad):
            out = backward(ctx, grad)
            return (out[0] / 2, *out[1:])

        collectives._AllToAllRows.backward = staticmethod(halved)
    elif bug == "replicas counted in the norm":
        grad_norm._num_pieces = lambda parameter: 1
    elif bug == "bias not updated":
        train_step.update_routers = lambda *args: None
    elif bug == "auxiliary loss not attached":
        balance.attach_loss = lambda x, loss, total: x
    elif bug == "loss averaged per microbatch":
        summed = CrossEntropy.__call__

        def averaged(self, logits, labels):
            mean = summed(self, logits, labels) / (labels != -100).sum()
            return mean * SEQ_LEN  # About right: only unequal numbers of targets show it.

        CrossEntropy.__call__ = averaged


def differences(ours: dict, reference: dict) -> dict[str, float]:
    """Of everything compared, the difference relative to the reference's norm."""
    pairs = {f"bias {name}": (bias, reference["bias"][name]) for name, bias in ours["bias"].items()}
    for step in range(STEPS):
        for key in ("loss", "norm", "counts"):
            pairs[f"{key} {step}"] = (ours[key][step], reference[key][step])
        for name, grad in ours["grads"][step].items():
            pairs[f"gradient {step} {name}"] = (grad, reference["grads"][step][name])
    for name, parameter in ours["parameters"].items():
        pairs[f"parameter {name}"] = (parameter, reference["parameters"][name])
    out = {}
    for place, pair in pairs.items():
        a, b = (torch.as_tensor(x).double() for x in pair)
        out[place] = (a - b).norm().item() / max(b.norm().item(), 1e-12)
    return out


def wrong(ours: dict, reference: dict) -> list[str]:
    return [place for place, value in differences(ours, reference).items() if not value < BOUND]


EP = "expert_parallel_degree"
ETP = "expert_tensor_parallel_degree"
HSDP = "data_parallel_replicate_degree"
RESHARD = "fsdp_reshard_after_forward"
LAYOUTS = [
    (1, {}, {}),
    (1, {}, {"mode": "full"}),
    (2, {}, {}),
    (2, {HSDP: 2}, {}),
    (2, {EP: 2}, {}),
    (4, {EP: 2, RESHARD: "always"}, {}),
    (4, {EP: 2, HSDP: 2, RESHARD: "never"}, {"mode": "selective"}),
    (8, {EP: 4}, {"mode": "full"}),
    (8, {EP: 8}, {}),
    (2, {ETP: 2}, {}),
    (3, {ETP: 3}, {"mode": "full"}),
    (4, {EP: 2, ETP: 2}, {"mode": "selective"}),
    (6, {EP: 2}, {}),
    (8, {EP: 2, ETP: 4}, {"mode": "full"}),
    (8, {EP: 2, ETP: 2, HSDP: 2}, {}),
]


def sweep() -> list[tuple]:
    """Every layout of 1 to 8 ranks available so far; reshard policy and recompute rotate."""
    policies = cycle(["default", "always", "never"])
    modes = cycle(["none", "full", "selective", "none"])
    layouts = []
    for world_size in (1, 2, 4, 8):
        for replicas in divisors(world_size):
            for block in divisors(world_size // replicas):
                for ep in divisors(block):
                    degrees = {HSDP: replicas, EP: ep, ETP: block // ep, RESHARD: next(policies)}
                    layouts.append((world_size, degrees, {"mode": next(modes)}))
    return layouts


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


@pytest.fixture(scope="module")
def references() -> dict[str, dict]:
    torch.set_num_threads(1)
    return {family: plain_training(make_job(family)) for family in FAMILIES}


def test_the_configuration_is_not_an_easy_one(references):
    for reference in references.values():
        assert min(reference["norm"]) > 0.3, "clipping must be active"
        assert all(bias.any() for bias in reference["bias"].values())
        assert not torch.equal(reference["counts"][0], reference["counts"][1])
    labels = global_batch(0, 100)[1]
    assert len({(row != -100).sum().item() for row in labels}) > 4


@pytest.mark.parametrize("world_size, parallelism, recompute", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_layout_trains_the_same_model(references, family, world_size, parallelism, recompute):
    job = make_job(family, parallelism=parallelism, activation_checkpoint=recompute)
    for ours in run_ranks(sharded_training, world_size, job, None):
        if ours:
            assert wrong(ours, references[family]) == []


@pytest.mark.full
@pytest.mark.parametrize("world_size, parallelism, recompute", sweep())
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_trains_the_same_model(references, family, world_size, parallelism, recompute):
    test_layout_trains_the_same_model(references, family, world_size, parallelism, recompute)


@pytest.mark.parametrize("world_size, norm_type", [(1, "inf"), (4, "inf")])
def test_the_inf_norm_is_the_largest_gradient(references, world_size: int, norm_type: str):
    job = make_job(
        "deepseek_v3", training={**COMMON["training"], "norm_type": norm_type, "max_norm": 1e9}
    )
    ours = run_ranks(sharded_training, world_size, job, None)[0]
    largest = max(g.abs().max().item() for g in references["deepseek_v3"]["grads"][0].values())
    assert ours["norm"][0] == pytest.approx(largest, rel=1e-12)


def nan_in_one_gradient(job: JobConfig, bad_rank: int) -> bool:
    """Whether a step sees a NaN that sits in one rank's piece of one gradient."""
    import torch.distributed as dist

    from titan_moe import train_step as module

    total = module.grad_norm.sum_of_squares

    def poison(parameters, ranks_per_stage):
        if dist.get_rank() == bad_rank:
            module.grad_norm.local_grads(parameters)[-1].flatten()[0] = float("nan")
        return total(parameters, ranks_per_stage)

    module.grad_norm.sum_of_squares = poison
    losses = sharded_training(job, None, only_finite=True)
    return losses["finite"][0]


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("norm_type", ["2", "inf"])
def test_a_nan_on_one_rank_is_seen_by_all(norm_type: str, bad_rank: int):
    training = {**COMMON["training"], "norm_type": norm_type}
    job = make_job("deepseek_v3", training=training, parallelism={EP: 2})
    assert run_ranks(nan_in_one_gradient, 2, job, bad_rank) == [False, False]


GATE, EXPERTS, HEAD = (
    f"gradient 0 {name}"
    for name in ("layers.1.moe.router.gate.weight", "layers.2.moe.experts.w1", "output.weight")
)


@pytest.mark.parametrize(
    "bug, shown_by, not_by",
    [
        ("expert gradients divided by ep", EXPERTS, HEAD),
        ("replicas counted in the norm", "norm 0", HEAD),
        ("bias not updated", "bias layers.1", HEAD),
        ("auxiliary loss not attached", GATE, HEAD),
        ("loss averaged per microbatch", HEAD, "counts 0"),
    ],
)
def test_the_comparison_finds_planted_bugs(references, bug: str, shown_by: str, not_by: str):
    job = make_job("deepseek_v3", parallelism={EP: 2, HSDP: 2})
    found = wrong(run_ranks(sharded_training, 4, job, bug)[0], references["deepseek_v3"])
    assert shown_by in found
    assert not_by not in found
