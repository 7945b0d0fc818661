"""One optimizer step: the gradient rule in code.

The loss is a sum over target tokens, every reduction of a gradient is a plain sum, and one division
by the global number of target tokens of the step ends it. No other divisor exists.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from titan_moe.comm.collectives import read, sum_over_world
from titan_moe.config.job_config import JobConfig, Parallelism
from titan_moe.data.batch import IGNORE_INDEX, Batch, fingerprints
from titan_moe.distributed import grad_norm, tensor_parallel
from titan_moe.distributed.execution import LocalBatch
from titan_moe.distributed.tied_weights import sum_tied_grads
from titan_moe.metrics.step_metrics import METRICS, DeviceMetrics, Layers
from titan_moe.models.config import ModelConfig
from titan_moe.models.indexer import Indexer
from titan_moe.moe.layer import take_dropped
from titan_moe.moe.router import local_counts, update_routers
from titan_moe.ops.attention import document_starts
from titan_moe.ops.varlen_attention import bounds_of
from titan_moe.optim.optimizers import build_optimizer
from titan_moe.parallelize.parallelize import ShardedModel, build_sharded_model, plan_here
from titan_moe.runtime.regions import region


@dataclass(frozen=True)
class StepResult:
    """The numbers of a step, the same on every rank."""

    loss: float
    """Mean cross-entropy over the step's target tokens, in nats."""
    grad_norm: float
    """Global norm before clipping."""
    num_targets: int
    counts_LE: Tensor | None
    """Tokens per MoE layer and expert, over the whole world."""
    rows_dropped: int = 0
    """(token, expert) choices that did not fit into a bounded buffer, over all MoE layers."""
    metrics: dict[str, float] | None = None
    """Metrics for the log, by their names there; None if the step is not logged. See
    `metrics.step_metrics`; "data" is the sum of the CRC32 of the global batch's sequences, in any
    order: the step's data; "max_loss" the largest mean loss of a rank of the `loss` mesh, over its
    own targets. Besides, the `counts` of all ranks that are not 0."""
    stop: bool = False
    """A rank asks to stop after this step."""
    spike: bool = False
    """The norm is far above those of the steps before: training.spike_factor."""
    parameter_norms: dict[str, list[float]] | None = None
    """Norms of all parameters' gradients before clipping, each expert's apart, if asked for."""
    margins_LEB: Tensor | None = None
    """`balance.margins` per MoE layer, over the whole world, for the quantile rule alone."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def accepted(self) -> bool:
        """True if the numbers allow the update."""
        return self.finite and not self.spike


class Observer:
    """Watches a step, and changes nothing; this one looks away."""

    def reads(self, batch: Batch, local: LocalBatch) -> None:
        """Runs before the forward of a batch; this rank reads `local` of it."""

    def accumulated(self) -> None:
        """Runs after all sums of gradients over ranks, before clipping."""

    def updated(self, result: StepResult) -> None:
        """Runs after the update."""


class TrainStep:
    """Forward, backward and update over the microbatches of one step."""

    def __init__(
        self,
        sharded: ShardedModel,
        optimizer: Optimizer,
        *,
        stop: Callable[[], bool] = lambda: False,
        is_spike: Callable[[float], bool] = lambda norm: False,
    ) -> None:
        """
        Args:
            stop: returns whether this rank asks to stop after the step; called once a step.
            is_spike: returns whether a step of this gradient norm must not update; alike on all
                ranks.
        """
        plan, dims = sharded.plan, sharded.meshes.dims
        self._sharded = sharded
        self._optimizer = optimizer
        self._plan = plan
        self._parameters = [parameter for _, parameter in sharded.named_parameters()]
        replicas = sharded.tied_weights.replicas
        self._counted = {n: p for n, p in sharded.named_parameters() if p not in replicas}
        self._moe_layers = sharded.moe_layers()
        self._all_moe_layers = sharded.all_moe_layers()
        self._routers = {name: moe.router for name, moe in self._moe_layers.items()}
        layers = Layers(
            list(self._moe_layers.values()),
            [part.mtp for part in sharded.parts if part.mtp is not None],
            [x for part in sharded.parts for x in part.modules() if isinstance(x, Indexer)],
            selects=plan.config.indexer is not None,
            predicts_ahead=plan.config.num_mtp_layers > 0,
        )
        metrics = [metric for make in METRICS if (metric := make(layers)) is not None]
        self._metrics = DeviceMetrics(metrics, device=sharded.device)
        moe = plan.config.moe
        self._num_experts = moe.num_experts if moe is not None else 0
        self._pp_group = sharded.meshes.group("pp")
        self._ranks_per_stage = dims.world_size // dims.pp
        # Ranks that read the same sequences: the first of them counts.
        rank = sharded.meshes.rank
        self._loss_rank, self._num_loss_ranks = dims.coordinate(rank, "loss"), dims.size("loss")
        self._counts_sequences = not any(dims.coordinate(rank, axis) for axis in ("tp", "cp", "pp"))
        self._parameter_norms = grad_norm.ParameterNorms(sharded.names, self._num_experts)
        self._device = sharded.device
        self._stop = stop
        self._is_spike = is_spike

    def __call__(
        self,
        batches: list[Batch],
        *,
        logged: bool = True,
        counts: Mapping[str, int] | None = None,
        parameter_norms: bool = False,
        observer: Observer | None = None,
    ) -> StepResult:
        """Train on one step's microbatches.

        Args:
            counts: whole numbers about the sequences that this rank reads, by the names in the log
                of their sums over all sequences; the same names on all ranks.

        Besides the layers' exchanges and the gradients' sums, a step is one all-reduce and one wait
        for the device. Metrics for the log join that all-reduce if the step is `logged`, and every
        parameter's norm if `parameter_norms`.

        If the result is not finite or is a spike, nothing is updated, and the gradients stay for a
        search for the reason; `discard` clears them. Nor is anything updated where rows were
        dropped and the model stops on overflow, nor in a step without a target token.
        """
        observer = observer or Observer()
        for moe in self._moe_layers.values():
            # A value of Python that changes would compile the layer again.
            in_graph = self._plan.job.compile.compiles_layers and not moe.dispatcher.waits_for_host
            moe.counts_traffic = logged or in_graph
        loss_sum = self._accumulate(batches, observer)
        with region("grad_norm"):
            result = self._total(loss_sum, batches, logged, counts or {}, parameter_norms)
        overflows = result.rows_dropped > 0 and self._plan.stops_on_overflow
        if not result.accepted or overflows:
            return result
        if result.num_targets > 0:
            with region("optimizer"):
                self._update(result)
        observer.updated(result)
        self.discard()
        return result

    def _update(self, result: StepResult) -> None:
        clip = grad_norm.clip_factor(result.grad_norm, self._plan.job.training.max_norm)
        grad_norm.scale_grads(self._parameters, clip / result.num_targets)
        if result.counts_LE is not None:
            counted = result.counts_LE, result.margins_LEB
            update_routers(self._routers, self._all_moe_layers, *counted)
        self._optimizer.step()

    def discard(self) -> None:
        """Free all gradients."""
        self._optimizer.zero_grad()

    def _accumulate(self, batches: list[Batch], observer: Observer) -> Tensor:
        """Sum all gradients, which still lack the divisor; returns this rank's loss sum."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        for number, batch in enumerate(batches, 1):
            local = local_batch(batch, self._sharded)
            observer.reads(batch, local)
            loss_sum += self._sharded.execution.accumulate(local, last=number == len(batches))
        for axis, parameters in self._sharded.partial.items():
            group = self._sharded.meshes.group(axis)
            tensor_parallel.sum_grads(parameters, group, self._device)
        if self._sharded.tied_weights.copies:
            sum_tied_grads(self._sharded.tied_weights, self._pp_group, self._device)
        observer.accumulated()
        return loss_sum

    @torch.no_grad()
    def _total(
        self,
        loss_sum: Tensor,
        batches: list[Batch],
        logged: bool,
        counts: Mapping[str, int],
        parameter_norms: bool,
    ) -> StepResult:
        """Sum over all ranks, in one all-reduce, the numbers of the update and of the log."""
        shares: dict[nn.Parameter, Tensor] | None = {} if parameter_norms else None
        squares = grad_norm.sum_of_squares(self._counted.values(), self._ranks_per_stage, shares)
        num_targets = sum(num_local_targets(batch, self._sharded) for batch in batches)
        terms = {
            "loss": loss_sum,
            "num_targets": self._number(num_targets),
            "squares": squares.to(self._device),
        }
        if self._all_moe_layers:
            layers, moe = self._all_moe_layers, self._plan.config.moe
            assert moe is not None
            terms |= local_counts(self._routers, layers, moe, self._device)
            terms["rows_dropped"] = take_dropped(self._moe_layers.values(), self._device)
        if logged:
            # Exact: sums of 32-bit numbers over two million sequences fit into 53 bits.
            data = sum(sum(fingerprints(batch)) for batch in batches)
            terms |= self._metrics.terms()
            # A sum in which each rank of the loss mesh has columns of its own.
            apart = self._number(0).repeat(2, self._num_loss_ranks)
            apart[:, self._loss_rank] = torch.stack((loss_sum, terms["num_targets"]))
            terms["loss of ranks"] = apart
            terms |= {
                name: self._number(number * self._counts_sequences)
                for name, number in {"data": data, **counts}.items()
            }
        terms["stop"] = self._number(self._stop())
        if shares is not None:
            terms["parameters"] = self._parameter_norms.squares(
                self._counted, shares, self._ranks_per_stage, self._device
            )
        sums = sum_over_world(terms)
        self._metrics.reset()
        if logged:
            losses, targets = sums["loss of ranks"]
            sums["max_loss"] = (losses / targets.clamp(min=1)).max()
        # Host sync, once per step: whether to update at all is decided on these numbers.
        return self._result(sums, read(sums), counts)

    def _result(
        self, sums: dict[str, Tensor], numbers: dict[str, float], counts: Iterable[str]
    ) -> StepResult:
        norm = math.sqrt(numbers["squares"])
        num_targets = int(numbers["num_targets"])
        divisor = max(num_targets, 1)
        result = StepResult(
            loss=numbers["loss"] / divisor,
            grad_norm=norm / divisor,
            num_targets=num_targets,
            counts_LE=sums["counts_LE"].long() if self._all_moe_layers else None,
            margins_LEB=sums["margins_LEB"].long() if "margins_LEB" in sums else None,
            rows_dropped=int(numbers.get("rows_dropped", 0)),
            stop=numbers["stop"] > 0,
            spike=self._is_spike(norm / divisor),
        )
        if "parameters" in sums:
            norms = self._parameter_norms.by_name(sums["parameters"], divisor)
            result = replace(result, parameter_norms=norms)
        if "data" not in sums:
            return result
        values = self._metrics.values(numbers, num_targets=num_targets)
        values |= {name: int(numbers[name]) for name in counts if numbers[name]}
        values |= {"max_loss": numbers["max_loss"], "data": int(numbers["data"])}
        return replace(result, metrics=values)

    def _number(self, number: int) -> Tensor:
        """Returns a number on the device; torch.tensor would wait for the device."""
        return torch.full((), number, dtype=torch.float64, device=self._device)


