"""Pipeline parallelism: a rank holds one or more stages of the model and runs torch's schedules.

A stage is a model whose other parts were taken out. Between stages travels the residual stream
[B, S / (cp tp), D]; what a stage needs beside it (documents, positions) every rank of a pipeline
reads itself, as all of them read the same sequences.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    OVERLAP_F_B,
    PipelineScheduleMulti,
    _wait_batch_p2p,
    get_schedule_class,
)

from titan_moe.comm.turns import Turns
from titan_moe.config.job_config import Parallelism
from titan_moe.config.pipeline import overlaps_chunks, schedule_of, stages_of_rank
from titan_moe.distributed.execution import LocalBatch
from titan_moe.distributed.parallel_dims import Meshes
from titan_moe.moe.layer import MoE

# Forwards only, with a placement's stages; these take any number of microbatches.
_EVALUATION = {"single": "GPipe", "loop": "LoopedBFS", "v": "ZBVZeroBubble"}


class Pipeline:
    """Runs this rank's stages over the microbatches of one schedule run; an Execution.

    A run is `sequences / microbatch_size` microbatches. Gradients are plain sums; FSDP reduces them
    once at the end of a run, so a step of several runs reduces several times, and still sums. The
    loss stands on the ranks of the last stage; elsewhere it is 0.

    Args:
        parts: this rank's stages, ascending.
        parallelism: the schedule, the size of a microbatch, and whether the forward and the
            backward of DualPipeV's pairs take turns, which dispatchers then pass on.
        dim, dtype: size of the stream's last dim, D, and its type.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        *,
        meshes: Meshes,
        parallelism: Parallelism,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._parts = parts
        self._group = meshes.group("pp")
        self._tp = meshes.dims.tp
        self._schedule = schedule_of(parallelism)
        self._microbatch_size = parallelism.pipeline_parallel_microbatch_size
        self._dim, self._dtype = dim, dtype
        self._device = device
        ranks, rank = self._group.size(), self._group.rank()
        self._num_stages = ranks * len(parts)
        self._stages = stages_of_rank(self._schedule, rank, ranks, self._num_stages)
        self._training: dict[torch.Size, Any] = {}
        self._evaluation: dict[torch.Size, Any] = {}
        self._turns = Turns(device) if overlaps_chunks(parallelism) else None
        for moe in (each for part in parts for each in part.modules() if isinstance(each, MoE)):
            moe.dispatcher.turns = self._turns

    def accumulate(self, batch: LocalBatch, *, last: bool = True) -> Tensor:
        shape = batch.tokens_BS.shape
        if shape not in self._training:
            self._training[shape] = self._build(self._schedule.name, shape, self._microbatch_size)
        return self._run(self._training[shape].step, batch)

    @torch.no_grad()
    def evaluate(self, batch: LocalBatch) -> Tensor:
        shape = batch.tokens_BS.shape
        if shape not in self._evaluation:
            # Stages of its own: torch would exchange shapes and allocate anew at every change
            # between training and evaluation. One shape is kept: its buffers hold every microbatch.
            size = self._microbatch_size if shape[0] % self._microbatch_size == 0 else 1
            name = _EVALUATION[self._schedule.placement]
            self._evaluation = {shape: self._build(name, shape, size)}
        return self._run(self._evaluation[shape].eval, batch)

    def _run(self, step: Any, batch: LocalBatch) -> Tensor:
        losses: list[Tensor] = []
        step(
            *([batch.tokens_BS] if 0 in self._stages else []),
            target=batch.labels_BS if self._num_stages - 1 in self._stages else None,
            losses=losses,
            return_outputs=False,
            ids_BS=batch.tokens_BS,
            **batch.beside_tokens(),
        )
        if losses:
            return torch.stack(losses).detach().sum()
        return torch.zeros((), dtype=torch.float64, device=self._device)

    def _build(self, name: str, shape: torch.Size, microbatch_size: int) -> Any:
        """Builds torch's schedule for batches of this shape; it is collective over the pipeline."""
        stages = [
            self._build_stage(index, part, microbatch_size, shape[1])
            for index, part in zip(self._stages, self._parts, strict=True)
        ]
        kind = get_schedule_class(name)
        multi = issubclass(kind, PipelineScheduleMulti)
        built = kind(
            stages if multi else stages[0],
            n_microbatches=shape[0] // microbatch_size,
            # The last stage has computed the loss itself; torch detaches this copy in place.
            loss_fn=lambda loss, labels_BS: loss.clone(),
            # The sum over targets is divided once per step, where their number is known.
            scale_grads=False,
        )
        if self._turns is not None and multi:
            built.register_custom_function(OVERLAP_F_B, self._run_pair)
        return built

    def _run_pair(self, pair: Any, step: Any) -> None:
        """Runs the two halves of DualPipeV's OVERLAP_F_B beside each other.

        What torch does before and after each of them is done around both, in torch's order.

        Args:
            pair: the action, whose `sub_actions` are the forward and the backward.
            step: the schedule (`schedule_ref`) and the microbatches of the step.
        """
        forward, backward = pair.sub_actions
        schedule, turns = step.schedule_ref, self._turns
        assert turns is not None
        stages = {stage.stage_index: stage for stage in schedule._stages}
        ahead, back = stages[forward.stage_index], stages[backward.stage_index]
        chunk, late = forward.microbatch_index, backward.microbatch_index
        for stage in (ahead, back):
            schedule._assert_unsharded(stage)
        if not ahead.is_first and forward.stage_index - 1 not in stages:  # From another rank.
            _wait_batch_p2p(schedule.fwd_recv_ops.pop((forward.stage_index, chunk)))
        if not back.is_last and backward.stage_index + 1 not in stages:
            _wait_batch_p2p(schedule.bwd_recv_ops.pop((backward.stage_index, late)))
        loss = schedule._maybe_get_loss(back, late)
        schedule.backward_counter[backward.stage_index] += 1
        last = schedule.backward_counter[backward.stage_index] == schedule._n_microbatches
        outputs: list[Any] = []

        def run_forward() -> None:
            inputs = step.arg_mbs[chunk], step.kwarg_mbs[chunk]
            outputs.append(ahead.forward_one_chunk(chunk, *inputs, save_forward_output=False))

        def run_backward() -> None:
            back.backward_one_chunk(late, loss=loss, full_backward=True, last_backward=last)

        turns.run(run_forward, run_backward)
        schedule._maybe_compute_loss(ahead, *outputs, step.target_mbs, chunk)
        if forward.stage_index + 1 in stages:
            stages[forward.stage_index + 1].set_local_fwd_input(*outputs, chunk)
        if backward.stage_index - 1 in stages:
            gradients = back.get_local_bwd_output(late)
            stages[backward.stage_index - 1].set_local_bwd_input(gradients, late)

    def _build_stage(self, index: int, part: nn.Module, batch: int, seq_len: int) -> "_Stage":
        """Builds a stage with its shapes: torch would run the model to learn them, and send
        pickles."""
        tokens = torch.empty(batch, seq_len, dtype=torch.int64, device="meta")
        like = {"dtype": self._dtype, "device": "meta", "requires_grad": True}
        stream = torch.empty(batch, seq_len // self._tp, self._dim, **like)  # type: ignore[call-overload]
        loss = torch.empty((), **like | {"dtype": torch.float64})  # type: ignore[call-overload]
        return _Stage(
            part,
            index,
            self._num_stages,
            self._device,
            input_args=tokens if index == 0 else stream,
            output_args=loss if index == self._num_stages - 1 else stream,
            group=self._group,
        )


class _Stage(PipelineStage):
    """A stage that can be evaluated. torch's keeps all outputs, and its backward steps, which are
    empty in an evaluation, want a gradient on the rank where a V turns.
    """

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.is_last and not self.has_backward:
            self.fwd_cache[fwd_chunk_id] = ((), [])
        return output

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)
