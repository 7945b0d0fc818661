"""Traces written by hand, whose figures are known, and files that are no traces."""

import gzip
import json

import pytest

from tests.support.commands import run_command
from titan_moe.config.errors import ConfigError
from titan_moe.planner.step_time import REGIONS
from titan_moe.profiling.parts import part_of
from titan_moe.profiling.trace import (
    EXPOSED,
    IDLE,
    RegionPhase,
    read_profiles,
    read_trace,
    summary,
    table,
)

MAIN, BACKWARD, GLOO, STREAM, NCCL = 1, 2, 3, 7, 20


def annotation(name, ts, dur, tid=MAIN):
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": ts, "dur": dur, "tid": tid}


def op(name, ts, dur, tid=MAIN):
    return annotation(name, ts, dur, tid) | {"cat": "cpu_op"}


def launch(correlation, ts, tid=MAIN):
    event = annotation("cudaLaunchKernel", ts, 1, tid)
    return event | {"cat": "cuda_runtime", "args": {"correlation": correlation}}


def kernel(name, ts, dur, correlation, tid=STREAM, **args):
    event = annotation(name, ts, dur, tid)
    return event | {"cat": "kernel", "args": {"correlation": correlation} | args}


def arrow(number, ts_forward, ts_backward, thread=BACKWARD):
    start = {"ph": "s", "cat": "fwdbwd", "id": number, "tid": MAIN, "ts": ts_forward, "name": "f"}
    return [start, start | {"ph": "f", "tid": thread, "ts": ts_backward}]


def gpu_trace(late: float = 0.0) -> list[dict]:
    """Two exchanges: one under a matrix product for 30 of its 50 us, one under nothing."""
    node = "autograd::engine::evaluate_function: MmBackward0"
    return [
        annotation("ProfilerStep#3", 0, 1000 + late),
        annotation("region::experts", 0, 100),
        op("aten::mm", 10, 20),
        launch(1, 15),
        kernel("gemm_bf16", 50, 100, 1),
        annotation("region::dispatch", 100, 50),
        op("c10d::alltoall_base_", 105, 10),
        launch(2, 110),
        kernel("ncclDevKernel_SendRecv", 120, 50, 2, NCCL),  # 30 under the product, 20 alone.
        launch(3, 130),
        kernel("ncclDevKernel_AllGather", 300, 40 + late, 3, NCCL),  # Alone.
        # The backward, in a thread of its own: the node's product is the experts', and a region
        # inside is recomputed.
        op(node, 400, 100, BACKWARD),
        op("MmBackward0", 405, 40, BACKWARD),
        launch(4, 410, BACKWARD),
        kernel("gemm_bf16", 420, 60, 4),
        annotation("region::attention", 450, 40, BACKWARD),
        launch(5, 460, BACKWARD),
        kernel("flash", 480, 25, 5),
        *arrow(1, 10, 405),
    ]


def cpu_trace() -> list[dict]:
    return [
        annotation("ProfilerStep#1", 0, 200),
        annotation("region::dispatch", 0, 100),
        op("aten::index_select", 10, 20),
        op("_c10d_functional::wait_tensor", 40, 50),
        annotation("gloo:all_to_all", 15, 65, GLOO),  # Computing until 30: 50 us are exposed.
        annotation("region::experts", 110, 60),
        op("aten::mm", 110, 60),
        op("aten::copy_", 120, 10),
    ]


def compiled_trace() -> list[dict]:
    """A layer that torch.compile runs: its own name, forward and backward."""
    return [
        annotation("region::data", 0, 10),
        op("Torch-Compiled Region: 0/0", 20, 50),
        op("CompiledFunction", 25, 40),
        op("autograd::engine::evaluate_function: CompiledFunctionBackward", 100, 30),
        op("CompiledFunctionBackward", 100, 30),
        *arrow(1, 25, 100, MAIN),
    ]


def write(path, events, rank=0):
    trace = {"traceEvents": events, "distributedInfo": {"rank": rank}}
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    else:
        path.write_text(json.dumps(trace))
    return path


def test_kernels_belong_to_the_regions_that_launched_them(tmp_path):
    profile = read_trace(write(tmp_path / "rank-0.json", gpu_trace()))
    assert profile.on_gpu and profile.wall == 1000
    assert dict(profile.times) == {
        RegionPhase("experts", "forward"): 100,
        RegionPhase("experts", "backward"): 60,
        RegionPhase("attention", "recompute"): 25,
    }
    assert (profile.communication, profile.exposed) == (90, 60)
    assert profile.idle == 1000 - 185 - 60
    assert profile.kernels == {"gemm_bf16": 160, "flash": 25}
    # 30 us are hidden. The groups have no names: the region says whose they were.
    parts = {"experts": 160, "attention": 25, "exchange": 60, "host": 755}
    assert profile.parts == parts


def test_cpu_waits_while_only_a_collective_runs(tmp_path):
    profile = read_trace(write(tmp_path / "rank-0.json.gz", cpu_trace()))
    assert not profile.on_gpu
    assert (profile.communication, profile.exposed) == (65, 50)
    assert dict(profile.times) == {
        RegionPhase("dispatch", "forward"): 50,
        RegionPhase("experts", "forward"): 60,
        RegionPhase("other", "forward"): 40,
    }
    assert profile.idle == 0
    assert profile.kernels == {"aten::index_select": 20, "aten::mm": 50, "aten::copy_": 10}


