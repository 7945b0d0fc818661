"""What a stage of a pipeline holds of a model, and how it is gathered.

Apart from the pipeline itself, which no other run needs and whose import of torch's schedules takes
half a second and 100 MB.
"""

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor, nn

_Model = TypeVar("_Model", bound=nn.Module)

_ENDS = ("tok_embeddings", "norm", "output")


def keep_only(model: _Model, names: Sequence[str]) -> _Model:
    """Turn a whole decoder into the stage of these modules, in place; returns it.

    What is missing at an end passes its input on, so that the decoder's forward stays as it is and
    takes the stream where the embedding is missing. Layers keep their numbers. Rotations stay;
    multi-token prediction stays with the output layer.

    Args:
        names: of `config.pipeline.module_names`.
    """
    layers = model.get_submodule("layers")
    assert isinstance(layers, nn.ModuleDict)
    known = {*_ENDS, *(f"layers.{layer}" for layer in layers)}
    assert set(names) <= known, f"no such modules: {sorted(set(names) - known)}"
    for end in _ENDS:
        if end not in names:
            setattr(model, end, _PassOn())
    for layer in list(layers):
        if f"layers.{layer}" not in names:
            del layers[layer]
    if "output" not in names:
        setattr(model, "mtp", None)  # noqa: B010  A module's attribute, to mypy.
    return model


def stage_units(part: nn.Module) -> list[list[nn.Module]]:
    """A stage's FSDP units in forward order; a final norm stays with the root.

    In two chains, the second that of multi-token prediction, which an evaluation leaves out.
    """
    ends = [part.get_submodule(name) for name in ("tok_embeddings", "output")]
    layers = list(part.get_submodule("layers").children())
    units = [ends[0], *layers, ends[1]]
    main = [unit for unit in units if not isinstance(unit, nn.Identity)]
    mtp = getattr(part, "mtp", None)
    return [main] if mtp is None else [main, list(mtp.layers.children())]


class _PassOn(nn.Identity):
    """Where a stage has no such module: its first argument."""

    def forward(self, input: Tensor, *_: object) -> Tensor:
        return input
