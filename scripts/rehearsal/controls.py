"""Planted mistakes: a rehearsal that does not find each of them proves nothing."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from scripts.rehearsal.cases import Case, in_layout, with_heads
from scripts.rehearsal.rank import rehearse
from titan_moe.verify.layouts.layouts import parse

_DISPATCHING = "dp_shard=2,ep=2"
_BOUNDED = {"parallelism": {"expert_parallel_capacity_factor": 1.5}}


@dataclass(frozen=True)
class Control:
    """A planted mistake, and the finding that it must cause."""

    name: str
    kind: str
    """Kind of the finding."""
    where: str
    """Part of the finding's place."""
    plant: Callable[[], AbstractContextManager]
    layout: str = _DISPATCHING
    tables: Mapping[str, Mapping[str, Any]] | None = None
    head_dim: int = 32

    def case(self) -> Case:
        """Returns Qwen3 with one layer per pipeline stage."""
        case = next(iter(in_layout("qwen3", self.layout)))
        config = replace(case.config, num_layers=parse(self.layout).num_stages)
        config = with_heads(config, self.head_dim)
        return replace(case, job=case.job.with_values(**(self.tables or {})), config=config)


def missed(name: str) -> str:
    """Plants a control's mistake; returns a line if it is not found. Needs a fresh process."""
    control = next(each for each in CONTROLS if each.name == name)
    with control.plant():
        found = rehearse(control.case()).findings
    if any(f.kind == control.kind and control.where in f.place.where for f in found):
        return ""
    others = "; ".join(str(finding) for finding in found) or "nothing"
    return f"{control.name}: expected {control.kind} at {control.where}, found {others}"


# --- planting ---


def _wrapped(target: str, make: Callable[[Any], Any]) -> Callable[[], AbstractContextManager]:
    """Replaces the function "module:name" or "module:Class.name" by make(function)."""

    def plant() -> AbstractContextManager:
        module, _, path = target.partition(":")
        *holders, name = path.split(".")
        holder: Any = import_module(module)
        for each in holders:
            holder = getattr(holder, each)
        return mock.patch.object(holder, name, make(getattr(holder, name)))

    return plant


def _and_then(act: Callable[[Any], object]) -> Callable[[Any], Any]:
    """Makes a function also hand its result to `act`."""

    def make(function: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            act(result)
            return result

        return called

    return make


def _changed(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Makes a function return `change` of its result."""
    return lambda function: lambda *args, **kwargs: change(function(*args, **kwargs))


def _twice(function: Any) -> Any:
    def called(*args: Any) -> Any:
        function(*args)
        return function(*args)

    return called


def _before(act: Callable[[], object]) -> Callable[[Any], Any]:
    def make(function: Any) -> Any:
        def called(*args: Any) -> Any:
            act()
            return function(*args)

        return called

    return make


def _long_offsets(multiply: Any) -> Any:
    return lambda x_RD, w_EFD, offsets_E: multiply(x_RD, w_EFD, offsets_E.long())


def _source_on_host(copy_rows: Any) -> Any:
    return lambda x_TD, source_R: copy_rows(x_TD, source_R.cpu())


_WEIGHTS = "titan_moe.moe.router:GatingWeights.forward"
CONTROLS = [
    Control(
        "a copy to the host",
        "copy",
        "moe/layer.py:forward",
        _wrapped(_WEIGHTS, _and_then(lambda w: w.to("cpu", non_blocking=True))),
    ),
    Control(
        "a number read in a layer",
        "wait",
        "moe/layer.py:forward",
        _wrapped(_WEIGHTS, _and_then(lambda w: w.sum().item())),
    ),
    Control(
        "sizes read twice a layer",
        "wait",
        "all_to_all.py:sizes",
        _wrapped("titan_moe.moe.dispatch.all_to_all:to_host", _twice),
    ),
    Control(
        "a number read with bounded sizes",
        "wait",
        "moe/layer.py:choose",
        _wrapped(
            "titan_moe.moe.layer:count_experts", _and_then(lambda counts_E: counts_E.sum().item())
        ),
        tables=_BOUNDED,
    ),
    Control(
        "a tensor of numbers made in a layer",
        "copy",
        "moe/layer.py:forward",
        _wrapped(_WEIGHTS, _and_then(lambda w: torch.tensor([1.0], device=w.device))),
    ),
    Control(
        "a sum over ranks on the host",
        "wrong device",
        "training/train_step.py:_total",
        _wrapped(
            "titan_moe.training.train_step:sum_over_world",
            _before(lambda: dist.all_reduce(torch.zeros(1))),
        ),
    ),
    Control(
        "communicators that the step makes",
        "late communicator",
        "",
        _wrapped(
            "titan_moe.distributed.process_groups:ProcessGroups.connect",
            lambda connect: lambda *_: None,
        ),
        layout="pp=4,schedule=GPipe",
    ),
    Control(
        "two devices in one sum",
        "refused",
        "moe/layer.py:forward",
        _wrapped(_WEIGHTS, _changed(lambda w: w + torch.ones(w.shape))),
    ),
    Control(
        "a sum that has no deterministic kernel",
        "not deterministic",
        "moe/layer.py:forward",
        _wrapped(_WEIGHTS, _and_then(lambda w: w.cumsum(-1))),
    ),
    Control(
        "offsets of a type that grouped GEMMs refuse",
        "refused",
        "grouped_mm.py:_product",
        _wrapped("titan_moe.ops.grouped_mm:_grouped_mm", _long_offsets),
    ),
    Control(
        "heads that flex attention refuses",
        "refused",
        "flex_attention.py:_run",
        _wrapped("titan_moe.ops.flex_attention:takes", lambda takes: lambda *heads: True),
        layout="cp=2",
        head_dim=8,
    ),
    Control(
        "heads that flash attention refuses",
        "refused",
        "varlen_attention.py:varlen_attention",
        _wrapped("titan_moe.ops.varlen_attention:takes", lambda takes: lambda *heads: True),
        head_dim=20,
    ),
    Control(
        "a kernel that reads the host's memory",
        "wrong device",
        "move_rows_triton.py:copy_rows",
        _wrapped("titan_moe.ops.move_rows:copy_rows", _source_on_host),
    ),
]
