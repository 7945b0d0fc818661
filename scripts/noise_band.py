"""Whether layouts, or changes of a configuration, train the same curves but for rounding.

    python scripts/noise_band.py configs/debug/gate_deepseek_v3.toml --layouts "tp=4" "pp=2,ep=2"
    python scripts/noise_band.py CONFIG --dtype bfloat16 --steps 60 --repeats 30 --layouts "ep=2"
    python scripts/noise_band.py CONFIG --changed "--optimizer.lr 0.0102" --layouts "dp_shard=1"
    python scripts/noise_band.py CONFIG --curves outputs/other/metrics.jsonl

Harmless repeats of the same training (rows in another order, microbatches of another size, layouts
proven in float64) are trained first and measure the band; titan_moe/verify/noise_band.py says how.
All of them run on this machine's CPU. The output folder gets band.json and band.png. Exit code 1 if
any candidate is outside.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

from tqdm import tqdm

from titan_moe.config.errors import ConfigError
from titan_moe.config.job import JobConfig
from titan_moe.config.load import load_job
from titan_moe.config.resolve import resolve
from titan_moe.runtime.failure import print_errors


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="TOML file, such as configs/debug/gate_deepseek_v3.toml")
    parser.add_argument("--layouts", nargs="+", default=[], help='candidates, such as "tp=2,ep=2"')
    parser.add_argument("--changed", default="", help="keys that only candidates have, as one word")
    parser.add_argument(
        "--curves", nargs="+", type=Path, default=[], help="candidates: metrics.jsonl files"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, help="default: the configuration's")
    parser.add_argument("--repeats", type=int, default=12, help="harmless ones; default: 12")
    parser.add_argument("--false-alarms", type=float, default=0.01, help="default: %(default)s")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/noise_band"), help="default: %(default)s"
    )
    options = parser.parse_args(argv)
    if not options.layouts and not options.curves:
        parser.error("name candidates: --layouts or --curves")
    try:
        return _compare(options)
    except (ConfigError, ValueError) as error:
        print_errors(error.lines if isinstance(error, ConfigError) else [str(error)])
        return 2


def _compare(options: argparse.Namespace) -> int:
    from titan_moe.models.hf import model_of_job
    from titan_moe.verify.layouts import parse
    from titan_moe.verify.noise_band import FEWEST_REPEATS, Band, plot_band, read_curve
    from titan_moe.verify.noise_runs import Run, harmless_runs, refusal, train

    job = _job(options, [])
    changed = _job(options, shlex.split(options.changed))
    config = model_of_job(job.model)
    harmless = [(job, run) for run in harmless_runs(job, config, options.repeats)]
    tried = [(changed, Run(parse(text))) for text in options.layouts]
    lines = [f"{run}: {line}" for one, run in tried for line in refusal(one, config, run)]
    lines += [f"--curves {path}: no such file" for path in options.curves if not path.is_file()]
    if options.repeats < FEWEST_REPEATS:
        lines.append(f"--repeats {options.repeats}: a band wants {FEWEST_REPEATS} or more")
    if lines:
        raise ConfigError(lines)

    curves = []
    for one, run in tqdm([*harmless, *tried], unit="run", dynamic_ncols=True):
        curves.append(train(one, config, run))
    band = Band(curves[: len(harmless)], false_alarms=options.false_alarms)
    candidates = [*curves[len(harmless) :], *(read_curve(path) for path in options.curves)]
    judgements = [band.judge(candidate) for candidate in candidates]

    options.out.mkdir(parents=True, exist_ok=True)
    found = {"band": band.as_json(), "candidates": [one.as_json() for one in judgements]}
    (options.out / "band.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    plot_band(band, candidates, options.out / "band.png")
    for judgement in judgements:
        print(judgement.line())
    print(
        f"{len(harmless)} repeats; a harmless curve is outside in {options.false_alarms:.1%} of "
        f"cases if the statistic is log-normal, in at most {1 / (len(harmless) + 1):.1%} whatever "
        f"it is; {options.out / 'band.png'}"
    )
    return 0 if all(judgement.inside for judgement in judgements) else 1


def _job(options: argparse.Namespace, changes: list[str]) -> JobConfig:
    from titan_moe.verify.noise_runs import with_dtype

    steps = [] if options.steps is None else ["--training.steps", str(options.steps)]
    job = load_job(["--job.config_file", options.config, *steps, *changes])
    return with_dtype(resolve(job, world_size=1), options.dtype)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
