"""Seconds by arithmetic: of counts made by hand, and how a rehearsal attributes what it counts."""

import json
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from scripts.rehearsal.fusion import Fusion
from scripts.rehearsal.kinds import ATTENTION, ELEMENTWISE, FLOAT32, GROUPED, HOST, MATMUL, ROWS
from scripts.rehearsal.seconds import H100, Microbatch, main
from scripts.rehearsal.work import (
    Link,
    Part,
    Tally,
    Whereabouts,
    Work,
    added,
    attention_flops,
    attention_flops_of,
    bytes_of,
    factors_of,
    flops_of,
    kind_of,
    kind_of_kernel,
)
from titan_moe.profiling.regions import region

_NAMES = (
    *("ideal", "products", "attention", "elementwise", "rows", "loss", "recompute", "exchanges"),
    *("fsdp", "others", "update", "host"),
)
_MEMORY = 0.9 * 3.35e12
"""Bytes that take a second."""


def part(kind: str, region: str = "experts", phase: str = "forward", **amounts: Any) -> dict:
    return {"phase": phase, "region": region, "kind": kind, "name": "an operation", **amounts}


def link(op: str, ranks: int, nodes: int, **more: Any) -> dict:
    found = {"phase": "forward", "region": "dispatch", "axis": "ep", "op": op, **more}
    return {"ranks": ranks, "nodes": nodes, **found}


def seconds(*parts: dict, links: tuple = (), waits: float = 0, number: int = 1) -> dict[str, float]:
    """Of a model without FLOPs: every product is slower than the ideal."""
    found = {
        "num_microbatches": number,
        "model_flops": {"products": 0.0, "attention": 0.0},
        "waits": waits,
        "step": {"parts": parts, "links": links},
    }
    rows = Microbatch(found).rows()
    assert len(rows) == len(_NAMES)
    return {name: row.seconds for name, row in zip(_NAMES, rows, strict=True) if row.seconds}


@pytest.mark.parametrize(
    ("parts", "row"),
    [
        (part(MATMUL, flops=0.7 * 989e12), "products"),
        (part(GROUPED, phase="backward", flops=0.6 * 989e12), "products"),
        (part(FLOAT32, "route", flops=0.7 * 67e12), "products"),
        (part(MATMUL, "loss", flops=0.7 * 989e12), "products"),
        (part(ATTENTION, flops=0.36 * 989e12), "attention"),
        (part(ATTENTION, flops=0.38 * 989e12) | {"name": "flex_attention"}, "attention"),
        (part(ELEMENTWISE, bytes=_MEMORY), "elementwise"),
        (part(ROWS, "dispatch", bytes=0.72 * 3.35e12), "rows"),
        (part(ELEMENTWISE, "loss", bytes=_MEMORY), "loss"),
        (part(MATMUL, phase="recompute", flops=0.7 * 989e12), "recompute"),
        (part(ELEMENTWISE, phase="recompute", bytes=_MEMORY), "recompute"),
        (part("copies", "fsdp", "recompute", bytes=_MEMORY), "fsdp"),
        (part(ELEMENTWISE, "optimizer", bytes=_MEMORY), "update"),
        (part(HOST, dispatches=200_000), "host"),
    ],
)
def test_each_part_takes_its_seconds_in_one_row(parts: dict, row: str):
    assert seconds(parts) == {row: pytest.approx(1)}


def test_a_step_is_divided_by_its_microbatches():
    assert seconds(part(ELEMENTWISE, bytes=_MEMORY), number=4) == {"elementwise": 0.25}


def test_products_count_beyond_the_models_flops():
    found = {
        "num_microbatches": 1,
        "model_flops": {"products": 989e12, "attention": 0.5 * 989e12},
        "waits": 0,
        "step": {
            "parts": [part(MATMUL, flops=989e12), part(ATTENTION, flops=0.36 * 989e12)],
            "links": [],
        },
    }
    ideal, products, attention, *_ = Microbatch(found).rows()
    assert ideal.seconds == 1.5
    assert products.seconds == pytest.approx(1 / 0.7 - 1)
    assert attention.seconds == pytest.approx(1 - 0.5)


_INSIDE, _OUTSIDE = 0.8 * 450e9, 0.8 * 50e9