def test_compiled_layer_is_a_region(tmp_path):
    profile = read_trace(write(tmp_path / "rank-0.json", compiled_trace()))
    assert profile.times[RegionPhase("compiled", "forward")] == 50
    assert profile.times[RegionPhase("compiled", "backward")] == 30


def test_summary_names_the_slowest_rank(tmp_path):
    for rank, late in enumerate((0, 400, 100)):
        write(tmp_path / f"rank-{rank}.json.gz", gpu_trace(late), rank)
    facts = summary(read_profiles(tmp_path))
    assert facts["ranks"] == [0, 1, 2]
    exposed = facts[EXPOSED]
    assert exposed["slowest_rank"] == 1
    # An all-gather of 440 us has the backward's 85 us of kernels over it, one of 140 us 20.
    assert exposed["by_rank"] == pytest.approx([0.060, 0.375, 0.140])
    assert facts["regions"]["experts"]["backward"] == pytest.approx(0.060)
    shares = [row["share"] for row in facts["regions"].values()]
    assert sum(shares) + exposed["share"] + facts[IDLE]["share"] == pytest.approx(1)
    text = table(facts)
    assert "rank 1" in text and "exposed communication" in text


_PARTS = """
    sm90_xmma_gemm_bf16bf16                  attention -        products
    nvjet_tst_128x256_64x4                   experts   -        experts
    cutlass::GemmUniversal<GroupProblemShape compiled  -        experts
    pytorch_flash::flash_fwd_kernel<cutlass  compiled  -        attention
    _copy_rows_kernel                        compiled  -        rows
    _gated_rows_kernel                       experts   -        elementwise
    sm90_xmma_gemm_bf16bf16                  loss      -        output
    ncclDevKernel_AllReduce                  grad_norm -        optimizer
    ncclDevKernel_AllGather                  fsdp      edp+fsdp parameters
    ncclDevKernel_SendRecv                   other     pp       stages
    ncclDevKernel_SendRecv                   attention cp+ep    context
    ncclDevKernel_SendRecv                   compiled  tp+ep    exchange
    ncclDevKernel_ReduceScatter              compiled  tp+ep    tensor
    ncclDevKernel_AllGather                  dispatch  tp+etp   exchange
"""
"""Name of a kernel, region that launched it, axes of its group, part."""


@pytest.mark.parametrize("row", _PARTS.strip().splitlines())
def test_kernel_belongs_to_a_part_of_the_planner(row):
    name, region, axes, part = row.split()
    assert part_of(name, axes, region) == part and part in REGIONS


def test_measured_parts_stand_beside_those_that_the_run_expected(tmp_path):
    """The report of a profile names the largest gap; a pipeline's bubble is a wait for stages."""
    step = tmp_path / "profile_traces" / "step-10"
    step.mkdir(parents=True)
    expected = dict.fromkeys(REGIONS, 0.0)
    expected |= {"exchange": 1.2e-4, "stages": 1e-5, "bubble": 3e-5, "host": 6e-4}
    lines = [{"step": 1, "predicted/experts": 5.0}]
    lines += [{"step": 3} | {f"predicted/{part}": s for part, s in expected.items()}, {"step": 4}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    axes = {"Process Group Description": "ep"}
    waits = kernel("ncclDevKernel_SendRecv", 550, 210, 9, NCCL, **axes)
    write(step / "rank-0.json.gz", [*gpu_trace(), waits])
    done = run_command("report", "profile", step)
    assert done.returncode == 0
    assert f"{'host':<22}{0.5:>11.1f}{0.6:>11.1f}" in done.stdout
    line = "76 % of this layout's bound; largest gap: experts (measured 0.2 ms, predicted 0.0 ms)"
    assert line in done.stdout
    facts = json.loads((step / "summary.json").read_text())
    assert facts["measured_parts"]["exchange"] == pytest.approx(0.27)
    assert facts["predicted_parts"]["stages"] == pytest.approx(0.04)


def test_report_profile_writes_table_and_figures(tmp_path):
    for rank in range(2):
        write(tmp_path / f"rank-{rank}.json.gz", cpu_trace(), rank)
    done = run_command("report", "profile", tmp_path)
    assert done.returncode == 0 and "communication 0.1 ms a step" in done.stdout
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file"),
        (b"\x1f\x8bbroken", "cannot be read"),
        (b"{", "cannot be read"),
        (b'{"a": 1}', "cannot be read"),
        (b'{"traceEvents": [1]}', "cannot be read"),
        (b'{"traceEvents": []}', "names none of titan_moe's regions"),
    ],
)
def test_unreadable_trace_is_one_line(tmp_path, content, says):
    path = tmp_path / ("rank-0.json.gz" if content and content[0] == 0x1F else "rank-0.json")
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        read_profiles(path)


def test_folder_of_steps_is_refused(tmp_path):
    (tmp_path / "step-10").mkdir()
    with pytest.raises(ConfigError, match="such as"):
        read_profiles(tmp_path)
