"""Compiled layers on fake tensors of cuda:0: graphs and breaks, and Inductor's kernels for sm_90.

A layer whose dispatcher waits for nothing is to be one graph on a GPU as on the CPU: what only CUDA
takes (Triton kernels, torch's grouped GEMM in bfloat16) must be something that a graph can hold.
Experts and routers are cut as in a run, and FSDP is not there: its hooks break graphs anywhere.
Attention is torch's; flex attention is compiled by itself and stays outside of graphs.

Kernels are made for layers of a shipped model of each family, whose dims decide on their tiles:
a dense one, where the family has such, and one with experts. It is compiled whole, and in pieces as
where its dispatcher waits for sizes.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from scripts.rehearsal.cases import CONFIGS
from scripts.rehearsal.fake_cuda import CUDA
from scripts.rehearsal.ledger import Finding
from scripts.rehearsal.places import Place
from titan_moe.config.job_config import ActivationCheckpoint, Compile
from titan_moe.config.parse import load_job
from titan_moe.distributed.compile import apply_compile
from titan_moe.distributed.expert_parallel import DispatchOptions, apply_expert_parallel
from titan_moe.distributed.parallel_dims import ParallelDims
from titan_moe.models.attention import plain_core
from titan_moe.models.config import ModelConfig
from titan_moe.models.decoder import Decoder
from titan_moe.models.hf import model_of_job
from titan_moe.models.registry import FAMILIES, model_config
from titan_moe.moe import layer
from titan_moe.ops.attention import AttentionCore, CausalSdpa
from titan_moe.ops.varlen_attention import DocumentBounds
from titan_moe.simulate.fake_rank import fake_world

_LAYERS, _ROWS, _SEQ_LEN = 2, 2, 128
_BY_OPERATION = ActivationCheckpoint(mode="selective", selective_ac_option="op")
_PLACE = Place("distributed/compile.py:apply_compile", 0)
_OF_FAMILY = {
    "deepseek_v3": "671B_64gpu.toml",
    "gpt_oss": "120b_64gpu.toml",
    "llama4": "17bx128e_64gpu.toml",
    "mixtral": "8x22B_64gpu.toml",
    "qwen3": "30B-A3B_64gpu.toml",
}
"""The model whose layers' kernels are made."""


class Traced(NamedTuple):
    """What a family's layers were compiled to."""

    graphs: int
    findings: list[Finding]


def compiled_cases(word: str = "") -> dict[str, tuple[str, int]]:
    """Each family with its experts on one rank, and cut over two with bounded sizes, by name."""
    cases = {f"compiled {family} ep={ep}": (family, ep) for family in FAMILIES for ep in (1, 2)}
    return {name: case for name, case in cases.items() if word in name}


def trace(family: str, ep: int) -> Traced:
    """Compile a family's layers and run them forward and backward. In a fresh process."""
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
    """Break the graph of a layer; a line if that is not found. In a fresh process."""
    with mock.patch.object(layer, "count_experts", _breaking(layer.count_experts)):
        found = trace("qwen3", 1).findings
    said = "; ".join(map(str, found)) or "nothing"
    return "" if any(f.kind == "graph break" for f in found) else f"a graph break: found {said}"


def _breaking(count_experts: Any) -> Any:
    def called(experts_TK: Tensor, num_experts: int) -> Tensor:
        torch._dynamo.graph_break("planted")
        return count_experts(experts_TK, num_experts)

    return called


def layer_cases(word: str = "") -> dict[str, tuple[Callable[[], None], Place]]:
    """What `kernels_of` takes, for each family's layers as a whole and in pieces, by name."""
    cases: dict[str, tuple[Callable[[], None], Place]] = {}
    for family in FAMILIES:
        cases[f"kernels of {family}, a layer whole"] = partial(_train_shipped, family), _PLACE
        cases[f"kernels of {family}, a layer in pieces"] = (
            partial(_train_shipped, family, in_pieces=True),
            _PLACE,
        )
    return {name: case for name, case in cases.items() if word in name}


def _train_shipped(family: str, *, in_pieces: bool = False) -> None:
    job = load_job(["--job.config_file", str(CONFIGS / family / _OF_FAMILY[family])])
    config = model_of_job(job.model)
    config = replace(config, num_dense_layers=min(config.num_dense_layers, 1))
    core = plain_core(config, mask_documents=True, dtype=torch.bfloat16, device_type="cuda")
    rows = job.training.local_batch_size, job.training.seq_len
    with fake_world(0, 1):
        _train(config, core, 1, Compile(enable=True, backend="inductor"), rows, in_pieces=in_pieces)


def _trace(family: str, ep: int) -> None:
    config = model_config(family, "gate")
    section = Compile(enable=True, backend="aot_eager")
    _train(config, CausalSdpa(), ep, section, (_ROWS, _SEQ_LEN))


def _train(
    config: ModelConfig,
    core: AttentionCore,
    ep: int,
    section: Compile,
    rows: tuple[int, int],
    *,
    in_pieces: bool = False,
) -> None:
    """Its first layers, forward and backward; `rows` are a microbatch's and their tokens."""
    config = replace(config, num_layers=_LAYERS, num_mtp_layers=0)
    meshes = ParallelDims(world_size=ep, ep=ep).build_mesh("cuda")
    with torch.device("meta"):
        model = Decoder(config, core).bfloat16()
    options = DispatchOptions("capacity", capacity_factor=1.5)
    apply_expert_parallel(list(model.moe_layers().values()), meshes, options)
    blocks = dict(model.layers.items())
    apply_compile(blocks, section, _BY_OPERATION, eager_attention=False, eager_routing=in_pieces)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device=CUDA)
        tokens = torch.zeros(rows, dtype=torch.int64, device=CUDA)
        positions = torch.arange(rows[1], device=CUDA).expand_as(tokens)
        one_document = DocumentBounds(per_row=1, longest=rows[1])
        model(tokens, tokens, positions, bounds=one_document).float().sum().backward()
