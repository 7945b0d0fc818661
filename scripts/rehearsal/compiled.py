"""Compiled layers on fake tensors of cuda:0: graphs and breaks.

A layer whose dispatcher waits for nothing is to be one graph on a GPU as on the CPU: what only CUDA
takes (Triton kernels, torch's grouped GEMM in bfloat16) must be something that a graph can hold.
Experts and routers are cut as in a run, and FSDP is not there: its hooks break graphs anywhere.
"""

from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from scripts.rehearsal.fake_cuda import CUDA
from scripts.rehearsal.ledger import Finding
from scripts.rehearsal.places import Place
from titan_moe.config.job_config import ActivationCheckpoint, Compile
from titan_moe.distributed.compile import apply_compile
from titan_moe.distributed.expert_parallel import DispatchOptions, apply_expert_parallel
from titan_moe.distributed.parallel_dims import ParallelDims
from titan_moe.models.decoder import Decoder
from titan_moe.models.registry import FAMILIES, model_config
from titan_moe.moe import layer
from titan_moe.ops.attention import Sdpa
from titan_moe.ops.varlen_attention import DocumentBounds
from titan_moe.simulate.fake_rank import fake_world

_LAYERS, _ROWS, _SEQ_LEN = 2, 2, 128
_BY_OPERATION = ActivationCheckpoint(mode="selective", selective_ac_option="op")
_PLACE = Place("distributed/compile.py:apply_compile", 0)


class Traced(NamedTuple):
    """Number of compiled graphs of a family's layers, and the findings about them."""

    graphs: int
    findings: list[Finding]


def compiled_cases(word: str = "") -> dict[str, tuple[str, int]]:
    """Returns family and ep degree by name: experts on one rank, or on two with bounded sizes."""
    # Sparse attention and recurrences stay eager, and break the graph.
    configs = {family: model_config(family, "gate") for family in FAMILIES}
    traced = [name for name, each in configs.items() if not (each.indexer or each.recurrent)]
    cases = {f"compiled {family} ep={ep}": (family, ep) for family in traced for ep in (1, 2)}
    return {name: case for name, case in cases.items() if word in name}


def trace(family: str, ep: int) -> Traced:
    """Compiles a family's layers, and runs them forward and backward. Needs a fresh process."""
    from torch._dynamo.utils import counters

    with fake_world(ep - 1, ep):
        try:
            _trace(family, ep)
        except Exception as error:
            said = (str(error).strip().splitlines() or [""])[0]
            return Traced(0, [Finding("refused", _PLACE, f"{type(error).__name__}: {said}")])
    breaks = [reason.splitlines()[0] for reason in counters["graph_break"]]
    findings = [Finding("graph break", _PLACE, reason) for reason in breaks]
    return Traced(counters["stats"]["unique_graphs"], findings)


def missed_break() -> str:
    """Breaks the graph of a layer; returns a line if no finding says so. Needs a fresh process."""
    with mock.patch.object(layer, "count_experts", _breaking(layer.count_experts)):
        found = trace("qwen3", 1).findings
    said = "; ".join(map(str, found)) or "nothing"
    return "" if any(f.kind == "graph break" for f in found) else f"a graph break: found {said}"


def _breaking(count_experts: Any) -> Any:
    def called(experts_TK: Tensor, num_experts: int) -> Tensor:
        torch._dynamo.graph_break("planted")
        return count_experts(experts_TK, num_experts)

    return called


def _trace(family: str, ep: int) -> None:
    """Runs the first layers of a family forward and backward, experts cut over `ep` ranks."""
    config = model_config(family, "gate")
    section = Compile(enable=True, backend="aot_eager")
    rows = _ROWS, _SEQ_LEN
    config = replace(config, num_layers=_LAYERS, num_mtp_layers=0)
    meshes = ParallelDims(world_size=ep, ep=ep).build_mesh("cuda")
    with torch.device("meta"):
        model = Decoder(config, Sdpa()).bfloat16()
    options = DispatchOptions("capacity", capacity_factor=1.5)
    apply_expert_parallel(list(model.moe_layers().values()), meshes, options)
    apply_compile(model.layers.values(), section, _BY_OPERATION)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device=CUDA)
        tokens = torch.zeros(rows, dtype=torch.int64, device=CUDA)
        positions = torch.arange(rows[1], device=CUDA).expand_as(tokens)
        one_document = DocumentBounds(per_sequence=1, longest=rows[1])
        model(tokens, tokens, positions, bounds=one_document).float().sum().backward()
