"""The parts of tensor parallelism, each against its whole in one process, in float64."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.support.operations import Operations
from tests.support.tiers import tiered
from tests.support.tiny import make_job, tiny_step
from titan_moe.distributed import tensor_parallel
from titan_moe.distributed.dtensor import local_part
from titan_moe.runtime.ranks import RankError, run_on_ranks

ROWS, SEQ_LEN, VOCABULARY, IGNORED = 2, 6, 24, -100


def logits_and_labels(scale: float):
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(ROWS, SEQ_LEN, VOCABULARY, generator=generator).double()
    labels = torch.randint(0, VOCABULARY, (ROWS, SEQ_LEN), generator=generator)
    labels[0, :4] = IGNORED
    return logits, labels


def cut_cross_entropy(scale: float, planted: bool = False):
    """This rank's share of the loss, and the gradient of its block of the vocabulary."""
    size, rank = dist.get_world_size(), dist.get_rank()
    logits, labels = logits_and_labels(scale)
    own = logits.flatten(0, 1).chunk(size, -1)[rank].clone()
    if planted:
        dist.all_reduce = lambda *args, **kwargs: None
    whole = tensor_parallel.VocabParallelCrossEntropy(dist.group.WORLD)
    loss, grad = whole(own, labels.flatten())
    return loss.item(), grad.view(ROWS, SEQ_LEN, -1)


def whole_cross_entropy(scale: float):
    logits, labels = logits_and_labels(scale)
    logits.requires_grad_()
    flat = logits.flatten(0, 1)
    loss = F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="sum")
    loss.backward()
    return loss.item(), logits.grad


@pytest.mark.parametrize("scale", [1.0, 1e3])
@pytest.mark.parametrize("world_size", tiered([2, 3], slow=[4], full=[8]))
def test_a_loss_cut_by_vocabulary_is_the_whole_loss(world_size: int, scale: float):
    loss, grad = whole_cross_entropy(scale)
    found = run_on_ranks(cut_cross_entropy, world_size, scale)
    shares, grads = zip(*found, strict=True)
    assert sum(shares) == pytest.approx(loss, rel=1e-13)
    torch.testing.assert_close(torch.cat(grads, -1), grad, rtol=1e-12, atol=1e-15)
    assert len(set(shares)) > 1, "each rank has a share of its own"


def test_a_loss_without_its_reductions_is_seen():
    _, grad = whole_cross_entropy(1.0)
    _, grads = zip(*run_on_ranks(cut_cross_entropy, 2, 1.0, True), strict=True)
    assert not torch.allclose(torch.cat(grads, -1), grad, rtol=1e-3)


def without_a_loss(label: int) -> list[bool]:
    own, labels = torch.zeros(3, VOCABULARY // 2).double(), torch.tensor([3, label, 23])
    _, grad = tensor_parallel.VocabParallelCrossEntropy(dist.group.WORLD)(own, labels)
    return grad.isnan().all(1).tolist()


def embed(token: int, times: int = 1) -> float:
    """Returns the sum of this rank's part of the gradient of each token's sum, in bfloat16."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = nn.Embedding(VOCABULARY, 2, dtype=torch.bfloat16)
    cut = tensor_parallel.VocabParallelEmbedding(whole, mesh, mesh.get_group())
    cut(torch.tensor([[3, token]]).repeat(1, times)).sum().backward()
    return local_part(cut.weight.grad).sum().item()


def test_a_cut_embedding_adds_up_a_token_that_is_frequent():
    assert run_on_ranks(embed, 2, 23, 4096) == [2 * 4096, 2 * 4096]


@pytest.mark.parametrize("number", [VOCABULARY, -1])
def test_a_number_outside_of_a_cut_vocabulary_is_never_silent(number: int):
    assert run_on_ranks(without_a_loss, 2, number) == [[False, True, False]] * 2
    with pytest.raises(RankError, match="IndexError"):
        run_on_ranks(embed, 2, number)


def cut_norm(dtype: torch.dtype, planted: bool = False):
    """This rank's channels of a norm over all of them, and the gradients of input and weight."""
    size, rank = dist.get_world_size(), dist.get_rank()
    if planted:
        tensor_parallel.sum_over_ranks = lambda x, group: x * size
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    norm, x, grad = norm_and_inputs(dtype)
    weight = norm.weight.detach().chunk(size)[rank]
    cut = tensor_parallel.ColumnParallelNorm(norm, mesh, mesh.get_group())
    cut.weight.data.to_local().copy_(weight)
    own = x.chunk(size, -1)[rank].clone().requires_grad_()
    out = cut(own)
    out.backward(grad.chunk(size, -1)[rank])
    return out.detach(), own.grad, cut.weight.grad.to_local()


def norm_and_inputs(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    x, grad = torch.randn(2, ROWS, SEQ_LEN, 24, generator=generator).to(dtype)
    norm = torch.nn.RMSNorm(24, eps=0.01).to(dtype)
    torch.nn.init.normal_(norm.weight, generator=generator)
    return norm, x * torch.arange(24) / 12, grad


@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-13), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("planted", [False, True])
def test_a_norm_over_the_channels_of_all_ranks_is_the_whole_norm(
    dtype: torch.dtype, bound: float, planted: bool
):
    norm, x, grad = norm_and_inputs(dtype)
    x.requires_grad_()
    out = norm(x)
    out.backward(grad)
    found = zip(*run_on_ranks(cut_norm, 2, dtype, planted), strict=True)
    for parts, whole in zip(found, (out, x.grad, norm.weight.grad), strict=True):
        error = (torch.cat(parts, -1) - whole).norm() / whole.norm()
        assert error > 0.1 if planted else error < bound


def widest_logits(world_size: int) -> int:
    """The most logits a token has in anything that is computed after the output layer."""
    from titan_moe.distributed.execution import LocalBatch
    from titan_moe.models.registry import model_config

    job = make_job("qwen3", parallelism={"tensor_parallel_degree": world_size})
    config = model_config("qwen3", "gate")
    sharded, _ = tiny_step(job, config)
    tokens = torch.arange(32).view(2, 16)
    with Operations() as seen:
        sharded.execution.accumulate(
            LocalBatch(tokens, tokens, torch.zeros_like(tokens), tokens % 16)
        )
    # Gathered weights are [V/tp, D]; D is none of these widths.
    widths = {config.vocab_size, config.vocab_size // world_size}
    return max(shape[-1] for shape in seen.shapes if shape and shape[-1] in widths)


@pytest.mark.parametrize("world_size", tiered([1, 2], slow=[4]))
def test_no_rank_holds_whole_logits(world_size: int):
    widest = run_on_ranks(widest_logits, world_size, world_size)
    assert widest == [272 // world_size] * world_size
