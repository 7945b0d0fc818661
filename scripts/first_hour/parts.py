"""The parts of the first hour, in the order in which a broken machine is understood."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from signal import SIGKILL, SIGSTOP, Signals
from typing import Any

from scripts.first_hour.session import REPO, Machine, PartError, Session, UnseenError, count_tests
from titan_moe.config.parse import load_job
from titan_moe.distributed.parallel_dims import parallel_dims
from titan_moe.parallelize.memory import GIB
from titan_moe.verify.compare.records import read_run
from titan_moe.verify.report.bench import card

_CONFIGS = REPO / "configs"
_DEBUG_MODEL = "configs/qwen3/debugmodel_moe.toml"
_COMPARISON = (
    "verify losses --config configs/debug/compare.toml --baseline ranks=1 "
    "--training.global_batch_size 16 --training.local_batch_size 2"
)
_TINY: dict[str, object] = {
    "training.dataset": "synthetic",
    "training.seq_len": 64,
    "training.local_batch_size": 2,
    "training.mixed_precision_param": "float32",
}
_TEXT = {"training.dataset": "synthetic", "model.tokenizer_path": "bytes"}
# Layouts of as many ranks, compared with one process.
_LAYOUTS = {
    4: ("dp_shard=4,ep=2", "pp=2,tp=2,etp=2", "dp_replicate=2,dp_shard=1,cp=2,ep=2"),
    8: ("dp_shard=8", "pp=2,dp_shard=2,tp=2,ep=2", "dp_replicate=2,dp_shard=1,cp=2,tp=2,ep=4"),
}
_MODELS_FOR_CPUS = ("qwen3/debugmodel_moe.toml", "gpt_oss/debugmodel.toml")
_TOY = ("--device", "cpu", "--repeats", "1")
_RESHARD_ERROR = 1e-5
"""Largest relative difference of a loss in float32 after a change of layout."""
_RATES = ("tokens_per_second", "tflops", "mfu", "memory/", "time", "seconds")


@dataclass(frozen=True)
class Seen:
    """Holds the sentence and the figures of a part that did not fail."""

    line: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    verdict: str = "passed"


@dataclass(frozen=True)
class Part:
    """One question, and the commands that answer it."""

    name: str
    question: str
    run: Callable[[Session], Seen]
    """Raises PartError or UnseenError."""
    limit_s: int
    """Seconds that it may take on GPUs."""
    many_nodes: bool = False
    """Runs on all nodes together; other parts are left out where there are several."""


def all_parts(machine: Machine) -> list[Part]:
    """Returns the parts for a machine, and a benchmark of each configuration of its size."""
    kernels = partial(run_tests, files=["tests/gpu"])
    parts = [
        Part("machine", "Are GPUs, links and disk alike?", check_machine, 600, many_nodes=True),
        Part("kernels", "Do kernels and modules agree with their references?", kernels, 2400),
        Part("gate", "Does each layout have the gradients of one process?", verify_gate, 900),
        Part("layouts", "Do layouts train like one process?", compare_layouts, 900),
        Part("resume", "Is a resumed run the same run, in any layout?", resume, 600, True),
        Part("asleep", "Does the report name a rank that sleeps?", put_to_sleep, 400),
        Part("killed", "Does the last line name a rank that was killed?", kill, 300),
        Part("memory", "Does the last line say that memory ran out?", run_out_of_memory, 300),
        Part("profile", "Where does the time of a microbatch go?", profile, 600),
    ]
    return [*parts, *_kernel_benchmarks(), *_benchmarks(machine)]


def check_machine(session: Session) -> Seen:
    machine, torchrun = session.machine, ["-m", "torch.distributed.run"]
    if machine.nodes > 1:
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", machine.endpoint]
        torchrun += ["--nnodes", str(machine.nodes), *meeting]
    else:
        torchrun += ["--standalone"]
    script = ["-m", "scripts.check_cluster", "--folder", session.folder]
    ranks = ["--nproc-per-node", machine.local_ranks]
    output = session.run(sys.executable, *torchrun, *ranks, *script)
    return Seen("; ".join(line for line in output.splitlines() if "median" in line))


def run_tests(session: Session, files: Sequence[str]) -> Seen:
    # A line a test, as it ends. Each process compiles the kernels of its tests, minutes for some.
    options = ("-vv", "-n", min(8, max(1, (os.cpu_count() or 1) // 2)), "--durations", 10)
    session.run(
        *(sys.executable, "-m", "pytest", *files, *options, f"--junit-xml={session.tests}"),
        accept=(0, 5),
    )
    ends = count_tests(session.tests)
    if not ends["passed"]:
        raise UnseenError(f"all {ends['skipped']} tests need a GPU")
    return Seen(f"{ends['passed']} tests passed, {ends['skipped']} skipped", ends)


def verify_gate(session: Session, ranks: int | None = None, layouts: int = 12) -> Seen:
    ranks = ranks or session.machine.ranks
    number = layouts if session.machine.on_gpus else 3
    options = ("--sample", number, "--ranks", ranks, "--float32", "--out", session.folder)
    words = (*options, "--device", session.machine.device)
    output = session.titan_moe(
        "verify", "gradients", "--config", "configs/debug/gate_qwen3.toml", *words
    )
    return Seen(_last_line(output))


def compare_layouts(session: Session) -> Seen:
    ranks = session.machine.ranks
    if ranks not in _LAYOUTS:
        raise UnseenError(f"needs {' or '.join(map(str, _LAYOUTS))} ranks, here are {ranks}")
    steps, controls = (20, 12) if session.machine.on_gpus else (8, 4)
    options = ("--steps", steps, "--repeats", controls, "--out", session.folder / "layouts")
    verdicts = {}
    for layout in _LAYOUTS[ranks]:
        candidate = ("--candidate", f"ranks={ranks} layout={layout}")
        output = session.titan_moe(*_COMPARISON.split(), *candidate, *options, accept=(0, 3))
        (verdicts[layout],) = re.findall(r": ((?:identical|inside).*)$", output, re.MULTILINE)
    return Seen("; ".join(f"{layout}: {said}" for layout, said in verdicts.items()), verdicts)


def resume(session: Session) -> Seen:
    keys = _TINY | {
        "training.steps": 6,
        "training.global_batch_size": 2 * session.machine.ranks,  # The same in any layout.
        "checkpoint.enable": True,
        "checkpoint.interval": 3,
        "debug.deterministic": True,
    }
    whole = session.train("whole", _DEBUG_MODEL, keys)
    middle = session.folder / "whole" / "checkpoint" / "step-3"
    keys |= {"checkpoint.initial_load_path": middle, "checkpoint.initial_load_model_only": False}
    for name in ("again", "twice"):
        again = session.train(name, _DEBUG_MODEL, keys)
        if [_numbers(line) for line in again] != [_numbers(line) for line in whole[3:]]:
            raise PartError(f"{name}: the resumed run has other bits than the whole one")
    if session.machine.ranks == 1:
        return Seen("resumed twice: the same bits")
    degree = "tensor" if session.machine.ranks % 2 == 0 else "expert"
    other = session.train(
        "other", _DEBUG_MODEL, keys | {f"parallelism.{degree}_parallel_degree": 2}
    )
    error = max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(other, whole[3:], strict=True))
    if not error <= _RESHARD_ERROR:
        raise PartError(f"in another layout the losses differ by {error:.1e}")
    line = f"resumed: the same bits; in another layout losses differ by {error:.1e}"
    return Seen(line, {"reshard_error": error})


def put_to_sleep(session: Session) -> Seen:
    output = _disturb(session, SIGSTOP)
    if "does not answer" not in output:
        raise PartError(f"the report does not name the rank: {_last_line(output)}")
    return Seen(_line_with(output, "does not answer"))


def kill(session: Session) -> Seen:
    last, output = session.machine.ranks - 1, _disturb(session, SIGKILL)
    if f"rank {last} was killed by SIGKILL" not in output:
        raise PartError(f"the last line does not name the rank: {_last_line(output)}")
    return Seen(_last_line(output))


def run_out_of_memory(session: Session) -> Seen:
    if not session.machine.on_gpus:
        raise UnseenError("needs a GPU: a CPU's memory is shared with all other programs")
    keys = _TINY | {"training.seq_len": 8192, "training.local_batch_size": 8192}
    words = session.train_words("memory", _DEBUG_MODEL, keys | {"training.steps": 2})
    output = session.run(*words, accept=(1,))
    if "out of memory" not in _last_line(output):
        raise PartError(f"the last line does not say it: {_last_line(output)}")
    return Seen(_last_line(output))


def profile(session: Session) -> Seen:
    steps: dict[str, object] = {"training.steps": 5, "profiling.profile_freq": 5}
    options = _TEXT | steps | {"profiling.enable_profiling": True, "checkpoint.enable": False}
    config = next(_configs(session.machine), _DEBUG_MODEL)
    session.train("profile", str(config), options | _one_microbatch(session.machine, str(config)))
    trace = session.folder / "profile" / "profile_traces" / "step-5"
    return Seen(session.titan_moe("report", "profile", trace).strip())


def benchmark(session: Session, config: Path, keys: Mapping[str, object]) -> Seen:
    """Trains a few steps; sets speed beside published figures, and memory beside the estimate."""
    steps = 8 if session.machine.on_gpus else 4
    off = {"checkpoint.enable": False, "validation.enable": False}
    session.train("run", str(config), {**_TEXT, **off, "training.steps": steps, **keys})
    found = card(read_run(session.folder / "run"))
    peak, estimate = found["GiB"], _estimate(session, config)
    line = f"{found['tokens/s per device']:,.0f} tokens/s and {found['TFLOPS per device']:.2f} "
    line += f"TFLOPS per device, {peak:.1f} GiB"
    if session.machine.on_gpus:
        line += f" of {estimate:.1f} estimated; published: {found['published']}"
    if session.machine.on_gpus and peak > estimate:
        raise PartError(f"more memory than estimated: {line}")
    return Seen(line, {**found, "estimate": estimate})


def benchmark_kernels(session: Session, words: Sequence[str]) -> Seen:
    """Runs a script of scripts/bench. Its goals are for GPUs; one that is missed fails nothing."""
    toy = () if session.machine.on_gpus else _TOY
    command = (sys.executable, "-m", *words, *toy, "--json", session.figures)
    session.run(*command)
    figures = json.loads(session.figures.read_text(encoding="utf-8"))
    goals = figures["goals"]
    if not session.machine.on_gpus:
        return Seen(f"runs, with toy sizes; its {len(goals)} goals are for GPUs", figures)
    missed = [goal["name"] for goal in goals if not goal["met"]]
    line = f"{len(goals) - len(missed)} of {len(goals)} goals met"
    if missed:
        return Seen(f"{line}; missed: {', '.join(missed)}", figures, "goals missed")
    return Seen(line, figures)


def _kernel_benchmarks() -> Iterator[Part]:
    for name, run in KERNEL_BENCHMARKS.items():
        yield Part(name, "How near are kernels to what the GPU can do?", run, 600)


KERNEL_BENCHMARKS = {
    name: partial(benchmark_kernels, words=f"scripts.bench.{name}".split())
    for name in (
        "gpu_permute", "gpu_moe", "gpu_slice --only qwen3", "gpu_slice --only deepseek_v3",
    )
}  # fmt: skip


def _benchmarks(machine: Machine) -> Iterator[Part]:
    """Yields a part for each configuration as it is, and two for those of published figures: with
    forced and with natural routing."""
    routings = {"forced": True, "natural": False}
    for config in _configs(machine):
        name = f"bench {config.parent.name}/{config.stem}"
        rows: dict[str, dict[str, object]] = {name: {}}
        if config.parent.name == "bench":
            key = "debug.moe_force_load_balance"
            rows = {f"{name} {word}": {key: forced} for word, forced in routings.items()}
        for row, keys in rows.items():
            run = partial(benchmark, config=config, keys=keys)
            yield Part(row, "How fast, and in how much memory?", run, 900, many_nodes=True)


def _configs(machine: Machine) -> Iterator[Path]:
    """Yields the shipped configurations for this number of GPUs, or debug models for a CPU."""
    if not machine.on_gpus:
        yield from (_CONFIGS / name for name in _MODELS_FOR_CPUS)
        return
    for path in sorted(_CONFIGS.glob("*/*.toml"), key=lambda path: path.parent.name != "bench"):
        if f"# ranks: {machine.ranks}\n" in path.read_text(encoding="utf-8"):
            yield path


def _estimate(session: Session, config: Path) -> float:
    """Returns the GiB of a GPU that the estimate says a configuration needs."""
    words = ("--ranks", session.machine.ranks, "--config", config, "--json")
    needed = json.loads(session.titan_moe("memory", *words, accept=(0, 1)))["needed"]
    return needed / GIB


def _one_microbatch(machine: Machine, config: str) -> dict[str, object]:
    job = load_job(["--config", config])
    dims = parallel_dims(job.parallelism, machine.ranks)
    return {"training.global_batch_size": job.training.local_batch_size * dims.size("batch")}


def _disturb(session: Session, signal: Signals) -> str:
    """Sends a signal to the last rank of a training; returns what the run then says."""
    if session.machine.ranks == 1:
        raise UnseenError("needs two ranks: one rank waits for no other")
    keys = _TINY | {"training.steps": 100_000, "comm.train_timeout_seconds": 20}
    process, start = session.start(*session.train_words("run", _DEBUG_MODEL, keys))
    metrics = session.folder / "run" / "metrics.jsonl"
    session.rank_of(process, session.machine.ranks - 1, metrics).send_signal(signal)
    code, output = session.wait(process), session.output(start)
    if code == 0:
        raise PartError("the run ended well")
    return output


def _numbers(line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the figures of a step that are the same in a repeated run."""
    return {name: value for name, value in line.items() if not name.startswith(_RATES)}


def _last_line(output: str) -> str:
    return output.strip().rpartition("\n")[2].removeprefix("error: ")


def _line_with(output: str, words: str) -> str:
    return next(x.removeprefix("error: ") for x in output.splitlines() if words in x)
