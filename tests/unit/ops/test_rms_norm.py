"""RMS norms on the CPU: torch's own bits, in fewer passes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.ops.rms_norm import rms_norm

_EPS = 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 48), (4, 64, 4, 32), (7,)], ids=str)
def test_results_and_gradients_have_the_bits_of_torchs(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(2, *shape).to(dtype)
    if len(shape) == 4:  # As heads' gradients come: the sequence inside of the heads.
        grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
    weight = (1 + 0.1 * torch.randn(shape[-1])).to(dtype)

    def run(norm: object) -> list[Tensor]:
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        y = norm(*leaves)  # type: ignore[operator]
        return [y, *torch.autograd.grad(y, leaves, grad)]

    found = run(lambda x, weight: rms_norm(x, weight, _EPS))
    expected = run(lambda x, weight: F.rms_norm(x, weight.shape, weight, _EPS))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype and torch.equal(ours, theirs)


def test_only_the_input_is_kept_for_the_backward() -> None:
    x = torch.randn(64, 128, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(128, dtype=torch.bfloat16, requires_grad=True)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, keep):
        rms_norm(x, weight, _EPS)
    assert sorted(tensor.numel() for tensor in kept) == [64, 128, 64 * 128]
    assert all(tensor.numel() == 64 or tensor.dtype == torch.bfloat16 for tensor in kept)
