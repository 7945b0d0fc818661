"""The training step written a second time, for one plain process.

Every layout is compared with it. It shares with production the plain modules, their dimensions and
the type of a batch, and nothing else: cross-entropy, divisor, auxiliary losses, clipping, AdamW,
Muon, expert bias and counts are spelled out here from their papers, one sequence at a time.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from titan_moe.config.job_config import JobConfig
from titan_moe.data.batch import Batch
from titan_moe.models.config import ModelConfig, tied_weights
from titan_moe.models.decoder import Decoder
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.router import SCORES, Router, Scores

IGNORED = -100


class Step(NamedTuple):
    """All that a step leaves behind."""

    numbers: dict[str, float]
    """The step's numbers by their names in production: means over its targets, the norm, and the
    number of targets."""
    tensors: dict[str, dict[str, Tensor]]
    """Tensors by quantity, then by the name of their parameter or layer: each "gradient" of the
    mean loss before clipping, "parameter", the moments (a matrix that Muon updates has
    "momentum_buffer" alone), "counts", "expert_bias" and "previous_load"."""


def without_balance_losses(config: ModelConfig) -> ModelConfig:
    """Dimensions for the reference's modules: it adds the losses itself, and pads no rows."""
    assert config.moe is not None
    plain = replace(
        config.moe,
        sequence_aux_loss_weight=0.0,
        global_aux_loss_weight=0.0,
        z_loss_weight=0.0,
        row_alignment=1,
    )
    return replace(config, moe=plain)