def build_step(
    job: JobConfig,
    config: ModelConfig,
    *,
    device: torch.device,
    draw_weights: bool = True,
    ranks_per_node: int | None = None,
) -> tuple[ShardedModel, Optimizer, TrainStep]:
    """Returns a job's model on this rank of an initialised world, its optimizer and its step, as a
    run builds them. Collective; the arguments are those of `plan_here` and `build_sharded_model`.

    Without weights no number means anything, that of dropped rows neither: it stops no step.
    """
    plan = plan_here(job, config, device, ranks_per_node)
    if not draw_weights:
        plan = replace(plan, stops_on_overflow=False)
    sharded = build_sharded_model(plan, device, draw_weights=draw_weights)
    optimizer = build_optimizer(
        job.optimizer, sharded.named_parameters(), config, sharded.meshes.group
    )
    return sharded, optimizer, TrainStep(sharded, optimizer)


@torch.no_grad()
def validation_loss(batches: Iterable[Batch], sharded: ShardedModel) -> tuple[float, int]:
    """Returns the mean cross-entropy over the target tokens of all ranks' batches, and the number
    of (token, expert) choices that did not fit into the buffers between ranks. Collective.

    Training goes on as if nothing had been: these batches have readers of their own, nothing draws
    random numbers, and loads are counted and biases moved in training alone.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=sharded.device)
    sharded.train(False)
    for batch in batches:
        sums[0] += sharded.execution.evaluate(local_batch(batch, sharded))
        sums[1] += num_local_targets(batch, sharded)
    sharded.train(True)
    sums[2] = take_dropped(sharded.moe_layers().values(), sharded.device)
    dist.all_reduce(sums)
    loss, targets, dropped = sums.tolist()
    return loss / max(targets, 1.0), int(dropped)


def overflow_line(parallelism: Parallelism, rows_dropped: int) -> str:
    """Returns the line for a user whose bounded buffers do not suffice."""
    remedy = "choose a larger one, or leave it out"
    if parallelism.expert_parallel_comm_backend != "symmetric":
        remedy += ", or set parallelism.expert_parallel_overflow=drop"
    return (
        f"{rows_dropped} choices of an expert by a token did not fit into the buffers between "
        f"ranks with parallelism.expert_parallel_capacity_factor="
        f"{parallelism.expert_parallel_capacity_factor}: {remedy}"
    )


def local_batch(batch: Batch, sharded: ShardedModel) -> LocalBatch:
    """Returns this rank's positions of whole sequences, and the documents of all positions.

    Whole sequences are copied, since they lie in page-locked memory, and cut on the device.
    """
    device = sharded.device
    whole = replace(
        batch,
        tokens_BS=batch.tokens_BS.to(device, non_blocking=True),
        labels_BS=batch.labels_BS.to(device, non_blocking=True),
        documents_BS=batch.documents_BS.to(device, non_blocking=True),
    )
    batch_size, seq_len = whole.tokens_BS.shape
    positions_S = sharded.positions(seq_len, device=device)
    own = slice(None) if len(positions_S) == seq_len else positions_S
    positions_BS = positions_S.expand(batch_size, -1)
    if sharded.plan.counts_in_documents:
        positions_BS = positions_S - document_starts(whole.documents_BS)[:, own]
    local = LocalBatch(
        tokens_BS=whole.tokens_BS[:, own],
        labels_BS=whole.labels_BS[:, own],
        documents_BS=whole.documents_BS,
        positions_BS=positions_BS,
        bounds=bounds_of(batch.documents_BS),
        counted_BS=whole.labels_BS[:, own] != IGNORE_INDEX if sharded.plan.counts_answers else None,
    )
    depths = sharded.config.num_mtp_layers
    if not depths:
        return local
    tokens_BKS, labels_BKS = (x_BKS[..., own] for x_BKS in look_ahead(whole, depths))
    return local._replace(ahead_tokens_BKS=tokens_BKS, ahead_labels_BKS=labels_BKS)


def look_ahead(batch: Batch, depths: int) -> tuple[Tensor, Tensor]:
    """Returns the tokens and the labels 1, 2, ..., `depths` positions later, [B, K, S] each.

    Beyond the sequence or the token's document there is no label, and the token, 0 or one of
    another document, has no effect.
    """
    tokens, labels = [], []
    for depth in range(1, depths + 1):
        ahead = (0, depth)
        tokens.append(F.pad(batch.tokens_BS[:, depth:], ahead))
        label_BS = F.pad(batch.labels_BS[:, depth:], ahead, value=IGNORE_INDEX)
        document_BS = F.pad(batch.documents_BS[:, depth:], ahead, value=-1)
        labels.append(label_BS.masked_fill(document_BS != batch.documents_BS, IGNORE_INDEX))
    return torch.stack(tokens, 1), torch.stack(labels, 1)


def num_local_targets(batch: Batch, sharded: ShardedModel) -> int:
    """Returns the number of target tokens; 0 if another rank counts the same tokens."""
    if not sharded.counts_targets:
        return 0
    positions_S = sharded.positions(batch.labels_BS.shape[1])
    return int((batch.labels_BS[:, positions_S] != IGNORE_INDEX).sum())
