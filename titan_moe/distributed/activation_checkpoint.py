"""Recompute a block's activations in the backward instead of keeping them.

The recomputation replays the routing of the forward pass: it asks no router again (rounding could
send a token elsewhere), counts no token again, and waits for no split sizes again.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from titan_moe.moe.layer import Assignment, MoE


def apply_activation_checkpoint(blocks: list[nn.Module], every: int) -> None:
    """Recompute every `every`-th block, beginning with the first; 0 recomputes none."""
    for block in blocks[::every] if every else []:
        block.forward = _recomputed(block)  # type: ignore[method-assign]


def _recomputed(block: nn.Module) -> Callable[..., Tensor]:
    compute = block.forward
    moe_layers = [module for module in block.modules() if isinstance(module, MoE)]

    def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
        taken: list[Assignment] = []
        return _recording(moe_layers, taken), _replaying(moe_layers, taken)

    def forward(*args: object) -> Tensor:
        # No random numbers are drawn inside a block, so there is no generator state to keep.
        return checkpoint(
            compute, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )

    return forward


@contextmanager
def _recording(moe_layers: list[MoE], taken: list[Assignment]) -> Iterator[None]:
    def record(moe: MoE) -> Callable[[Tensor], Assignment]:
        def assign(scores_TE: Tensor) -> Assignment:
            taken.append(moe.decide(scores_TE))
            return taken[-1]

        return assign

    with _assigning(moe_layers, record):
        yield


@contextmanager
def _replaying(moe_layers: list[MoE], taken: list[Assignment]) -> Iterator[None]:
    replay = iter(taken)

    def next_taken(moe: MoE) -> Callable[[Tensor], Assignment]:
        return lambda scores_TE: next(replay)

    with _assigning(moe_layers, next_taken):
        yield


@contextmanager
def _assigning(
    moe_layers: list[MoE], make: Callable[[MoE], Callable[[Tensor], Assignment]]
) -> Iterator[None]:
    for moe in moe_layers:
        moe.assign = make(moe)
    try:
        yield
    finally:
        for moe in moe_layers:
            moe.assign = moe.decide
