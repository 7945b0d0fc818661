"""The reference of parity: tiny random models of `transformers`, in float32 or float64.

`transformers` is a test dependency, and takes two seconds to import: the first model does.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@cache
def _transformers() -> ModuleType:
    """Imports the package for the first model, two seconds, and silences it."""
    import transformers
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()  # It doubts Scout's own rotary scaling, among others.
    return transformers


class _Lifted(TorchFunctionMode):
    """Turns requests for float32 into requests for float64.

    The models cast norms, scores and angles to float32 whatever their own type: without this a
    float64 model of `transformers` is right to seven digits.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        kwargs = {
            key: torch.float64 if value is torch.float32 else value
            for key, value in (kwargs or {}).items()
        }
        return func(*args, **kwargs)


class FirstOfEqual(TorchFunctionMode):
    """Lets a tensor's `topk` take the first of equal values: many scores of an indexer are 0."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is not Tensor.topk:
            return func(*args, **(kwargs or {}))
        scores, top_k = args
        ordered = scores.sort(dim=-1, descending=True, stable=True)
        return type(ordered)((ordered.values[..., :top_k], ordered.indices[..., :top_k]))


@contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Makes new tensors and explicit casts have the type `dtype`: float32 or float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _Lifted() if dtype == torch.float64 else nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)


def their_model(folder: Path) -> Any:
    """Returns the model that transformers loads of a folder, in float32 and evaluation. Raises
    ValueError for a model that it does not know."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    auto = _transformers().AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32, **eager).eval()


class TextWithOutput(nn.Module):
    """Adds an output layer to Step-3.7's text model, which transformers has inside of others
    alone."""

    def __init__(self, config: Any, **how: str) -> None:
        super().__init__()
        inside = _transformers().models.step3p7.modeling_step3p7
        self.model = inside.Step3p7TextModel._from_config(config, **how)
        # Its row would have no gradient, and its number is drawn among the others.
        self.model.embed_tokens.padding_idx = None
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.config = config


class Oracle(nn.Module):
    """A model of `transformers` with its multi-token prediction layers.

    Args:
        settings: a config.json, `model_type` among it.
        seed: of the weights: norms around 1, biases around 0, matrices that keep the scale of what
            they multiply, recurrent states that last for some tokens, nothing at its neutral value.
        expert_scale: a factor on the experts' first matrices, to reach limits of activations.
    """

    def __init__(self, settings: dict[str, Any], seed: int, expert_scale: float = 1.0) -> None:
        super().__init__()
        theirs = _transformers()
        config = theirs.AutoConfig.for_model(**settings)
        config._experts_implementation = "eager"
        auto = theirs.AutoModelForCausalLM
        self.has_class = type(config) in auto._model_mapping
        make = auto.from_config if self.has_class else TextWithOutput
        self.model: Any = make(config, attn_implementation="eager")
        depths = settings.get("num_nextn_predict_layers", 0)
        mtp_model = theirs.modeling_layers.MtpModel
        self.mtp = mtp_model(self.model, depths) if depths else None
        self.num_layers = config.num_hidden_layers
        self.cap = settings.get("final_logit_softcapping")
        self.eval()
        _fill(self.tensors(), seed, expert_scale)

    def tensors(self) -> dict[str, Tensor]:
        """Returns parameters and routing biases by their published names."""
        found = dict(self.model.named_parameters())
        kept = ("correction_bias", "layer_scalar", "tid2eid")
        found |= {n: b for n, b in self.model.named_buffers() if n.endswith(kept)}
        if self.mtp is not None:
            own = [*self.mtp.layers.named_parameters(), *self.mtp.layers.named_buffers()]
            found |= {self._mtp_name(name): tensor for name, tensor in own}
        return found

    def _mtp_name(self, name: str) -> str:
        depth, rest = name.split(".", 1)
        rest = rest.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        return f"model.layers.{self.num_layers + int(depth)}.{rest}"

    def forward(self, tokens_BS: Tensor, ahead_BKS: Tensor | None) -> list[Tensor]:
        """Logits [B, S, V], then those of each multi-token prediction layer, which reads the tokens
        k positions on: ahead_BKS."""
        with FirstOfEqual():
            hidden = [self.model.model(tokens_BS, use_cache=False).last_hidden_state]
            positions_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
            for depth, ahead_BS in enumerate([] if ahead_BKS is None else ahead_BKS.unbind(1)):
                assert self.mtp is not None
                more = self.mtp.forward_layer(
                    depth, hidden[-1], positions_BS, None, input_ids=ahead_BS
                )
                hidden.append(more)
            logits = [self.model.lm_head(hidden_BSD) for hidden_BSD in hidden]
            return [x if self.cap is None else (x / self.cap).tanh() * self.cap for x in logits]


@torch.no_grad()
def _fill(tensors: dict[str, Tensor], seed: int, expert_scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Qwen3-Next's norms multiply by 1 + weight.
    zero_centred = any("linear_attn" in name or "g_proj" in name for name in tensors)
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator)
        if "tid2eid" in name:  # Distinct experts of each token id.
            experts = len(tensors[name.replace("tid2eid", "weight")])
            drawn = torch.rand(len(tensor), experts, generator=generator).argsort(1)
            drawn = drawn[:, : tensor.shape[1]]
        elif "norm" in name or "scal" in name:
            drawn = (0 if zero_centred and "linear_attn" not in name else 1) + 0.1 * noise
        elif "A_log" in name:
            drawn = noise - 2
        elif name.endswith("bias"):
            drawn = 0.1 * noise
        elif tensor.ndim == 1 or "embed" in name:
            drawn = noise
        else:
            drawn = noise * min(tensor.shape[-2:]) ** -0.5
            if "gate_up_proj" in name:
                drawn = drawn * expert_scale
        tensor.copy_(drawn.to(tensor.dtype))
