"""float8 and compiled layers on CUDA, beside what they replace."""

import tempfile
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.router_cases import router_errors
from tests.support.tiny import batch_of, make_job, tiny_step
from titan_moe.ops.float8 import float8_grouped_mm, float8_linear
from titan_moe.ops.grouped_mm import grouped_mm_loop

STEPS = 6


def skip_without(capability: tuple[int, int]) -> None:
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability() < capability:
        pytest.skip(f"needs compute capability {capability}")


def float8_errors(what: str, rows: int = 1024, size: int = 512) -> list[float]:
    """Relative differences between float8 units and exact products: of y and of both gradients.

    Args:
        what: a recipe of `float8_linear`, or of experts "grouped" (row-wise) or "mxfp8".
    """
    experts = 8 if what in ("grouped", "mxfp8") else 1
    torch.manual_seed(0)
    x = torch.randn(rows, size, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(rows, 2 * size, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(experts, 2 * size, size, device="cuda", dtype=torch.bfloat16)
    ends = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * (rows // experts)

    def run(multiply: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        own_x, own_w = (each.clone().requires_grad_() for each in (x, w))
        y = multiply(own_x, own_w)
        y.backward(grad)
        assert own_x.grad is not None and own_w.grad is not None
        return [y, own_x.grad, own_w.grad]

    def in_float8(x: Tensor, w: Tensor) -> Tensor:
        if experts == 1:
            return float8_linear(what, emulate=False)(x, w[0])
        return float8_grouped_mm("rowwise" if what == "grouped" else what)(x, w, ends)

    exact = run(lambda x, w: grouped_mm_loop(x, w, ends))
    pairs = zip(run(in_float8), exact, strict=True)
    return [((ours - y).float().norm() / y.float().norm()).item() for ours, y in pairs]


def compiled_losses(*, enable: bool, float8: bool) -> tuple[list[float], list[int]]:
    """Losses of a few steps of a tiny model in bfloat16, and the graphs compiled after each."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    job = make_job(
        "qwen3",
        training={"dtype": "float32", "mixed_precision_param": "bfloat16", "local_batch_size": 8},
        compile={"enable": enable},
    )
    if float8:
        converters = ["quantize.linear.float8", "quantize.grouped_mm.float8"]
        job = job.with_values(model={"converters": converters})
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
        try:
            _, step = tiny_step(job, device="cuda:0")
            losses, graphs = [], []
            for number in range(STEPS):
                losses.append(step([batch_of(number, slice(8))]).loss)
                graphs.append(counters["stats"]["unique_graphs"])
        finally:
            dist.destroy_process_group()
    return losses, graphs


@pytest.mark.parametrize(
    "what, needs",
    [
        ("rowwise", (8, 9)),
        ("rowwise_with_gw_hp", (8, 9)),
        ("tensorwise", (8, 9)),
        ("grouped", (9, 0)),
        ("mxfp8", (10, 0)),
    ],
)
def test_float8_products_are_near_exact_ones(what: str, needs: tuple[int, int]):
    skip_without(needs)
    assert all(error < 0.1 for error in float8_errors(what))


@pytest.mark.parametrize("float8", [False, True])
def test_compiled_layers_train_alike_and_are_compiled_once(float8: bool):
    if float8:
        skip_without((9, 0))
    eager, _ = compiled_losses(enable=False, float8=float8)
    compiled, graphs = compiled_losses(enable=True, float8=float8)
    assert compiled == pytest.approx(eager, rel=2e-2)
    assert graphs[1] == graphs[-1]


def test_router_multiplies_bfloat16_and_adds_up_in_float32():
    logits, *grads = router_errors("cuda")
    assert logits < 1e-5 and max(grads) < 4e-3
