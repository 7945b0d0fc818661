"""The normalisation that all families share."""

from torch import Tensor, nn

from titan_moe.ops.rms_norm import rms_norm


class RMSNorm(nn.RMSNorm):
    """torch's, by `ops.rms_norm`."""

    def __init__(self, dim: int, *, eps: float) -> None:
        super().__init__(dim, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps)
