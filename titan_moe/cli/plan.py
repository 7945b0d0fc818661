"""Find the layout for some GPUs: what fits, how fast it should be, and why the others lose.

    titan-moe plan --gpus 16 --gpu h100 --model qwen3/30B-A3B --global-batch 1024
    titan-moe plan --gpus 64 --config FILE --load outputs/RUN --out plans
    titan-moe plan --calibrate here.json
    titan-moe plan --gpus 4 --gpu here.json --config FILE --measure 20

Estimates by arithmetic the memory and the step of all legal degrees, with their schedules,
microbatches, recomputation and dispatchers, and prints those that fit, fastest first: the best
choice of each degrees. --out gets a TOML file for each, and a page with the parts of their steps.
Keys that the job sets and a layout does not, such as the optimizer's, stay. --load says how
unevenly routers fill ranks: balanced; uniform, each token at random; zipf:1.2; or a run's folder
with expert_counts.jsonl (metrics.log_expert_counts). Times are estimates that no GPU has confirmed:
they are for choosing, not for promising. Needs no GPU.

--calibrate measures this machine's GPUs, or else its CPU, in seconds, and writes a file for --gpu.
--measure trains the first layouts here, on random tokens, one after the other.

Exit codes: 0; 1 no layout fits, or none could be measured; 2 a mistake.
"""

import argparse
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_moe.cli import plan_here
from titan_moe.cli.command import Answer, Command, add_out, job_of, make_folder, path_of, positive
from titan_moe.config.errors import ConfigError
from titan_moe.runtime.gpus import GIB

if TYPE_CHECKING:
    from titan_moe.models.config import ModelConfig
    from titan_moe.planner.load import Load
    from titan_moe.planner.search import Layout, Question, Search
    from titan_moe.runtime.gpus import Device

