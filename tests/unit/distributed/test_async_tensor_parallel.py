"""Products that gather or add up over tp: torch's signatures, and what the emulations refuse."""

import pytest
import torch
from torch import Tensor

from titan_moe.config.errors import ConfigError
from titan_moe.config.parse import load_job
from titan_moe.distributed import async_tensor_parallel, policies
from titan_moe.distributed.async_tensor_parallel import (
    SCHEMAS,
    emulated_all_gather_matmul,
    emulated_matmul_reduce_scatter,
    open_workspace,
)
from titan_moe.models.hf import model_of_job
from titan_moe.runtime.ranks import run_on_ranks

GPU = torch.device("cuda", 0)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="another form is refused at start")
@pytest.mark.parametrize("name", SCHEMAS)
def test_torch_has_the_operation_in_the_form_that_is_emulated(name: str) -> None:
    import torch.distributed._symmetric_memory

    assert str(getattr(torch.ops.symm_mem, name).default._schema) == SCHEMAS[name]


def both_ways(shape: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """What torch's own code for CUDA returns, its copies between GPUs replaced by collectives, and
    the emulation."""
    from unittest import mock

    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm_mem

    group = dist.group.WORLD
    generator = torch.Generator().manual_seed(group.rank())

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    def gather(shard, consume, gathered, group_name, needed=True):
        dist.all_gather_into_tensor(gathered, shard)
        for rank, part in enumerate(gathered.chunk(group.size())):
            consume(part, rank)

    def scatter(produce, output, group_name, out_chunk_dim=0):
        made = torch.empty_like(output)
        for rank, part in enumerate(made.chunk(group.size())):
            produce(rank, part)
        dist.all_to_all_single(output, made)

    mm, dim, name = torch.ops.aten.mm.out, len(shape) - 2, group.group_name
    x, matrices = draw(*shape), [draw(shape[-1], 5), draw(3, shape[-1]).t()]
    x = x.movedim(dim, 0).contiguous().movedim(0, dim)
    with (
        mock.patch.object(symm_mem, "_pipelined_all_gather_and_consume", gather),
        mock.patch.object(symm_mem, "_pipelined_produce_and_all2all", scatter),
    ):
        types = [torch.float64] * 2
        whole, products = symm_mem._fused_all_gather_matmul_impl(
            mm, x, matrices, None, [{}, {}], types, dim, name, True
        )
        part = symm_mem._fused_matmul_reduce_scatter_impl(
            mm, whole, matrices[0], {}, torch.float64, "sum", dim, name
        )
    emulated, emulated_products = emulated_all_gather_matmul(x, matrices, dim, name)
    nothing, _ = emulated_all_gather_matmul(x, matrices, dim, name, return_A=False)
    assert nothing is None and emulated is not None
    pairs = [(whole, emulated), *zip(products, emulated_products, strict=True)]
    return [*pairs, (part, emulated_matmul_reduce_scatter(whole, matrices[0], "sum", dim, name))]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="its functions may be called otherwise")
@pytest.mark.parametrize("shape", [(6, 4), (3, 6, 4)])
def test_the_emulation_has_the_values_and_the_strides_of_torch(shape: tuple[int, ...]) -> None:
    for pairs in run_on_ranks(both_ways, 2, shape):
        for torchs, ours in pairs:
            torch.testing.assert_close(ours, torchs, check_stride=True, rtol=1e-12, atol=1e-12)


X = torch.zeros(2, 4, 3)
MATRIX = torch.zeros(3, 5)


@pytest.mark.parametrize(
    "x, matrices, dim, said",
    [
        (X, [MATRIX], 0, "the last dim but one"),
        (X, [MATRIX, MATRIX[:2]], 1, "no matrix"),
        (X, [MATRIX.double()], 1, "two types"),
        (torch.zeros(4, 6)[:, :3], [MATRIX], 0, "not contiguous"),
    ],
)
def test_arguments_that_torch_takes_for_granted(x, matrices, dim: int, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        emulated_all_gather_matmul(x, matrices, dim, "a")
    if said != "not contiguous":
        with pytest.raises(AssertionError, match=said):
            emulated_matmul_reduce_scatter(x, matrices[-1], "sum", dim, "a")


def test_sums_alone() -> None:
    with pytest.raises(AssertionError, match="another reduction"):
        emulated_matmul_reduce_scatter(X, MATRIX, "avg", 1, "a")


class Pair:
    group_name = "a"
    size = staticmethod(lambda: 2)


def test_a_gpu_without_the_means_is_told_what_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed._symmetric_memory as symm_mem

    asked = []
    monkeypatch.setattr(symm_mem, "get_symm_mem_workspace", lambda *args: asked.append(args))
    open_workspace(Pair(), 64, torch.device("cpu"))
    assert asked == []
    open_workspace(Pair(), 64, GPU)
    assert asked == [("a", 64)]

    def without_nvlink(*args: object) -> None:
        raise RuntimeError("no peer access\nException raised from ...")

    monkeypatch.setattr(symm_mem, "get_symm_mem_workspace", without_nvlink)
    with pytest.raises(ConfigError, match=r"2 ranks of tp .*memory \(no peer access\): keep"):
        open_workspace(Pair(), 64, GPU)
    monkeypatch.setitem(async_tensor_parallel.SCHEMAS, "fused_matmul_reduce_scatter", "another")
    with pytest.raises(ConfigError, match="no symm_mem::fused_matmul_reduce_scatter of the form"):
        open_workspace(Pair(), 64, GPU)


class OnePair:
    group = staticmethod(lambda axis: axis)


@pytest.mark.parametrize("wanted", [True, False])
def test_the_memory_is_asked_for_before_the_first_step(
    wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(policies, "open_workspace", lambda *args: asked.append(args))
    monkeypatch.setattr(policies, "open_symmetric_memory", lambda *args: None)
    words = "--training.local_batch_size 3 --training.seq_len 32 --validation.enable false"
    words += " --parallelism.tensor_parallel_degree 2"
    words += f" --parallelism.enable_async_tensor_parallel {str(wanted).lower()}"
    job, config = load_job(words.split()), model_of_job(load_job([]).model)
    policies.open_buffers([], job, config, OnePair(), GPU)
    assert asked == [("tp", 2 * 3 * 16 * config.dim * 2, GPU)] * wanted
