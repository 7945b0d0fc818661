"""Prove that layouts train the same model: each against one plain process, tensor by tensor.

    titan-moe verify gradients --config configs/debug/gate_deepseek_v3.toml --all --ranks 8
    titan-moe verify gradients --config FILE --layouts "dp_shard=2,tp=2,ep=4" "pp=2,cp=2,tp=2,etp=2"
    titan-moe verify gradients --config FILE --sample 20 --seed 1 --float32
    titan-moe verify gradients --config FILE --all --ranks 4 --optimizer.name Muon
    titan-moe verify gradients --config FILE --sample 12 --device cuda --ranks 4

With --all and --sample, options that no argument fixes rotate over the layouts. An interrupted run
goes on where it stopped:
results.jsonl in the output folder holds what passed with the same code. The folder also gets
results.json and results.html.

A line names the keys that the proof sets, such as balance losses.

Exit codes: 0; 1 a layout does not pass; 2 a wrong argument, or a configuration that the layout or
the proof cannot have; 4 it failed; 70 an error in titan_moe; 130 interrupted: the same command goes
on.
"""

import argparse
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from titan_moe.cli.command import (
    Answer,
    Command,
    add_out,
    add_ranks,
    add_seed,
    job_of,
    make_folder,
    positive,
    write_json,
)
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig
from titan_moe.runtime.launch import count_gpus
from titan_moe.verify.layouts.covering import cover_options, cover_pairs
from titan_moe.verify.layouts.layouts import OPTIONS, Layout, legal_layouts, parse, with_options

if TYPE_CHECKING:
    from titan_moe.verify.gradients.gate import Gate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--layouts", nargs="+", metavar="LAYOUT", help='such as "dp_shard=2,ep=2"')
    which.add_argument("--all", action="store_true", help="every legal layout")
    which.add_argument(
        "--sample", type=positive, metavar="N", help="N layouts; each pair of axes meets"
    )
    add_ranks(parser, default=[8], says="ranks for --all and --sample, several numbers; default: 8")
    parser.add_argument("--float32", action="store_true", help="repeat each layout in float32")
    where = (
        "cuda: ranks on this machine's GPUs, which they share where there are fewer; default: cpu"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help=where)
    for option, values in OPTIONS.items():
        parser.add_argument(f"--{option.replace('_', '-')}", choices=values, dest=option)
    add_seed(parser, default=1, says="seed of the sample")
    add_out(parser, default="outputs/layouts", says="default: %(default)s")


def run(options: argparse.Namespace) -> Answer:
    from tqdm import tqdm

    from titan_moe.runtime.log import progress
    from titan_moe.runtime.revision import running_code
    from titan_moe.verify.compare.launch import workplace
    from titan_moe.verify.gradients.gate import Gate
    from titan_moe.verify.gradients.sweep import gate_page, summary, sweep

    # The layouts are those of the arguments, and so is none that a stage has.
    job = job_of(options).model_copy(update={"stages": []})
    if options.device == "cuda":
        job = _on_gpus(job, options)
    out = make_folder(options.out)
    with workplace(out), tempfile.TemporaryDirectory() as folder:
        gate = Gate(job, Path(folder), device=options.device)
        dtypes = ["float64", "float32"] if options.float32 else ["float64"]
        reasons = {layout: gate.refusal(layout) for layout in _chosen(options, gate)}
        refused = [f"{layout}: {reason}" for layout, reason in reasons.items() if reason]
        if len(refused) == len(reasons) or (refused and options.layouts):
            raise ConfigError(refused)
        if refused:
            print(f"left out {len(refused)} of {len(reasons)} layouts, such as {refused[0]}")
        keys = [f"{t}.{k}={v}" for t, table in gate.own_tables.items() for k, v in table.items()]
        print(f"for the proof: {', '.join(keys)}")
        layouts = [layout for layout, reason in reasons.items() if not reason]
        tasks = [(layout, dtype) for layout in layouts for dtype in dtypes]
        results = []
        for result in progress(sweep(gate, tasks, out), total=len(tasks), unit="layout"):
            results.append(result)
            for line in result.lines:
                tqdm.write(line)
    facts = summary(results)
    title = f"Layouts of {job.model.name} {job.model.flavor}, {options.device}"
    shown = list(zip(results, [layout for layout, _ in tasks], strict=True))
    (out / "results.html").write_text(gate_page(title, shown, facts), encoding="utf-8")
    rows = [asdict(result) for result in results]
    data = {"summary": facts, "own_keys": keys, "code": running_code(), "results": rows}
    write_json(out / "results.json", data)
    line = f"{facts['passed']} of {facts['layouts']} pass"
    if facts["tensors_compared"]:
        line += f", worst error {facts['worst_error']:.1e} ({facts['worst_tensor']})"
    line += f"; {out / 'results.html'}"
    return Answer(data, [line], 1 if facts["failed"] else 2 if facts["refused"] else 0)


def _on_gpus(job: JobConfig, options: argparse.Namespace) -> JobConfig:
    """Lets ranks share this machine's GPUs, and says so, where a layout has more ranks than that.

    Raises ConfigError if there is no GPU, RunError if torch cannot use it.
    """
    from titan_moe.runtime.device import refuse_unusable

    if not (gpus := count_gpus(os.environ)):
        raise ConfigError("--device cuda: no GPU is here")
    refuse_unusable(gpus)
    own = _own_dispatchers(job)
    sizes = [parse(text, own).world_size for text in options.layouts or []] or options.ranks
    if max(sizes) <= gpus:
        return job
    print(f"{max(sizes)} ranks share {gpus} GPU(s); collectives go through the host")
    return job.with_values(comm={"share_gpus": True})


def _own_dispatchers(job: JobConfig) -> list[str]:
    """Returns the dispatcher that the configuration names, if a module of job.imports has it."""
    backend = job.parallelism.expert_parallel_comm_backend
    return [] if backend in ("auto", *OPTIONS["dispatch"]) else [backend]


def _chosen(options: argparse.Namespace, gate: "Gate") -> list[Layout]:
    fixed = {name: getattr(options, name) for name in OPTIONS if getattr(options, name)}
    own = _own_dispatchers(gate.job)
    if own:
        fixed = {"dispatch": own[0]} | fixed
    if options.layouts:
        return [with_options(parse(text, own), **fixed) for text in options.layouts]
    layouts = [layout for size in options.ranks for layout in legal_layouts(size)]
    if options.sample:
        layouts = cover_pairs(layouts, options.sample, options.seed)
    return cover_options(layouts, fixed=fixed, legal=lambda layout: not gate.refusal(layout))


COMMAND = Command(run, add_arguments, overrides=True, resumable=True, failed=4)
