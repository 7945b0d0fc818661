"""Compares our models with those of `transformers`, on tiny random weights.

One case: a model of `transformers` is drawn and saved, its folder is read into our plain decoder,
and on random tokens the logits, the gradient of every weight and the losses of three AdamW steps
are compared, in float32 or float64. In float32 the trained model is exported too, and what
transformers loads of that compared again. Differences are norms relative to theirs, tensor by
tensor. Their gradients are always float64's: in float32, recurrent models of transformers are up to
1.1e-5 off their own in float64, which says nothing of ours.

Cases are tiny config.json files in cases.json: a family's base is its plain case; each option names
the settings that differ. The borders of YaRN's blended channels lie inside a head of 8 channels,
between two of them. As many experts as groups would never be limited by the groups of their best.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from titan_moe.checkpoint.hf.folder import HFFolder
from titan_moe.checkpoint.hf.read import HFSource, Source, load_alone
from titan_moe.checkpoint.hf.write import export
from titan_moe.data.batch import IGNORE_INDEX, Batch
from titan_moe.distributed.execution import LocalBatch
from titan_moe.models.attention import plain_core
from titan_moe.models.config import ModelConfig, tied_weights
from titan_moe.models.decoder import Decoder
from titan_moe.models.hf import HFModel, model_of
from titan_moe.runtime.errors import RunError, reason
from titan_moe.training.capture.hooks import choice_margins
from titan_moe.training.train_step import look_ahead
from titan_moe.verify.gradients.compare import module_norms, worst
from titan_moe.verify.parity.oracle import FirstOfEqual, Oracle, computing_in, their_model

BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-10}
NUM_STEPS = 3
NUM_SEQUENCES, SEQ_LEN = 2, 40
SMALLEST_MARGIN = 1e-5
"""Scores nearer to each other than this may be ranked differently by two right computations."""
EXPORT_BOUND = 1e-4
"""Largest difference of the logits of an exported folder that counts as equal."""
_NUM_TOKENS, _DRAWS = 16, 20
_LEARNING_RATE = 1e-3


@dataclass(frozen=True, eq=False)
class ParityCase:
    """A tiny config.json of one family with one option set."""

    family: str
    option: str
    settings: dict[str, Any]
    """A config.json of transformers 5, which writes `rope_parameters`."""
    expert_scale: float = 1.0
    """A factor on the experts' first matrices, to reach the limits of their activation."""
    zero_gradients: tuple[str, ...] = ()
    """Weights of ours whose gradient is nothing but rounding: its exact value is zero. Without
    positions a bias of all keys moves each query's scores alike."""

    def __str__(self) -> str:
        return f"{self.family}: {self.option}"


def cases() -> Iterator[ParityCase]:
    """Yields all cases, a family's plain one first."""
    text = (files("titan_moe.verify.parity") / "cases.json").read_text(encoding="utf-8")
    for family, table in json.loads(text).items():
        for option, more in table["options"].items():
            settings = table["base"] | more.pop("settings", {})
            yield ParityCase(family, option, settings, **more)


@dataclass(frozen=True)
class ParityResult:
    """Differences in one case, with one seed, in one type."""

    logits: float
    gradient: float
    """The largest difference of a parameter's gradient; of a tied weight, the sum's."""
    gradient_of: str
    """Our name of the parameter with that difference."""
    losses: float
    """The largest difference of the steps."""
    exported: float | None
    """The difference of the logits after the steps and those of the export; float32 only, and of
    models that transformers loads alone."""
    margin: float
    """The smallest distance between a chosen expert's score and a rejected one's."""

    @property
    def worst(self) -> float:
        """The largest of all differences."""
        exported = [] if self.exported is None else [self.exported]
        return worst([self.logits, self.gradient, self.losses, *exported])


def compare(case: ParityCase, seed: int, dtype: torch.dtype) -> ParityResult:
    """Run one case in both implementations. Takes the first seed from `seed` on, in steps of 1000,
    whose routing has no near-ties."""
    for attempt in range(20):
        difference = _compare(case, seed + 1000 * attempt, dtype)
        if not difference.margin <= SMALLEST_MARGIN:  # NaN shows in the logits.
            return difference
    raise AssertionError(f"{case}: no seed without near-ties in the routing")


