"""Cases for rotations, and multiplication of complex numbers in float64 to compare with."""

from itertools import product

import torch
from torch import Tensor

from tests.support.gated_cases import stored
from titan_moe.ops.rotate import PAIRINGS, rotate

# (batch, tokens, heads, channels, pairs, first rotated channel): all channels rotate, the first
# ones, the last ones, some in between; odd numbers, one of each, several programs, none at all.
SIZES = [
    (2, 5, 3, 8, 4, 0),
    (2, 3, 2, 12, 3, 0),
    (1, 7, 3, 14, 4, 6),
    (2, 4, 1, 21, 5, 4),
    (1, 1, 1, 2, 1, 0),
    (3, 50, 4, 96, 32, 32),
    (2, 0, 3, 8, 4, 0),
]
DTYPES = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 5e-4}


def turned(x_BSHC: Tensor, angles_BSC: Tensor, pairing: str, first: int) -> Tensor:
    """Returns the rotation by its definition, one pair of channels after the other."""
    pairs, channels = angles_BSC.shape[-1], list(x_BSHC.unbind(-1))
    for i in range(pairs):
        a, b = (i, i + pairs) if pairing == "halves" else (2 * i, 2 * i + 1)
        turn = torch.polar(torch.ones_like(angles_BSC[..., i]), angles_BSC[..., i])[..., None]
        value = torch.complex(channels[first + a], channels[first + b]) * turn
        channels[first + a], channels[first + b] = value.real, value.imag
    return torch.stack(channels, dim=-1)


def check(dtype: torch.dtype, device: str = "cpu") -> None:
    """Compares values and gradients; plain torch does not store bfloat16 as the kernels do."""
    drawn = torch.Generator().manual_seed(0)
    for pairing, size, strided in product(PAIRINGS, SIZES, (False, True)):
        batch, tokens, heads, dim, pairs, first = size

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=drawn, dtype=torch.float64)

        # As the latent's channels beside others', and as a gradient of heads before tokens.
        x_BSHC = draw(batch, tokens, heads, dim + 3 * strided)[..., 3 * strided :].to(dtype)
        grad_BSHC = draw(batch, heads, tokens, dim).to(dtype).transpose(1, 2)
        x_BSHC, grad_BSHC = x_BSHC.to(device), grad_BSHC.to(device)
        angles_BSC = draw(batch, tokens, pairs)
        wide = torch.promote_types(dtype, torch.float32)
        cos_BSC, sin_BSC = (f(angles_BSC).to(wide).to(device) for f in (torch.cos, torch.sin))

        exact = x_BSHC.double().cpu().requires_grad_()
        expected = turned(exact, angles_BSC, pairing, first)
        expected.backward(grad_BSHC.double().cpu())
        leaf = x_BSHC.detach().requires_grad_()
        out = rotate(leaf, cos_BSC, sin_BSC, pairing, first)
        out.backward(grad_BSHC)
        for ours, theirs in ((out, expected), (leaf.grad, exact.grad)):
            assert ours is not None and theirs is not None and ours.dtype == dtype
            theirs = stored(theirs.detach().to(device), dtype).double()
            error, norm = (ours.double() - theirs).norm(), theirs.norm()
            assert error <= DTYPES[dtype] * norm, (pairing, size, strided, error / norm)


def check_kernels(device: str) -> None:
    for dtype in DTYPES:
        check(dtype, device)
