"""As planted_bugs.py: mistakes in asynchronous tensor parallelism."""

from tests.support.planting import Bug

_ASYNC = "titan_moe.distributed.async_tensor_parallel"
_SPARED = ("loss *", "counts *", "num_targets *", "gradient output.weight")


ASYNC_BUGS: dict[str, Bug] = {
    "gradients through each other's weights": Bug(
        f"{_ASYNC}:_GatheredProducts.backward",
        "torch.cat(weights_FD)",
        "torch.cat(weights_FD[::-1])",
        caught_on="tp=2",
        named=("gradient layers.*",),
        spared=_SPARED,
    ),
    "a weight's gradient from a rank's own part": Bug(
        f"{_ASYNC}:_ScatteredProduct.backward",
        "return grad_x, gathered.flatten(0, -2).t() @ x.flatten(0, -2), None",
        "return grad_x, gathered.flatten(0, -2).t() @ x.roll(1, -2).flatten(0, -2), None",
        caught_on="tp=2",
        named=("gradient layers.*.w*.weight*",),
        spared=(*_SPARED, "gradient *norm.weight", "gradient *router*", "gradient *.w1.weight"),
    ),
    "a bias added before the sum": Bug(
        "titan_moe.distributed.tensor_parallel:AsyncRowParallelLinear.forward",
        "return y if self.bias is None else y + self.bias",
        "return y if self.bias is None else y + self.bias * self.group.size()",
        caught_on="tp=2",
        named=("loss*",),
        spared=("num_targets *",),
    ),
}