_MOST_GPUS = 8192
_LOST, _MEASURED = 5, 5
"""Degrees that do not fit, of which a line says why; layouts that are measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--gpus", type=positive, help="GPUs of the run")
    says = "measure this machine and write its figures, for --gpu; needs nothing else"
    which.add_argument("--calibrate", type=path_of, metavar="FILE", help=says)
    says = "a100, h100, h200, b200, mi300x, ..., or a file of --calibrate; default: h100"
    add("--gpu", type=path_of, default="h100", help=says)
    add("--gpu-gib", type=float, metavar="GIB", help="memory of a GPU; default: the device's")
    says = "FAMILY/FLAVOR, or a Hugging Face folder; default: the job's"
    add("--model", type=path_of, help=says)
    add("--seq-len", type=positive, help="tokens of a sequence; default: the job's")
    add("--global-batch", type=positive, help="sequences of a step; default: the job's")
    says = "balanced, uniform, zipf:EXPONENT, or a run's folder; default: balanced"
    add("--load", type=path_of, default="balanced", help=says)
    add("--keep", type=positive, default=10, help="layouts that are shown; default: 10")
    says = f"train the first {_MEASURED} layouts for so many steps each, into --out"
    add("--measure", type=positive, metavar="STEPS", help=says)
    add_out(parser, default=None, says="a folder for TOML files and the page")


def run(options: argparse.Namespace) -> Answer:
    from titan_moe.checks.job import check
    from titan_moe.planner.search import search

    if options.calibrate is not None:
        return plan_here.calibrated(options.calibrate)
    question = _question(options)
    if options.measure is not None:
        options.out = options.out or Path("outputs/plan")
        plan_here.need_ranks(question)
    found = search(question, keep=options.keep)
    if not found.num_degrees:
        line = f"--gpus {options.gpus}: no layout is legal: choose another number"
        raise ConfigError(check(question.job, question.model, options.gpus) or [line])
    lines = [*_heading(question, found), *_table(found), *_best(question, found)]
    lines += _lost(question, found)
    if options.out is not None and found.layouts:
        lines += ["", *map(str, _write(make_folder(options.out), question, found))]
    measured: list[dict[str, Any]] = []
    if options.measure is not None and found.layouts:
        layouts = [
            (each.degrees, _figures(each)["tokens_per_second_per_gpu"])
            for each in found.layouts[:_MEASURED]
        ]
        ranks = question.ranks
        measured = list(plan_here.measure(options.out, options.measure, ranks, layouts))
        lines += plan_here.table(measured)
    data = {
        "device": asdict(question.device),
        "load": question.load.name,
        "degrees": found.num_degrees,
        "layouts": [_as_json(layout) for layout in found.layouts],
        "measured": measured,
        "too_large": [
            {"degrees": each.degrees, "needed": each.memory.needed, "bytes": each.memory.sizes}
            for each in found.too_large
        ],
    }
    failed = not found.layouts or (measured and not any(each["measured"] for each in measured))
    return Answer(data, lines, exit_code=1 if failed else 0)


def _question(options: argparse.Namespace) -> "Question":
    from titan_moe.checks.base import Run
    from titan_moe.checks.notes import without_experts
    from titan_moe.checks.run import names
    from titan_moe.config.job_config import DEGREES
    from titan_moe.models.hf import model_of_job
    from titan_moe.planner.search import Question

    job = job_of(options).with_values(parallelism=dict.fromkeys(DEGREES.values(), 1))
    job = job.with_values(parallelism={DEGREES["dp_shard"]: -1})
    if options.model:
        job = job.with_values(model=_model_keys(str(options.model)))
    asked = {"seq_len": options.seq_len, "global_batch_size": options.global_batch}
    job = job.with_values(training={key: value for key, value in asked.items() if value})
    if job.training.global_batch_size == -1:
        sequences = job.training.local_batch_size * options.gpus
        job = job.with_values(training={"global_batch_size": sequences})
    if job.stages:
        raise ConfigError("stages: a plan is of one training stage: leave them out")
    model, device = model_of_job(job.model), _device(str(options.gpu))
    if options.gpu_gib is not None:
        device = replace(device, memory=options.gpu_gib * GIB)
    if options.gpus > _MOST_GPUS:
        raise ConfigError(f"--gpus {options.gpus}: at most {_MOST_GPUS}")
    job = job if model.moe else without_experts(job)
    if problems := list(names(Run(job, model, options.gpus))):
        raise ConfigError(problems)
    return Question(job, model, options.gpus, device, _load(str(options.load), model))


def _model_keys(text: str) -> dict[str, Any]:
    """Returns the keys of [model] for FAMILY/FLAVOR or a Hugging Face folder."""
    from titan_moe.models.hf import model_of
    from titan_moe.models.registry import FAMILIES

    family, _, flavor = text.partition("/")
    if family in FAMILIES and flavor:
        return {"name": family, "flavor": flavor}
    if not (Path(text) / "config.json").is_file():
        raise ConfigError(
            f"--model {text}: neither FAMILY/FLAVOR, such as qwen3/30B-A3B, nor a folder with "
            "config.json"
        )
    return {"name": model_of(Path(text)).family, "flavor": "hf", "hf_assets_path": text}


def _device(text: str) -> "Device":
    from titan_moe.runtime.gpus import GPUS

    if text.lower().endswith(".json"):
        return plan_here.read_device(text)
    named = {name.lower(): gpu for name, gpu in GPUS.items()}
    if (known := named.get(text.lower())) is None:
        raise ConfigError(f"--gpu {text}: choose {', '.join(named)}, or a .json of --calibrate")
    return known


def _load(text: str, model: "ModelConfig") -> "Load":
    from titan_moe.planner.load import BALANCED, load_of_counts, read_load

    if model.moe is None:
        return BALANCED
    if not Path(text).is_dir():
        return read_load(text, model.moe.num_experts)
    from titan_moe.verify.compare.records import read_run

    counts = {
        layer: rows_SE.sum(0).tolist() for layer, rows_SE in read_run(Path(text)).loads.items()
    }
    return load_of_counts(text, counts, model.moe.num_experts)


# --- words ----------------------------------------------------------------------------------------


def _heading(question: "Question", found: "Search") -> list[str]:
    training, device = question.job.training, question.device
    nodes = math.ceil(question.ranks / device.node)
    return [
        f"{question.job.model.name} {question.job.model.flavor} on {question.ranks} x "
        f"{device.name} of {device.memory / GIB:.1f} GiB, {nodes} node{'s' * (nodes > 1)}: "
        f"{training.global_batch_size:,} x {training.seq_len:,} tokens a step, "
        f"load {question.load.name}",
        f"{found.num_degrees:,} legal degrees: {len(found.too_large):,} do not fit, "
        f"{found.slower:,} cannot be among the best; {found.num_layouts:,} choices of the others "
        "estimated",
    ]


def _table(found: "Search") -> list[str]:
    if not found.layouts:
        return []
    lines = ["", f"{'tokens/s/GPU':>14}{'MFU':>6}{'step':>9}{'GiB':>7}  {'bound by':<11} layout"]
    for layout in found.layouts:
        row = _figures(layout)
        lines.append(
            f"{row['tokens_per_second_per_gpu']:>14,.0f}{100 * row['mfu']:>5.0f}%"
            f"{row['step_seconds']:>7.2f} s{row['gib']:>7.1f}  {row['bound_by']:<11} "
            f"{layout.degrees}; {_choices(layout)}"
        )
    return lines


def _choices(layout: "Layout") -> str:
    """Returns what a layout chooses besides its degrees."""
    plan = layout.plan
    parallelism, recompute = plan.job.parallelism, plan.job.activation_checkpoint
    local = plan.job.training.local_batch_size
    words = [f"{local} sequence{'s' * (local > 1)} at once"]
    if plan.dims.pp > 1:
        size = parallelism.pipeline_parallel_microbatch_size
        words = [
            f"{parallelism.pipeline_parallel_schedule}, {local // size} microbatches of {size}"
        ]
    mode = recompute.selective_ac_option if recompute.mode == "selective" else recompute.mode
    kept = [key for key in ("attention", "exchanged_rows") if getattr(recompute, f"keep_{key}")]
    words.append(f"recompute {mode}" + "".join(f" but {key}".replace("_", " ") for key in kept))
    if plan.dims.ep > 1:
        words.append(plan.dispatch.name + ", in halves" * (plan.dispatch.num_chunks > 1))
    if plan.dims.cp > 1:
        words.append(parallelism.context_parallel_rotate_method)
    if plan.accumulation != "reduce_each":
        words.append(plan.accumulation.replace("_", " "))
    return ", ".join(words)


def _best(question: "Question", found: "Search") -> list[str]:
    """Returns the parts of the first layout's step and memory, and the load that it survives."""
    if not found.layouts:
        return []
    best = found.layouts[0]
    parts = {region: s for region, s in best.seconds.items() if s > 0.005 * best.step_seconds}
    lines = ["", "the first one's step: " + ", ".join(f"{k} {v:.2f} s" for k, v in parts.items())]
    lines.append(f"its memory, {best.memory.unit}: {best.memory}")
    if best.plan.dims.ep > 1:
        lines.append(survives(best, question.device.memory))
    return lines