@pytest.mark.parametrize(
    ("sent", "takes"),
    [
        (link("all_to_all", 8, 1, bytes=_INSIDE), 1),
        # 56 of 63 parts leave the node, over the GPU's own adapter.
        (link("all_to_all", 64, 8, bytes=_OUTSIDE * 63 / 56), 1),
        (link("all_gather", 8, 8, bytes=_OUTSIDE), 1),
        # A ring leaves a node once, over its two GPUs' adapters; and over eight of them, NVLink
        # is the narrower one no more.
        (link("all_gather", 16, 8, bytes=_OUTSIDE), 0.5),
        (link("all_gather", 64, 8, bytes=8 * _OUTSIDE), 1),
    ],
)
def test_an_exchange_takes_as_long_as_its_narrowest_link(sent: dict, takes: float):
    assert seconds(links=(sent,)) == {"exchanges": pytest.approx(takes)}


def test_an_exchange_is_hidden_by_what_runs_between_its_start_and_its_wait():
    covered = {ELEMENTWISE: 0.25 * _MEMORY, MATMUL: 0.5 * 0.7 * 989e12}
    sent = link("all_to_all", 8, 1, bytes=_INSIDE, covered=covered)
    assert seconds(links=(sent,)) == {"exchanges": pytest.approx(0.25)}
    sent = link("all_to_all", 8, 1, bytes=_INSIDE, covered={ELEMENTWISE: 2 * _MEMORY})
    assert seconds(links=(sent,)) == {}


def test_fsdp_is_hidden_by_what_its_own_direction_computes():
    gather = link("all_gather", 8, 1, bytes=_INSIDE, region="fsdp", axis="edp")
    # The last reduction of all is called after the last node of the backward.
    reduction = gather | {"op": "reduce_scatter"}
    forward = part(ELEMENTWISE, bytes=1.5 * _MEMORY)
    backward = part(ELEMENTWISE, phase="backward", bytes=0.25 * _MEMORY)
    assert seconds(forward, links=(gather,)) == {"elementwise": 1.5}
    found = seconds(forward, backward, links=(gather, reduction))
    assert found == {"elementwise": 1.75, "fsdp": pytest.approx(0.75)}


def test_the_host_counts_as_far_as_it_is_slower():
    computes = part(ELEMENTWISE, bytes=0.5 * _MEMORY)
    found = seconds(computes, part(HOST, dispatches=200_000), waits=50)
    assert found == {"elementwise": 0.5, "host": pytest.approx(0.5 + 50 * 20e-6)}


