"""The parts of tensor parallelism, each against its whole in one process, in float64."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.support.tiers import tiered
from titan_moe.runtime.ranks import run_on_ranks

ROWS, SEQ_LEN, VOCABULARY, IGNORED = 2, 6, 24, -100


def logits_and_labels(scale: float):
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(ROWS, SEQ_LEN, VOCABULARY, generator=generator).double()
    labels = torch.randint(0, VOCABULARY, (ROWS, SEQ_LEN), generator=generator)
    labels[0, :4] = IGNORED
    return logits, labels


def cut_cross_entropy(scale: float, planted: bool = False):
    """This rank's share of the loss, and the gradient of its block of the vocabulary."""
    from titan_moe.distributed.tensor_parallel import VocabParallelCrossEntropy

    size, rank = dist.get_world_size(), dist.get_rank()
    logits, labels = logits_and_labels(scale)
    own = logits.flatten(0, 1).chunk(size, -1)[rank].clone()
    if planted:
        dist.all_reduce = lambda *args, **kwargs: None
    whole = VocabParallelCrossEntropy(dist.group.WORLD)
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


def widest_logits(world_size: int) -> int:
    """The most logits a token has in anything that is computed after the output layer."""
    from titan_moe.config.job_config import JobConfig
    from titan_moe.distributed.execution import LocalBatch
    from titan_moe.distributed.parallelize import build_sharded_model
    from titan_moe.models.registry import model_config

    job = JobConfig.model_validate(
        {
            "model": {"name": "qwen3", "flavor": "gate"},
            "training": {"dtype": "float64", "seq_len": 16},
            "parallelism": {"tensor_parallel_degree": world_size},
        }
    )
    config = model_config("qwen3", "gate")
    sharded = build_sharded_model(job, config, device=torch.device("cpu"), world_size=world_size)
    tokens = torch.arange(32).view(2, 16)
    seen: list[torch.Size] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            outputs = result if isinstance(result, (tuple, list)) else [result]
            seen.extend(x.shape for x in outputs if isinstance(x, torch.Tensor))
            return result

    with Watch():
        sharded.execution.train(LocalBatch(tokens, tokens, torch.zeros_like(tokens), tokens % 16))
    # Gathered weights are [V/tp, D]; D is none of these widths.
    widths = {config.vocab_size, config.vocab_size // world_size}
    return max(shape[-1] for shape in seen if shape and shape[-1] in widths)


@pytest.mark.parametrize("world_size", tiered([1, 2], slow=[4]))
def test_no_rank_holds_whole_logits(world_size: int):
    vocab_size = 272
    assert (
        run_on_ranks(widest_logits, world_size, world_size)
        == [vocab_size // world_size] * world_size
    )