def _compare(case: ParityCase, seed: int, dtype: torch.dtype) -> ParityResult:
    with computing_in(dtype):
        oracle = Oracle(case.settings, seed, case.expert_scale)
        found, model = _ours(oracle)
        batch = _batch(case, seed, found.config.num_mtp_layers)
        their_logits = [x.detach() for x in oracle(batch.tokens_BS, batch.ahead_tokens_BKS)]
        theirs = _their_gradients(deepcopy(oracle).double(), found, batch)
        their_losses = list(_steps(oracle, lambda: _their_loss(oracle, found.config, batch)))
    assert all(parameter.dtype == dtype for parameter in model.parameters())
    margins: list[float] = []
    watch_margins(model, margins)
    model.train()
    our_logits = _our_logits(model, batch)
    our_losses: list[float] = []
    ours: dict[str, Tensor] = {}
    for loss in _steps(model, lambda: model(batch.tokens_BS, **batch.beside_tokens())):
        our_losses.append(loss)
        gradients = joined_gradients(model, found.config)
        ours = ours or {name: gradient.clone() for name, gradient in gradients.items()}
    assert theirs.keys() == ours.keys()
    exports = dtype == torch.float32 and oracle.has_class
    gradient, gradient_of = worst_of(_gradient_distances(ours, theirs, case))
    return ParityResult(
        logits=worst(distance(a, b) for a, b in zip(our_logits, their_logits, strict=True)),
        gradient=gradient,
        gradient_of=gradient_of,
        losses=worst(abs(a - b) / abs(b) for a, b in zip(our_losses, their_losses, strict=True)),
        exported=_export_distance(model, found, batch) if exports else None,
        margin=min(margins, default=float("inf")),
    )


def _ours(oracle: Oracle) -> tuple[HFModel, Decoder]:
    """Our decoder with the weights of their folder, as config.json and tensors describe it."""
    with TemporaryDirectory() as folder:
        if oracle.mtp is None and oracle.has_class:
            oracle.model.save_pretrained(folder)
        else:
            # Theirs saves no multi-token prediction: written as published, beside the rest.
            _write(oracle, oracle.tensors(), folder)
        found = model_of(Path(folder))
        model = Decoder(found.config, plain_core(found.config, mask_documents=True))
        load_folder(model, found, Path(folder))
    for name, parameter in model.named_parameters():
        # Theirs are never trained.
        parameter.requires_grad_(".indexer." not in name)
    return found, model


def _write(oracle: Oracle, tensors: Mapping[str, Tensor], folder: str) -> None:
    """Writes tensors under the oracle's published names, beside its config.json."""
    oracle.model.config.save_pretrained(folder)
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, Path(folder, "model.safetensors"))


def load_folder(model: Decoder, found: HFModel, folder: Path) -> None:
    """Imports a folder in one process, as production does; no parameter may be left out."""
    tensors = _tensors(model)
    source = HFSource(HFFolder(folder), found)
    source.fill(tensors)
    missing = {name for name, _ in model.named_parameters()} - source.found.keys()
    assert not missing, f"not filled: {missing}"


def _tensors(model: Decoder) -> dict[str, Tensor]:
    """Parameters, routing biases and layers' scales."""
    kept = ("expert_bias", ".scale", ".table")
    biases = {name: b for name, b in model.named_buffers() if name.endswith(kept)}
    return dict(model.named_parameters()) | biases


def _batch(case: ParityCase, seed: int, depths: int) -> LocalBatch:
    """Returns sequences of one document each."""
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_SEQUENCES, SEQ_LEN + 1)
    tokens = torch.randint(0, case.settings["vocab_size"], shape, generator=generator)
    labels_BS = tokens[:, 1:].clone()
    labels_BS[0, :5] = IGNORE_INDEX
    batch = Batch(tokens[:, :-1], labels_BS, torch.zeros_like(labels_BS), [])
    ahead = look_ahead(batch, depths) if depths else (None, None)
    positions_BS = torch.arange(SEQ_LEN).expand_as(labels_BS)
    return LocalBatch(batch.tokens_BS, labels_BS, batch.documents_BS, positions_BS, *ahead)


def _steps(model: nn.Module, loss_of: Callable[[], Tensor]) -> Iterator[float]:
    """Makes AdamW steps, and yields the loss of each after its backward, before its update."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1
    )
    for _ in range(NUM_STEPS):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        yield loss.item()
        optimizer.step()


def _their_loss(oracle: Oracle, config: ModelConfig, batch: LocalBatch) -> Tensor:
    """The loss of the next token, as our model returns it; losses further ahead add gradients."""
    logits, *ahead = oracle(batch.tokens_BS, batch.ahead_tokens_BKS)
    loss = _cross_entropy(logits, batch.labels_BS)
    if batch.ahead_labels_BKS is not None:
        weight = config.mtp_loss_weight / config.num_mtp_layers
        for depth, logits in enumerate(ahead):
            ahead_loss = weight * _cross_entropy(logits, batch.ahead_labels_BKS[:, depth])
            loss = loss + ahead_loss - ahead_loss.detach()
    return loss


def _their_gradients(oracle: Oracle, found: HFModel, batch: LocalBatch) -> dict[str, Tensor]:
    """Returns the gradients of an oracle in float64 by our names: writes them and the buffers as a
    folder, and imports it."""
    with computing_in(torch.float64), TemporaryDirectory() as folder:
        _their_loss(oracle, found.config, batch).backward()
        holder = Decoder(found.config)
        named = oracle.tensors().items()
        tensors = {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in named}
        _write(oracle, tensors, folder)
        load_folder(holder, found, Path(folder))
    left_out = {name for group in tied_weights(found.config) for name in group[1:]}
    left_out |= {name for name, _ in holder.named_parameters() if ".indexer." in name}
    return {name: p.detach() for name, p in holder.named_parameters() if name not in left_out}


@torch.no_grad()
def _our_logits(model: Decoder, batch: LocalBatch) -> list[Tensor]:
    """Logits of the decoder and of each depth of multi-token prediction."""
    sequences = batch.tokens_BS, batch.documents_BS, batch.positions_BS
    hidden = model.hidden(*sequences, batch.ahead_tokens_BKS)
    return [model.output(x_BSD) for x_BSD in hidden]


def joined_gradients(model: Decoder, config: ModelConfig) -> dict[str, Tensor]:
    """Returns all gradients; all copies of a tied weight get their sum, named after the first."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == sum(p.requires_grad for p in model.parameters())
    for group in tied_weights(config):
        total = torch.stack([gradients[name] for name in group]).sum(0)
        for name in group:
            gradients[name].copy_(total)
        for copy in group[1:]:
            del gradients[copy]
    return gradients