def test_the_command_prints_files_side_by_side(tmp_path, capsys: pytest.CaptureFixture):
    found = {
        "tokens": 16,
        "num_microbatches": 1,
        "model_flops": {"products": H100.flops, "attention": 0.0},
        "waits": 0,
        "step": {"parts": [part(MATMUL, flops=0.7 * H100.flops)], "links": []},
    }
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    for path in paths:
        path.write_text(json.dumps({"a": found, "b": found}), encoding="utf-8")
    main([*map(str, paths), "--config", "b"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["seconds", "of", "a", "microbatch", "before", "after"]
    with pytest.raises(SystemExit, match=r"--config 'c' is to name one configuration"):
        main([str(paths[0]), "--config", "c"])


# --- attribution ---


def test_flops_of_products():
    x, w = torch.empty(6, 4), torch.empty(4, 10)
    assert flops_of("mm", [x, w]) == 2 * 6 * 4 * 10
    # What is added may be of another type: a sum in float32 of products in bfloat16.
    assert factors_of("addmm", [torch.empty(10), x, w]) == [x, w]
    offsets = torch.empty(3)
    # Rows with the matrix of their own expert; and the gradient of the matrices: each row once.
    assert flops_of("_grouped_mm", [x, torch.empty(3, 4, 10), offsets]) == 2 * 6 * 4 * 10
    assert flops_of("_grouped_mm", [x.T, torch.empty(6, 10), offsets]) == 2 * 6 * 4 * 10
    assert flops_of("bmm", [torch.empty(5, 6, 4), torch.empty(5, 4, 10)]) == 5 * 2 * 6 * 4 * 10
    assert flops_of("add", [x, x]) == 0
    heads = torch.empty(2, 8, 128, 64)
    # 2 x 8 heads, 128 x 128 / 2 pairs, 64 products for a score and 64 for values.
    assert attention_flops(heads, heads[:, :2], heads[:, :2]) == 16 * 8192 * 2 * 128


def test_flops_of_attention_over_rows_of_tokens():
    name, q_THC = "_flash_attention_forward", torch.empty(256, 8, 64)
    starts = torch.tensor([0, 128, 256])
    args = (q_THC, q_THC, q_THC, starts, starts, 128, 128, 0.0, True, False)
    # 256 tokens x 8 heads see 64 in the mean, in a window of 16 of them 15.
    whole = 2 * 256 * 8 * 64 * 128
    assert attention_flops_of(name, args, {"window_size_left": -1}) == whole
    found = attention_flops_of(name, args, {"window_size_left": 15})
    assert found == 2 * 256 * 8 * (16 - 1) * 128
    backward = (q_THC, *args[:3], q_THC, q_THC, *args[3:])
    assert attention_flops_of("_flash_attention_backward", backward, {}) == 2.5 * whole


def test_kinds():
    bf16, fp32 = torch.bfloat16, torch.float32
    assert [kind_of("mm", bf16), kind_of("mm", fp32), kind_of("_grouped_mm", bf16)] == [
        MATMUL,
        FLOAT32,
        GROUPED,
    ]
    assert kind_of("_scaled_grouped_mm", torch.float8_e4m3fn) == "float8 matmul"
    assert kind_of("_scaled_dot_product_flash_attention_backward", bf16) == ATTENTION
    assert {kind_of("index_put_"), kind_of("topk")} == {ROWS}
    assert {kind_of("mul"), kind_of("cat")} == {ELEMENTWISE}
    assert kind_of_kernel("titan_moe.ops.move_rows_triton") == ROWS
    assert kind_of_kernel("titan_moe.ops.gated_triton") == ELEMENTWISE


def test_bytes_of_picked_rows_are_not_those_of_the_whole_tensor():
    whole, index = torch.empty(1000, 4), torch.zeros(10, dtype=torch.int64)
    picked = whole[index]
    assert bytes_of("index", [whole, index], [picked]) == 2 * 160 + 80
    assert bytes_of("index_put_", [whole, index, picked], [whole]) == 2 * (160 + 80)
    # In place it is read and written, a copy is written alone.
    assert bytes_of("add_", [picked, picked.clone()], [picked]) == 3 * 160
    assert bytes_of("copy_", [picked, picked.clone()], [picked]) == 2 * 160


def test_phases_and_regions_of_a_recomputed_layer():
    where, seen = Whereabouts(), []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(tuple(where.now())[:2])
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(tuple(where.now())[:2])
            return grad

    def layer(x):
        with region("route"):
            x = Noted.apply(x)
        return Noted.apply(x).exp()

    x = torch.ones(3, requires_grad=True)
    with where.watching():
        y = checkpoint(layer, x, use_reentrant=False)
        with region("loss"):
            loss = Noted.apply(y).sum()
        loss.backward()
    assert seen == [
        ("forward", "route"),
        ("forward", "other"),
        ("forward", "loss"),
        ("backward", "loss"),
        ("recompute", "route"),
        ("recompute", "other"),
        ("backward", "other"),
        ("backward", "route"),
    ]


@torch.compile(backend="eager")
def compiled(function, x):
    return function(x)


def test_what_a_compiled_function_runs_is_known_and_its_backward_too():
    where, seen = Whereabouts(), []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (torch.ops.aten.sin.default, torch.ops.aten.cos.default):
                seen.append(where.now().compiled)
            return func(*args, **(kwargs or {}))

    # A sine's backward is a cosine. Beneath a mode Dynamo lets everything run.
    with where.watching(), Noting():
        x = torch.ones(3, requires_grad=True).sin()
        y = compiled(lambda x: torch.compiler.disable(torch.sin)(x.sin()), x)
        y.sum().backward()
    assert seen == [False, True, False, False, True, False]


def test_a_run_of_elementwise_operations_reads_and_writes_once():
    fusion = Fusion()
    moved: list[float] = []
    x = torch.ones(10)

    def run(y):
        z = y * 2
        fusion.add("here", [y], [z], moved.append)
        z.add_(x)
        fusion.add("here", [z, x], [z], moved.append)
        w = z.exp()
        fusion.add("here", [z], [w], moved.append)
        return w

    kept = run(torch.ones(10))
    fusion.close()
    # y and x are read, w is written; z was only ever inside.
    assert moved == [3 * 40]
    fusion.add("here", [kept], [kept], moved.append)
    other = kept + 1
    fusion.add("elsewhere", [kept], [other], moved.append)
    fusion.close()
    fusion.close()
    assert moved[1:] == [2 * 40, 2 * 40]


def test_tallies_add_up():
    a, b = Part("forward", "experts", MATMUL, "mm"), Link("forward", "experts", "ep", "send", 2, 1)
    few: Tally = {a: Work(kernels=2, flops=10), b: Work(bytes=4, covered={ROWS: 1.0})}
    many: Tally = {a: Work(kernels=3, flops=30), b: Work(bytes=4, covered={ROWS: 1.0})}
    assert added((many, 1), (few, -1)) == {a: Work(kernels=1, flops=20)}
    assert added((few, 1), (few, 2))[b] == Work(bytes=12, covered={ROWS: 3.0})
