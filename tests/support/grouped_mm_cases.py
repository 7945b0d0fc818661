"""Cases of grouped_mm and of both of its gradients, against one float64 product per row."""

import torch

from titan_moe.ops.grouped_mm import grouped_mm

SIZES = {
    "even": ([5, 3, 8, 1], 0),
    "empty experts": ([0, 7, 0, 0, 9, 0], 0),
    "all rows on one expert": ([0, 0, 17], 0),
    "one row": ([0, 1, 0], 0),
    "tail": ([4, 0, 6], 5),
    "only a tail": ([0, 0], 4),
    "no rows": ([0, 0], 0),
}


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def slow_loop(x, w, grad_y, counts):
    """y, dx, dw in float64, one row at a time."""
    x, w, grad_y = x.double(), w.double(), grad_y.double()
    y, grad_x, grad_w = torch.zeros_like(grad_y), torch.zeros_like(x), torch.zeros_like(w)
    experts = [expert for expert, count in enumerate(counts) for _ in range(count)]
    for row, expert in enumerate(experts):
        y[row] = w[expert] @ x[row]
        grad_x[row] = grad_y[row] @ w[expert]
        grad_w[expert] += torch.outer(grad_y[row], x[row])
    return y, grad_x, grad_w


def check_against_the_slow_loop(dtype, shape, case, *, device="cpu"):
    """y and both gradients of one case, the rows past the last group poisoned with NaN."""
    counts, tail = SIZES[case]
    model_dim, hidden_dim = shape
    num_real = sum(counts)
    generator = torch.Generator().manual_seed(1)

    def draw(*size):
        return torch.randn(*size, dtype=torch.float64, generator=generator).to(device, dtype)

    x, grad_y = draw(num_real + tail, model_dim), draw(num_real + tail, hidden_dim)
    w = draw(len(counts), hidden_dim, model_dim).requires_grad_()
    x[num_real:], grad_y[num_real:] = torch.nan, torch.nan
    x.requires_grad_()
    offsets = torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)

    y = grouped_mm(x, w, offsets)
    y.backward(grad_y)

    assert y.shape == grad_y.shape
    assert y.dtype == dtype
    expected = slow_loop(x.detach(), w.detach(), grad_y, counts)
    actual = (y.detach(), x.grad, w.grad)
    for real, wanted, rows in zip(actual, expected, (num_real, num_real, len(counts)), strict=True):
        own, wanted = real[:rows].double(), wanted[:rows]
        bound = TOLERANCE[dtype] * wanted.abs().max() if rows else 0
        assert (own - wanted).abs().le(bound).all()  # False for NaN too.