def _cross_entropy(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    return F.cross_entropy(
        logits_BSV.flatten(0, 1), labels_BS.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )


def _gradient_distances(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], case: ParityCase
) -> dict[str, float]:
    """Returns relative distances by name. A gradient that is zero but for rounding is compared
    with the largest one; one of a few numbers, in which terms of all tokens cancel, with those of
    its module."""
    largest, few = max(gradient.norm().item() for gradient in theirs.values()), module_norms(theirs)
    distances = {name: distance(ours[name], gradient) for name, gradient in theirs.items()}
    for name in few:
        norm = theirs[name].double().norm().item()
        distances[name] *= norm / few[name].item() if norm else 1.0
    for name in theirs.keys() & set(case.zero_gradients):
        norms = ours[name].norm().item(), theirs[name].norm().item()
        distances[name] = worst(norms) / largest
    return distances


def worst_of(errors: Mapping[str, float]) -> tuple[float, str]:
    """Returns the largest error and its name; NaN and no error at all are infinite."""
    return max(((worst([error]), name) for name, error in errors.items()), default=(worst([]), ""))


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Returns the norm of the difference over the norm of `theirs`; infinite for NaN in either."""
    assert ours.shape == theirs.shape
    norm = theirs.double().norm().item()
    difference = (ours.double() - theirs.double()).norm().item()
    return worst([difference / norm if norm else difference])


# --- the export, and ties of the routing ----------------------------------------------------------


@torch.no_grad()
def _export_distance(decoder: Decoder, model: HFModel, batch: LocalBatch) -> float:
    """Compares logits with those of the model that transformers loads from a float32 export."""
    tensors = _tensors(decoder)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    with TemporaryDirectory() as folder:
        target = Path(folder, "exported")
        read = lambda name, box: tensors[name].detach()[box]  # noqa: E731
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            export(Source(model, shapes, read), target, torch.float32)
        finally:
            dist.destroy_process_group()
        theirs = their_model(target)
    ours = decoder.eval()(batch.tokens_BS, batch.documents_BS, batch.positions_BS)
    with FirstOfEqual():
        return distance(ours, theirs(batch.tokens_BS, use_cache=False).logits)


def logits_difference(folder: Path) -> float:
    """Returns the largest difference of a position's logits between an exported folder's model here
    and in transformers, relative to the norm of the latter.

    Both run whole, in float32 on the CPU, on random tokens. These are drawn anew where scores of
    experts nearly tie: two right computations may then choose otherwise. Raises RunError where
    transformers does not know the model.
    """
    ours = load_alone(folder, dtype=torch.float32, device=torch.device("cpu")).model
    try:
        theirs = their_model(folder)
    except ValueError as error:
        why = reason(error).partition(". ")[0]
        raise RunError(f"{folder} is written, but transformers cannot open it: {why}") from None
    margins: list[float] = []
    watch_margins(ours, margins)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), FirstOfEqual():
        for _ in range(_DRAWS):
            margins.clear()
            tokens_BS = torch.randint(ours.config.vocab_size, (1, _NUM_TOKENS), generator=generator)
            logits_BSV = ours(tokens_BS)
            if min(margins, default=1.0) > SMALLEST_MARGIN:
                break
        rows = zip(logits_BSV[0], theirs(tokens_BS, use_cache=False).logits[0], strict=True)
        return max(distance(mine, other) for mine, other in rows)


def watch_margins(model: Decoder, margins: list[float]) -> None:
    """Appends the smallest margin over tokens of each routing decision."""

    def watch(select: nn.Module, args: tuple[Tensor, ...], experts_TK: Tensor) -> None:
        margins.append(choice_margins(args[0], args[1], select.config).min().item())  # type: ignore[arg-type]

    for moe in model.moe_layers().values():
        moe.router.select.register_forward_hook(watch)
