"""Operations that torch refuses on CUDA under `torch.use_deterministic_algorithms(True)`.

The list is that of the documentation of torch 2.13 and of the places where the libraries of 2.11
and 2.14 call alertNotDeterministic: both versions have the same ones. A float cumsum raises in
neither, whatever the documentation says, but a compiled one adds in an order of its own. The
backwards of attention are left out: they are deterministic unless torch is told to warn only.
"""

from collections.abc import Callable, Mapping
from typing import Any

from titan_moe.simulate.comm_counter import arguments_of

_REFUSED = {
    "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward", "_ctc_loss_backward",
    "_upsample_bicubic2d_aa_backward", "_upsample_bilinear2d_aa_backward",
    "adaptive_max_pool2d_backward", "avg_pool3d_backward", "cudnn_grid_sampler_backward",
    "fractional_max_pool2d_backward", "fractional_max_pool3d_backward", "grid_sampler_2d_backward",
    "grid_sampler_3d_backward", "index_reduce", "max_pool3d_with_indices_backward", "max_unpool2d",
    "max_unpool3d", "nll_loss2d_forward", "put", "reflection_pad1d_backward",
    "reflection_pad2d_backward", "reflection_pad3d_backward", "replication_pad1d_backward",
    "replication_pad2d_backward", "replication_pad3d_backward", "upsample_bicubic2d_backward",
    "upsample_bilinear2d_backward", "upsample_linear1d_backward", "upsample_trilinear3d_backward",
}  # fmt: skip


def _is_float(x: Mapping[str, Any]) -> bool:
    dtype = x.get("dtype") or x["self"].dtype
    return dtype.is_floating_point or dtype.is_complex


_REFUSED_IF: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "_embedding_bag_dense_backward": lambda x: x["mode"] == 2,  # The largest.
    "bincount": lambda x: x.get("weights") is not None,
    "cumsum": _is_float,
    "histc": _is_float,
    "median": lambda x: "dim" in x,
    "nanmedian": lambda x: "dim" in x,
    "scatter": lambda x: x.get("reduce") == "multiply",
    "scatter_reduce": lambda x: x["reduce"] == "prod",
}
"""Operations that torch refuses for some arguments, by name."""


def is_refused(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a dispatched operation has no deterministic kernel on CUDA."""
    name = func.__name__.partition(".")[0].rstrip("_")
    if name in _REFUSED:
        return True
    condition = _REFUSED_IF.get(name)
    return condition is not None and condition({**arguments_of(func, args), **kwargs})
