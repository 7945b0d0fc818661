"""Prove that layouts train the same model: each against one plain process, tensor by tensor.

    python scripts/compare_layouts.py configs/debug/gate_deepseek_v3.toml --all --world-size 8
    python scripts/compare_layouts.py CONFIG --layouts "dp_shard=2,tp=2,ep=4" "pp=2,cp=2,tp=2,etp=2"
    python scripts/compare_layouts.py CONFIG --sample 20 --seed 1 --float32
    python scripts/compare_layouts.py CONFIG --all --world-size 4 --optimizer.name Muon

Options that no argument fixes rotate over the layouts; other arguments are --table.key value of
the configuration. An interrupted run goes on where it stopped:
results.jsonl in the output folder holds what passed with the same code. The folder also gets
results.json and results.html. Exit code 1 if any layout does not pass.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

from titan_moe.config.errors import ConfigError
from titan_moe.config.parse import load_job
from titan_moe.runtime.failure import print_errors
from titan_moe.verify.layouts.covering import cover_options, cover_pairs
from titan_moe.verify.layouts.layouts import OPTIONS, Layout, legal_layouts, parse, with_options

_FLAGS = {option: f"--{option.replace('_', '-')}" for option in OPTIONS}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="TOML file, such as configs/debug/gate_deepseek_v3.toml")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--layouts", nargs="+", metavar="LAYOUT", help='such as "dp_shard=2,ep=2"')
    which.add_argument("--all", action="store_true", help="every legal power-of-two layout")
    which.add_argument(
        "--sample", type=positive, metavar="N", help="N layouts; each pair of axes meets"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--world-size", type=positive, nargs="+", default=[8], help="default: 8")
    parser.add_argument("--float32", action="store_true", help="repeat each layout in float32")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/layouts"), help="default: %(default)s"
    )
    for option, values in OPTIONS.items():
        parser.add_argument(_FLAGS[option], choices=values, dest=option)
    options, overrides = parser.parse_known_args(argv)
    options.overrides = overrides
    try:
        return _compare(options)
    except ConfigError as error:
        print_errors(error.lines)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on with what {options.out} holds")
        return 130


def positive(text: str) -> int:
    """A number of something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a positive number")
    return int(text)


def _compare(options: argparse.Namespace) -> int:
    from titan_moe.verify.gradients.gate import Gate
    from titan_moe.verify.gradients.sweep import gate_page, summary, sweep

    options.out.mkdir(parents=True, exist_ok=True)
    job = load_job(["--job.config_file", options.config, *options.overrides])
    with tempfile.TemporaryDirectory() as folder:
        gate = Gate(job, Path(folder))
        layouts = _chosen(options, gate)
        dtypes = ["float64", "float32"] if options.float32 else ["float64"]
        tasks = [(layout, dtype) for layout in layouts for dtype in dtypes]
        with tqdm(total=len(tasks), unit="layout", dynamic_ncols=True) as bar:

            def seen(result) -> None:  # type: ignore[no-untyped-def]
                bar.update()
                for line in result.lines:
                    tqdm.write(line)

            results = sweep(gate, tasks, options.out, seen=seen)
    facts = summary(results)
    title = f"Layouts of {job.model.name} {job.model.flavor}"
    (options.out / "results.html").write_text(gate_page(title, results, facts), encoding="utf-8")
    as_json = {"summary": facts, "results": [result.as_json() for result in results]}
    (options.out / "results.json").write_text(json.dumps(as_json, indent=1), encoding="utf-8")
    print(
        f"{facts['passed']} of {facts['layouts']} pass, worst error {facts['worst_error']:.1e} "
        f"({facts['worst_tensor']}); {options.out / 'results.html'}"
    )
    return 0 if 0 < facts["passed"] == facts["layouts"] else 1


def _chosen(options: argparse.Namespace, gate) -> list[Layout]:  # type: ignore[no-untyped-def]
    fixed = {name: getattr(options, name) for name in OPTIONS if getattr(options, name)}
    if options.layouts:
        return [with_options(parse(text), **fixed) for text in options.layouts]
    layouts = [
        layout
        for size in options.world_size
        for layout in legal_layouts(size, powers_of_two=size & (size - 1) == 0)
    ]
    if options.sample:
        layouts = cover_pairs(layouts, options.sample, options.seed)
    return cover_options(layouts, fixed=fixed, legal=lambda layout: not gate.refusal(layout))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
