"""What test_pipeline.py runs: pipelines, the plain process they are compared with, and mistakes to
plant."""

from collections import Counter
from dataclasses import replace
from itertools import chain

import torch
import torch.nn.functional as F

from tests.support.tiny import make_job, tiny
from titan_moe.config.job_config import ActivationCheckpoint
from titan_moe.config.pipeline import SCHEDULES, split_parts, stages_of_rank
from titan_moe.distributed.execution import Microbatch
from titan_moe.runtime.ranks import run_on_ranks

SEQ_LEN, ROWS, BOUND = 16, 32, 1e-9
CHUNK_SIZE = 5  # No divisor of the tokens of a microbatch.
JOB = make_job("deepseek_v3", training={"seq_len": SEQ_LEN})
LAYERS = 8


def model_dims():
    from titan_moe.distributed.policies import resolve_model

    return resolve_model(replace(tiny(JOB), num_layers=LAYERS), JOB)


def rows_of(step: int, seq_len: int = SEQ_LEN) -> Microbatch:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 96, (ROWS, seq_len + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for row in range(ROWS):
        labels[row, : 2 * row % 11] = -100
    ends = torch.randint(3, seq_len, (ROWS, 1), generator=generator)
    documents = (torch.arange(seq_len) >= ends).int()
    positions = torch.arange(seq_len).expand(ROWS, seq_len)
    return Microbatch(tokens[:, :-1].contiguous(), labels, documents, positions)


def cut(rows: Microbatch, start: int, end: int) -> Microbatch:
    return Microbatch(*(x[start:end] for x in rows if isinstance(x, torch.Tensor)))


def cross_entropy(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def new_model():
    from titan_moe.models.decoder import Decoder
    from titan_moe.ops.attention import DocumentSdpa

    with torch.device("meta"):
        model = Decoder(model_dims(), DocumentSdpa())
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    return model


def fill(model):
    from titan_moe.distributed.init_weights import fill_initial_weights
    from titan_moe.models.decoder import initial_std, move_off_meta

    config = model_dims()
    move_off_meta(model, torch.device("cpu"), parameter_device=torch.device("cpu"))
    fill_initial_weights(model, 0, lambda name: initial_std(name, config))
    return model


def observed(model) -> dict:
    """Gradients, counts and auxiliary losses of a step; clears them."""
    record = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        # A missing gradient must not hide.
        record[f"gradient {name}"] = torch.zeros(()) if grad is None else whole(grad)
        parameter.grad = None
    for name, moe in model.moe_layers().items():
        record[f"counts {name}"] = moe.router.tokens_per_expert.clone()
        record[f"balance loss {name}"] = moe.router.balance_loss.clone()
        moe.router.tokens_per_expert.zero_()
        moe.router.balance_loss.zero_()
    return record


def whole(tensor):
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


EVALUATED = 12  # Rows, of another length than in training.


def plain_training() -> dict[int, list[dict]]:
    """The reference. By number of rows: what two steps and the evaluation after each observe."""
    torch.set_num_threads(1)
    model = fill(new_model())
    found = {}
    for num_rows in (8, 16, 32):
        found[num_rows] = []
        for step in range(2):
            rows = cut(rows_of(step), 0, num_rows)
            loss = cross_entropy(
                model(rows.tokens_BS, rows.documents_BS, rows.positions_BS), rows.labels_BS
            )
            loss.backward()
            record = observed(model) | {"loss": loss.detach()}
            model.eval()
            rows = cut(rows_of(step + 7, 20), 0, EVALUATED)
            with torch.no_grad():
                logits = model(rows.tokens_BS, rows.documents_BS, rows.positions_BS)
                record["evaluated"] = cross_entropy(logits, rows.labels_BS)
            model.train()
            found[num_rows].append(record)
    return found


def build_parts(case: dict, meshes) -> list:
    from titan_moe.distributed.activation_checkpoint import apply_activation_checkpoint
    from titan_moe.distributed.expert_parallel import apply_expert_parallel, join_sequences
    from titan_moe.distributed.fsdp import ShardingPolicy, apply_fsdp
    from titan_moe.distributed.tensor_parallel import apply_tensor_parallel
    from titan_moe.models.decoder import TENSOR_PLAN, keep_only, stage_units
    from titan_moe.models.stats import part_weights

    schedule, ranks = SCHEDULES[case["schedule"]], meshes.dims.pp
    stages = ranks * case.get("per_rank", 1 if schedule.placement == "single" else 2)
    split = split_parts(part_weights(model_dims(), SEQ_LEN), stages)
    parts = []
    for stage in stages_of_rank(schedule, meshes.group("pp").rank(), ranks, stages):
        part = keep_only(new_model(), split[stage])
        apply_expert_parallel(list(part.moe_layers().values()), meshes)
        part.partial_over_tp = apply_tensor_parallel(part, TENSOR_PLAN, meshes)
        join_sequences(list(part.moe_layers().values()), meshes)
        if case.get("recompute"):
            apply_activation_checkpoint(dict(part.layers), ActivationCheckpoint(mode="full"))
        if case.get("fsdp", True):
            reshard = case.get("reshard", "never")
            policy = ShardingPolicy(
                torch.float64,
                getattr(torch, case.get("compute", "float64")),
                torch.float64,
                reshard_after_forward=reshard != "never",
                reshard_last=reshard == "always",
                cpu_offload=False,
            )
            apply_fsdp(part, stage_units(part), meshes, policy)
        parts.append(fill(part))
    return parts


def run_pipeline(case: dict, planted: str | None = None) -> list[dict]:
    """This rank's stages over two steps of `runs` schedule runs; gradients come back whole."""
    import torch.distributed as dist

    from titan_moe.distributed.parallel_dims import ParallelDims
    from titan_moe.distributed.pipeline.schedule import Activations, Pipeline
    from titan_moe.distributed.tensor_parallel import VocabParallelCrossEntropy, sum_grads
    from titan_moe.models.output import Output

    plant(planted)
    dims = ParallelDims(dist.get_world_size(), **case["degrees"])
    meshes = dims.build_mesh("cpu")
    parts = build_parts(case, meshes)
    reduced, forwards = count_reductions(parts), count_forwards(parts)
    for output in (part.output for part in parts if isinstance(part.output, Output)):
        output.chunk_size = CHUNK_SIZE
        if dims.tp > 1:
            output.cross_entropy = VocabParallelCrossEntropy(meshes.group("tp"))
    compute = getattr(torch, case.get("compute", "float64"))
    pipeline = Pipeline(
        parts,
        meshes=meshes,
        schedule=case["schedule"],
        microbatch_size=case.get("microbatch_size", 1),
        activations=Activations(64, compute),
        device=torch.device("cpu"),
    )
    data_ranks, data_rank = dims.size("batch"), dims.coordinate(dist.get_rank(), "batch")
    records = []
    for step in range(2):
        rows, own = rows_of(step), case["rows"] // data_ranks
        in_run = own // case.get("runs", 2)
        firsts = range(own * data_rank, own * (data_rank + 1), in_run)
        record = {"loss": sum(pipeline.train(cut(rows, first, first + in_run)) for first in firsts)}
        record |= {"forwards": dict(forwards), "reduced": dict(reduced)}
        forwards.clear()
        reduced.clear()
        for part in parts:
            if part.partial_over_tp:
                replicated = [part.get_parameter(name) for name in sorted(part.partial_over_tp)]
                sum_grads(replicated, meshes.group("tp"), torch.device("cpu"))
            record |= observed(part)
            part.eval()
        rows, own = rows_of(step + 7, 20), EVALUATED // data_ranks
        rows = cut(rows, own * data_rank, own * (data_rank + 1))
        # Twice, in batches of other sizes than training's.
        record["evaluated"] = pipeline.evaluate(cut(rows, 0, own // 2))
        record["evaluated"] += pipeline.evaluate(cut(rows, own // 2, own))
        for part in parts:
            part.train()
            assert all(parameter.grad is None for parameter in part.parameters())
        forwards.clear()
        records.append(record)
    return records


def count_forwards(parts: list) -> Counter:
    """How often each block's attention ran."""
    counts: Counter = Counter()
    for name, block in chain.from_iterable(part.layers.items() for part in parts):

        def count(*args: object, name: str = name) -> None:
            counts[name] += 1

        block.attention.register_forward_hook(count)
    return counts


def count_reductions(parts: list) -> Counter:
    """How often FSDP reduced each parameter's gradient."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as module

    counts: Counter = Counter()
    reduce = module.foreach_reduce
    names = {id(inner): name for part in parts for name, inner in part.named_modules()}

    def counted(params, *args, **kwargs):
        for info in (param._module_info for param in params):
            counts[f"{names[id(info.module)]}.{info.param_name}"] += 1
        return reduce(params, *args, **kwargs)

    module.foreach_reduce = counted
    return counts


def plant(bug: str | None) -> None:
    """Break one line of production code in this process."""
    from titan_moe.distributed.pipeline import schedule as module

    kind_of = module.get_schedule_class
    if bug == "gradients scaled":
        # The wrong default of torch, which `scale_grads=False` turns off.
        def scaling(name):
            def build(*args, scale_grads, **kwargs):
                return kind_of(name)(*args, scale_grads=True, **kwargs)

            return type(name, (kind_of(name),), {"__new__": lambda cls, *a, **k: build(*a, **k)})

        module.get_schedule_class = scaling
    elif bug == "parameters freed after the forward":
        module._keep_gathered = lambda parts: None
    elif bug == "auxiliary loss added in the forward":
        from titan_moe.moe import balance

        attach = balance.attach_loss

        def twice(x, loss, total):
            total += loss.detach()
            return attach(x, loss, total)

        balance.attach_loss = twice
    elif bug == "documents of other rows":
        step = module.Pipeline._run

        def other_documents(self, run, rows):
            return step(self, run, rows._replace(documents_BS=rows.documents_BS.flip(0)))

        module.Pipeline._run = other_documents
    elif bug is not None:
        raise AssertionError(bug)


def wrong(results: list[list[dict]], reference: list[dict], bound: float = BOUND) -> list[str]:
    """What differs from the reference by more than the bound, anywhere."""
    found = []
    for step, wanted in enumerate(reference):
        records = [result[step] for result in results]
        for key, value in wanted.items():
            ours = [record[key] for record in records if key in record]
            if key.startswith(("counts", "balance", "loss", "evaluated")):
                ours = [torch.stack([tensor.double() for tensor in ours]).sum(0)]
            if not ours:
                found.append(f"{step} {key} is nowhere")
            for tensor in ours:  # Each rank's own; replicas must not differ.
                error = (tensor.double() - value.double()).norm().item()
                if not error <= bound * max(value.double().norm().item(), 1e-12):
                    found.append(f"{step} {key}")
    return found


def check(references, case: dict) -> list[list[dict]]:
    world_size = 1
    for degree in ("pp", "dp_shard", "dp_replicate", "tp"):
        world_size *= case["degrees"].get(degree, 1)
    results = run_on_ranks(run_pipeline, world_size, case)
    bound = 1e-4 if "compute" in case else BOUND
    assert wrong(results, references[case["rows"]], bound) == []
    if case.get("fsdp", True):
        check_reductions(results, case.get("runs", 2))
    return results


def check_reductions(results: list[list[dict]], runs: int) -> None:
    names = [name for name, _ in new_model().named_parameters()]
    for step in range(2):
        reduced: dict[str, int] = {}
        for result in results:
            reduced |= result[step]["reduced"]
        assert reduced == dict.fromkeys(names, runs)