class Reference:
    """A plain model with its optimizer state.

    Args:
        model: of `without_balance_losses(config)`; takes the type of `weights`.
        config: the dimensions and weights of losses to train with.
        weights: every parameter's first value. Tied ones, which production keeps as copies, are one
            parameter here; what a step leaves behind has an entry for each name.
        buffers: `expert_bias` and `previous_load` of each router, and layers' scales, by full name.
    """

    def __init__(
        self,
        model: Decoder,
        config: ModelConfig,
        job: JobConfig,
        weights: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
    ) -> None:
        assert job.optimizer.name in ("AdamW", "Muon"), "the reference knows AdamW and Muon"
        assert config.moe is not None
        self.model, self.config, self.moe = model, config, config.moe
        self.optimizer, self.training = job.optimizer, job.training
        assert dict(model.named_parameters()).keys() == weights.keys()
        self.copies = {copy: first for first, *rest in tied_weights(config) for copy in rest}
        for copy, first in self.copies.items():
            module, name = copy.rsplit(".", 1)
            model.get_submodule(module).register_parameter(name, model.get_parameter(first))  # type: ignore[arg-type]
        self.parameters = dict(model.named_parameters())
        for name, parameter in self.parameters.items():
            parameter.data = weights[name].clone()
        self.routers: dict[str, Router] = {
            name: layer.router for name, layer in model.moe_layers().items()
        }
        for name, values in buffers.items():
            model.get_buffer(name).copy_(values)
        self.scores: dict[str, Scores] = {}
        for name, router in self.routers.items():
            router.register_forward_hook(partial(self._keep_scores, name))
        self.trained = {n: p for n, p in self.parameters.items() if p.requires_grad}
        matrices = {name for name in self.trained if self._is_for_muon(name)}
        zeros = {name: torch.zeros_like(p) for name, p in self.trained.items()}
        self.moments = {"momentum_buffer": {name: zeros.pop(name) for name in matrices}}
        for moment in ("exp_avg", "exp_avg_sq"):
            self.moments[moment] = {name: zero.clone() for name, zero in zeros.items()}
        self.num_steps = 0

    def step(self, batch: Batch, rate: float) -> Step:
        """Train on a global batch at this factor of the peak learning rates; labels_BS is IGNORED
        where nothing is to be predicted."""
        numbers, counts = self._backward(batch)
        gradients = {name: p.grad.clone() for name, p in self.trained.items()}  # type: ignore[union-attr]
        norm = math.sqrt(sum(g.double().square().sum().item() for g in gradients.values()))
        clip = min(1.0, self.training.max_norm / norm)
        for name, counts_E in counts.items():
            self._balance(self.routers[name], counts_E)
        self.num_steps += 1
        for name, gradient in gradients.items():
            update = self._muon if name in self.moments["momentum_buffer"] else self._adamw
            lr, decay = self._rates(name)
            update(name, gradient * clip, rate * lr, decay)
        parameters = {name: p.detach() for name, p in self.parameters.items()}
        buffers = {
            buffer: {name: getattr(r, buffer).clone() for name, r in self.routers.items()}
            for buffer in ("expert_bias", "previous_load")
        }
        of_parameters = {"gradient": gradients, "parameter": parameters, **self.moments}
        copied = {which: self._by_every_name(held) for which, held in of_parameters.items()}
        return Step(numbers | {"grad_norm": norm}, copied | {"counts": counts} | buffers)

    def _by_every_name(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        cloned = {name: tensor.clone() for name, tensor in tensors.items()}
        return cloned | {c: cloned[first] for c, first in self.copies.items() if first in cloned}

    def _backward(self, batch: Batch) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Returns the step's numbers but its norm, and counts by layer; gradients are in .grad."""
        for parameter in self.trained.values():
            parameter.grad = torch.zeros_like(parameter)
        num_targets = int((batch.labels_BS != IGNORED).sum())
        numbers = {"num_targets": float(num_targets)}
        counts = {
            name: torch.zeros(router.config.num_experts, dtype=torch.int64)
            for name, router in self.routers.items()
        }
        routed = {name: counts_E.clone() for name, counts_E in counts.items()}
        for tokens_S, labels_S, documents_S in zip(
            batch.tokens_BS, batch.labels_BS, batch.documents_BS, strict=True
        ):
            positions_S = torch.arange(len(tokens_S))
            if self.training.mask_documents:
                numbers_S = documents_S.tolist()
                positions_S = positions_S - torch.tensor([numbers_S.index(n) for n in numbers_S])
            logits_SV, *further = self._logits(tokens_S, documents_S, positions_S)
            entropy = cross_entropy_sum(logits_SV, labels_S)
            balance = torch.zeros_like(entropy)
            for name, router in self.routers.items():
                logits_SE = self.scores[name].logits_TE
                experts_SK = chosen_experts(logits_SE, router)
                routed[name] += _times_chosen(experts_SK, router)
                # Positions that a depth of prediction has no target for are left out.
                depth = _mtp_depth(name)
                if depth is None and self.training.dataset_format == "messages":
                    depth = 0
                if depth is not None:
                    asked = asked_at(depth, labels_S, documents_S)
                    logits_SE, experts_SK = logits_SE[asked], experts_SK[asked]
                chosen_E = _times_chosen(experts_SK, router)
                counts[name] += chosen_E
                if len(logits_SE):
                    load_E = router.previous_load
                    balance = balance + balance_loss(logits_SE, chosen_E, load_E, self.moe)
            losses = {
                "loss": entropy,
                "balance_loss": balance,
                "mtp_loss": self._further_loss(further, labels_S, documents_S, like=entropy),
                "indexer_loss": self._indexer_loss(labels_S, documents_S, like=entropy),
            }
            (sum(losses.values()) / num_targets).backward()  # type: ignore[union-attr]
            for name, loss in losses.items():
                numbers[name] = numbers.get(name, 0.0) + loss.item() / num_targets
        for name, router in self.routers.items():
            assert torch.equal(router.tokens_per_expert, routed[name]), f"{name} chose otherwise"
            router.tokens_per_expert.zero_()
        return numbers, counts

    def _indexer_loss(self, labels_S: Tensor, documents_S: Tensor, like: Tensor) -> Tensor:
        """The sum of the losses that the core of sparse attention has kept; forgets them. Depths
        of prediction, whose layers come last, add those of positions with a target."""
        losses, total = getattr(self.model.core, "losses", []), torch.zeros_like(like)
        for layer, loss_1S in enumerate(losses):
            depth = max(layer - self.config.num_layers + 1, 0)
            some = depth > 0 or self.training.dataset_format == "messages"
            asked = asked_at(depth, labels_S, documents_S) if some else slice(None)
            total = total + loss_1S[0, asked].sum()
        losses.clear()
        return total

    def _keep_scores(self, layer: str, router: Router, args: tuple, scores: Scores) -> None:
        self.scores[layer] = scores

    def _logits(self, tokens_S: Tensor, documents_S: Tensor, positions_S: Tensor) -> list[Tensor]:
        """Returns logits_SV of the decoder, and of each depth of prediction."""
        depths = range(1, self.config.num_mtp_layers + 1)
        tokens = [*tokens_S.tolist(), *(0 for _ in depths)]
        ahead_1KS = torch.tensor([[tokens[k : k + len(tokens_S)] for k in depths]])
        sequence = tokens_S[None], documents_S[None], positions_S[None]
        return [self.model.output(x_1SD)[0] for x_1SD in self.model.hidden(*sequence, ahead_1KS)]

    def _further_loss(
        self, further: list[Tensor], labels_S: Tensor, documents_S: Tensor, like: Tensor
    ) -> Tensor:
        """arXiv 2412.19437, equations 24 and 25, as a sum over tokens: depth k at position i is
        asked for the label k positions on. `further`: logits_SV of each depth."""
        total = torch.zeros_like(like)
        for depth, logits_SV in enumerate(further, 1):
            asked = asked_at(depth, labels_S, documents_S)
            labels = labels_S[[i + depth for i in asked]]
            total = total + cross_entropy_sum(logits_SV[asked], labels)
        return self.config.mtp_loss_weight * total / max(self.config.num_mtp_layers, 1)

    def _balance(self, router: Router, counts_E: Tensor) -> None:
        """The sign rule of arXiv 2408.15664, algorithm 1, and the load to remember."""
        excess_E = counts_E.double() - counts_E.double().mean()
        if router.gate.weight.requires_grad:
            router.expert_bias.sub_(self.moe.bias_update_speed * excess_E.sign().float())
        if counts_E.any():
            router.previous_load.copy_(counts_E.double() / counts_E.sum())

    def _rates(self, name: str) -> tuple[float, float]:
        """Returns a parameter's peak learning rate and weight decay: its first group's."""
        lr, decay = self.optimizer.lr, self.optimizer.weight_decay
        copies = [copy for copy, first in self.copies.items() if first == name]
        names = [name, *(copy for copy in copies if not copy.startswith("mtp."))]
        for group in self.optimizer.groups:
            asked = group.pattern
            if any(fnmatchcase(each, asked) or f".{asked}." in f".{each}." for each in names):
                return (
                    lr if group.lr is None else group.lr,
                    decay if group.weight_decay is None else group.weight_decay,
                )
        return lr, decay

    @torch.no_grad()
    def _adamw(self, name: str, gradient: Tensor, lr: float, decay: float) -> None:
        """arXiv 1711.05101, algorithm 2; matrices decay, vectors and biases do not."""
        config, parameter = self.optimizer, self.parameters[name]
        if parameter.ndim > 1 and name.split(".")[-1] not in _BIASES:
            parameter.mul_(1 - lr * decay)
        first, second = self.moments["exp_avg"][name], self.moments["exp_avg_sq"][name]
        m = config.beta1 * first + (1 - config.beta1) * gradient
        v = config.beta2 * second + (1 - config.beta2) * gradient**2
        m_hat = m / (1 - config.beta1**self.num_steps)
        v_hat = v / (1 - config.beta2**self.num_steps)
        parameter.sub_(lr * m_hat / (v_hat.sqrt() + config.eps))
        first.copy_(self._kept(m))
        second.copy_(self._kept(v))

    def _is_for_muon(self, name: str) -> bool:
        """Weights of layers that map hidden states to hidden states."""
        names = name.split(".")
        elsewhere = names[-1] in _BIASES or _BY_ADAM & set(names)
        matrix = self.parameters[name].ndim > 1 and not elsewhere
        return self.optimizer.name == "Muon" and matrix

    @torch.no_grad()
    def _muon(self, name: str, gradient: Tensor, lr: float, decay: float) -> None:
        """kellerjordan.github.io/posts/muon, with weight decay and scale of arXiv 2502.16982,
        algorithm 1; each expert by itself."""
        config, parameter = self.optimizer, self.parameters[name]
        mu, moment = config.muon_momentum, self.moments["momentum_buffer"][name]
        m = mu * moment + (1 - mu) * gradient
        nesterov = mu * m + (1 - mu) * gradient
        for weight, direction in zip(_matrices(parameter), _matrices(nesterov), strict=True):
            scale = config.muon_rms * math.sqrt(max(weight.shape))
            update = scale * orthogonal(direction, config.muon_steps)
            weight.sub_(lr * (update + decay * weight))
        moment.copy_(self._kept(m))

    def _kept(self, moment: Tensor) -> Tensor:
        """Rounds a moment to the type of the optimizer's state."""
        narrow = self.optimizer.state_dtype == "bfloat16"
        return moment.bfloat16().to(moment.dtype) if narrow else moment


_BIASES = ("bias", "b1", "b2", "b3")
_BY_ADAM = {"tok_embeddings", "output", "router", "gate", "gates", "weights_proj", "conv"}


def _matrices(weight: Tensor) -> list[Tensor]:
    return [weight] if weight.ndim == 2 else list(weight)


def orthogonal(matrix: Tensor, num_steps: int) -> Tensor:
    """Muon's Newton-Schulz steps on a matrix, by its singular values: each step maps s to
    3.4445 s - 4.7750 s^3 + 2.0315 s^5, after a division of all by the Frobenius norm."""
    u, singular, vt = torch.linalg.svd(matrix, full_matrices=False)
    singular = singular / max(singular.square().sum().sqrt().item(), 1e-7)
    for _ in range(num_steps):
        singular = 3.4445 * singular - 4.7750 * singular**3 + 2.0315 * singular**5
    return u @ singular.diag() @ vt


def cross_entropy_sum(logits_SV: Tensor, labels_S: Tensor) -> Tensor:
    """Sum of -log p(label) over the positions that have one."""
    kept = (labels_S != IGNORED).nonzero()[:, 0]
    logits_SV = logits_SV[kept]
    return (logits_SV.logsumexp(-1) - logits_SV[range(len(kept)), labels_S[kept]]).sum()


def asked_at(depth: int, labels_S: Tensor, documents_S: Tensor) -> list[int]:
    """The positions that a depth of prediction has a target for: the label `depth` positions on,
    if that is in the same document."""
    return [
        i
        for i in range(len(labels_S) - depth)
        if documents_S[i] == documents_S[i + depth] and labels_S[i + depth] != IGNORED
    ]


def _mtp_depth(layer: str) -> int | None:
    """The depth, from 1, of a layer of multi-token prediction; None for the decoder's layers."""
    names = layer.split(".")
    return int(names[2]) + 1 if names[0] == "mtp" else None


def _times_chosen(experts_SK: Tensor, router: Router) -> Tensor:
    return experts_SK.flatten().bincount(minlength=router.config.num_experts)


def _affinities(logits_TE: Tensor, config: MoEConfig) -> Tensor:
    """The positive score of each expert: arXiv 2401.06066, equation 5, or 2412.19437, 15."""
    if config.score == "softmax":
        return logits_TE.softmax(-1)
    if config.score == "sigmoid":
        return logits_TE.sigmoid()
    return SCORES[config.score](logits_TE).scores_TE  # From outside: no second form is known.


def chosen_experts(logits_TE: Tensor, router: Router) -> Tensor:
    """The top k by score plus bias, of the best groups where groups limit the choice."""
    config = router.config
    scores_TE = _affinities(logits_TE.detach(), config) + router.expert_bias
    if config.num_groups > 1:
        by_group = scores_TE.view(len(scores_TE), config.num_groups, -1)
        strength = by_group.sort(-1, descending=True).values[..., : config.group_score_top].sum(-1)
        rank = strength.argsort(-1, descending=True).argsort(-1)
        scores_TE = by_group.where(rank[..., None] < config.top_groups, -torch.inf).flatten(1)
    return scores_TE.sort(-1, descending=True).indices[:, : config.top_k]


def balance_loss(
    logits_SE: Tensor, chosen_E: Tensor, previous_load_E: Tensor, config: MoEConfig
) -> Tensor:
    """The weighted auxiliary losses of one sequence in one layer, summed over its tokens.

    Sequence-wise: arXiv 2412.19437, equations 17 to 20, times S. Global: the same with the load
    of the step before. z: arXiv 2202.08906, equation 5.
    """
    num_tokens, num_experts = logits_SE.shape
    affinity_SE = _affinities(logits_SE, config)
    share_SE = affinity_SE / affinity_SE.sum(-1, keepdim=True)
    frequency_E = num_experts * chosen_E.to(share_SE.dtype) / (config.top_k * num_tokens)
    mean_share_E = share_SE.mean(0)
    sequence = (frequency_E * mean_share_E).sum() * num_tokens
    global_ = num_experts * (previous_load_E.to(share_SE.dtype) * mean_share_E).sum() * num_tokens
    z = (logits_SE.exp().sum(-1).log() ** 2).sum()
    return (
        config.sequence_aux_loss_weight * sequence
        + config.global_aux_loss_weight * global_
        + config.z_loss_weight * z
    )
