"""The stages of a call on one GPU, the cheapest and most telling first."""

import json
import shutil
import sys
from functools import partial

from scripts.first_hour.parts import KERNEL_BENCHMARKS, Part, Seen, resume, run_tests, verify_gate
from scripts.first_hour.session import Session, UnseenError, count_tests
from titan_moe.models.registry import FAMILIES

GPU_FILES = {
    "kernels": ["kernels", "real_sizes"],
    "training": ["families"],
    "attention": ["attention", "recompute"],
    "others": ["precision", "loader", "training"],
}
"""Files of tests by stage."""
SHARING_RANKS = 4
GATE_LAYOUTS = 6
_WORLD_S, _TRAINING_S, _FAMILY_S = 15, 90, 20
"""Longest times of a world of ranks that share the GPU, of a training that starts cold, and of a
family's step, whose kernels of attention are compiled."""


def all_stages() -> list[Part]:
    """Returns the stages, with limits for a GPU whose kernels are still to be compiled."""
    tests = {
        name: partial(run_tests, files=[f"tests/gpu/test_{file}.py" for file in files])
        for name, files in GPU_FILES.items()
    }
    bench = KERNEL_BENCHMARKS
    gate = partial(verify_gate, ranks=SHARING_RANKS, layouts=GATE_LAYOUTS)
    gate_s = 2 * GATE_LAYOUTS * _WORLD_S  # Each layout in float64 and in float32.
    families_s = (len(FAMILIES) + 1) * _FAMILY_S  # A family has two cases.
    return [
        Part("machine", "Which device, driver and versions are here?", say_machine, 60),
        Part("kernels", "Do kernels agree with their slow references?", tests["kernels"], 150),
        Part("moves", "How near are planning and row moves to a copy?", bench["gpu_permute"], 60),
        Part("experts", "How near is a layer to its grouped GEMMs alone?", bench["gpu_moe"], 90),
        Part("training", "Are loss and gradients those of the CPU?", tests["training"], families_s),
        Part("attention", "Do attention and recompute agree?", tests["attention"], 150),
        Part("gate", "Do ranks that share the GPU have one process's gradients?", gate, gate_s),
        Part("slice qwen3", "How fast?", bench["gpu_slice --only qwen3"], 150),
        Part("slice deepseek_v3", "How fast?", bench["gpu_slice --only deepseek_v3"], 150),
        Part("resume", "Have two resumes equal bits?", resume, 3 * _TRAINING_S),
        Part("profile", "Where does the time of a microbatch go?", profile_slice, 90),
        Part("others", "Do repeats, float8 and compiled layers agree?", tests["others"], 180),
        Part("sanitizer", "Do the permute kernels keep to their memory?", sanitize, 120),
    ]


def say_machine(session: Session) -> Seen:
    output = session.run(sys.executable, "-m", "scripts.one_gpu.facts", session.machine.device)
    facts = json.loads(output.strip().rpartition("\n")[2])
    return Seen(", ".join(f"{name} {facts[name]}" for name in ("device", "torch", "cuda")), facts)


def profile_slice(session: Session) -> Seen:
    """Profiles a microbatch of a slice of Qwen3-30B-A3B, or of a debug model on a CPU."""
    script = "scripts.bench.gpu_slice --only qwen3 --repeats 1 --trace"
    device = ("--device", session.machine.device)
    session.run(sys.executable, "-m", *script.split(), session.folder, *device)
    (trace,) = session.folder.glob("profile_traces/step-*")
    return Seen(session.titan_moe("report", "profile", trace, "--out", session.folder).strip())


def sanitize(session: Session) -> Seen:
    tool = shutil.which("compute-sanitizer")
    if tool is None or not session.machine.on_gpus:
        raise UnseenError("needs a GPU and compute-sanitizer")
    chosen = ("tests/gpu/test_kernels.py", "-vv", "-k", "slow_formulas")
    for check in ("memcheck", "racecheck"):
        session.run(
            *(tool, "--tool", check, "--error-exitcode", 9, sys.executable, "-m", "pytest"),
            *(*chosen, f"--junit-xml={session.tests}"),
            env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # Each tensor has bounds of its own.
        )
    ends = count_tests(session.tests)
    return Seen(f"memcheck and racecheck find nothing in {ends['passed']} tests", ends)