def survives(layout: "Layout", gpu: float) -> str:
    """Returns the load up to which a layout fits."""
    from titan_moe.parallelize.memory import memory

    plan, ep, factor = layout.plan, layout.plan.dims.ep, layout.plan.dispatch.capacity_factor
    if factor is not None or plan.dispatch.name == "symmetric":
        return f"survives any load: its buffers hold {factor or 'all'} times an even share"
    if memory(plan, ep).needed <= gpu:
        return f"survives any load: all rows on one of {ep} ranks fit"
    fits, too_much = 1.0, float(ep)
    while too_much - fits > 0.01:
        middle = (fits + too_much) / 2
        if memory(plan, middle).needed <= gpu:
            fits = middle
        else:
            too_much = middle
    load = f"max/mean <= {fits:.1f} of a rank's rows" if fits > 1 else "even loads alone"
    return f"survives {load}; more runs out of memory"


def _lost(question: "Question", found: "Search") -> list[str]:
    if not found.too_large:
        return []
    lines, usable = ["", "do not fit, even with full recomputation:"], question.usable
    for layout in found.too_large[:_LOST]:
        needs = layout.memory
        over = (needs.needed - usable) / GIB
        lines.append(f"  {layout.degrees}: {over:.1f} GiB over: {needs.unit} {needs}")
    if (more := len(found.too_large) - _LOST) > 0:
        lines.append(f"  and {more} more, which need more")
    if not found.layouts:
        lines.append(_enough(question))
    return lines


def _enough(question: "Question") -> str:
    """Returns the smallest number of GPUs, doubled from the given one, on which something fits."""
    from titan_moe.planner.search import fits

    ranks = question.ranks
    while (ranks := 2 * ranks) <= _MOST_GPUS:
        if fits(replace(question, ranks=ranks)):
            return f"nothing fits {question.ranks} GPUs: --gpus {ranks} is enough"
    return f"nothing fits up to {_MOST_GPUS} GPUs: choose shorter sequences, or bfloat16 moments"


def _figures(layout: "Layout") -> dict[str, Any]:
    from titan_moe.models.stats import part_flops
    from titan_moe.planner.step_time import bound_by

    plan, seconds = layout.plan, layout.step_seconds
    training = plan.job.training
    tokens = training.global_batch_size * training.seq_len / plan.dims.world_size / seconds
    factor = 3 if plan.job.lora.rank is None else 2
    flops = factor * sum(part_flops(plan.config, training.seq_len).values()) * tokens
    return {
        "tokens_per_second_per_gpu": tokens,
        "mfu": flops / layout.device.flops,
        "step_seconds": seconds,
        "gib": layout.memory.needed / GIB,
        "bound_by": bound_by(layout.seconds),
    }


def _as_json(layout: "Layout") -> dict[str, Any]:
    return {
        **_figures(layout),
        "degrees": layout.degrees,
        "choices": _choices(layout),
        "keys": layout.tables,
        "seconds": layout.seconds,
        "bytes": layout.memory.sizes,
    }


# --- files ----------------------------------------------------------------------------------------


def _write(folder: Path, question: "Question", found: "Search") -> list[Path]:
    """Writes a TOML file for each layout, and the page."""
    from titan_moe.config.parse import as_toml
    from titan_moe.runtime.files import write_whole
    from titan_moe.verify.report.plan import plan_page

    paths = []
    for number, layout in enumerate(found.layouts, 1):
        path = folder / f"{number}.toml"
        row = _figures(layout)
        about = f"# ranks: {question.ranks}\n# {layout.degrees}; {_choices(layout)}\n"
        about += f"# {row['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU of {layout.device.name} "
        about += f"and {row['gib']:.1f} GiB are expected.\n"
        write_whole(path, about + as_toml(layout.plan.job, only_set=True))
        paths.append(path)
    page = folder / "plan.html"
    rows = [(f"{n}: {each.degrees}", each.seconds) for n, each in enumerate(found.layouts, 1)]
    write_whole(page, plan_page(_heading(question, found), rows, _table(found)[1:]))
    return [*paths, page]


COMMAND = Command(run, add_arguments, overrides=True)
