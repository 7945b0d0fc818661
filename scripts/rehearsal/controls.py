"""Planted mistakes: a rehearsal that does not find each of them proves nothing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from scripts.rehearsal.cases import Case, in_layout, with_heads
from scripts.rehearsal.rank import rehearse
from titan_moe.verify.layouts.layouts import parse

_BOUNDED = {"parallelism": {"expert_parallel_capacity_factor": 1.5}}


@dataclass(frozen=True)
class Control:
    """A planted mistake, and the finding that it must cause."""

    name: str
    kind: str
    """Kind of the finding."""
    place: str
    """Part of the finding's place."""
    target: str
    """The function that is wrong: "module:name" or "module:Class.name"."""
    wrong: Callable[[Any], Callable[..., Any]]
    """Makes the wrong function of the right one."""
    layout: str = "dp_shard=2,ep=2"
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
    module, _, path = control.target.partition(":")
    *holders, function = path.split(".")
    holder: Any = import_module(module)
    for each in holders:
        holder = getattr(holder, each)
    with mock.patch.object(holder, function, control.wrong(getattr(holder, function))):
        found = rehearse(control.case()).findings
    if any(f.kind == control.kind and control.place in f.place.where for f in found):
        return ""
    others = "; ".join(str(finding) for finding in found) or "nothing"
    return f"{control.name}: expected {control.kind} at {control.place}, found {others}"


def _changed(change: Callable[[Any], Any]) -> Callable[[Any], Callable[..., Any]]:
    """Makes a function return `change` of its result."""
    return lambda function: lambda *args, **kwargs: change(function(*args, **kwargs))


def _and_then(act: Callable[[Any], object]) -> Callable[[Any], Callable[..., Any]]:
    """Makes a function also hand its result to `act`."""

    def change(result: Any) -> Any:
        act(result)
        return result

    return _changed(change)


def _after(act: Callable[..., object]) -> Callable[[Any], Callable[..., Any]]:
    """Makes a function hand its arguments to `act` first."""

    def wrong(function: Any) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            act(*args)
            return function(*args)

        return called

    return wrong


_WEIGHTS = "titan_moe.moe.router:GatingWeights.forward"
CONTROLS = [
    Control(
        "a copy to the host",
        "copy",
        "moe/layer.py:forward",
        _WEIGHTS,
        _and_then(lambda w: w.to("cpu", non_blocking=True)),
    ),
    Control(
        "a number read in a layer",
        "wait",
        "moe/layer.py:forward",
        _WEIGHTS,
        _and_then(lambda w: w.sum().item()),
    ),
    Control(
        "sizes read twice a layer",
        "wait",
        "all_to_all.py:plan",
        "titan_moe.moe.dispatch.all_to_all:to_host",
        lambda to_host: _after(to_host)(to_host),
    ),
    Control(
        "a number read with bounded sizes",
        "wait",
        "moe/layer.py:choose",
        "titan_moe.moe.layer:sort_by_expert",
        _and_then(lambda rows: rows.counts_E.sum().item()),
        tables=_BOUNDED,
    ),
    Control(
        "a tensor of numbers made in a layer",
        "copy",
        "moe/layer.py:forward",
        _WEIGHTS,
        _and_then(lambda w: torch.tensor([1.0], device=w.device)),
    ),
    Control(
        "a sum over ranks on the host",
        "wrong device",
        "training/train_step.py:_total",
        "titan_moe.training.train_step:sum_over_world",
        _after(lambda *_: dist.all_reduce(torch.zeros(1))),
    ),
    Control(
        "communicators that the step makes",
        "late communicator",
        "",
        "titan_moe.distributed.process_groups:ProcessGroups.connect",
        lambda connect: lambda *_: None,
        layout="pp=4,schedule=GPipe",
    ),
    Control(
        "two devices in one sum",
        "refused",
        "moe/layer.py:forward",
        _WEIGHTS,
        _changed(lambda w: w + torch.ones(w.shape)),
    ),
    Control(
        "a sum that has no deterministic kernel",
        "not deterministic",
        "moe/layer.py:forward",
        _WEIGHTS,
        _and_then(lambda w: w.cumsum(-1)),
    ),
    Control(
        "offsets of a type that grouped GEMMs refuse",
        "refused",
        "grouped_mm.py:_product",
        "titan_moe.ops.grouped_mm:_grouped_mm",
        lambda multiply: lambda x_RD, w_EFD, offsets_E: multiply(x_RD, w_EFD, offsets_E.long()),
    ),
    Control(
        "heads that flex attention refuses",
        "refused",
        "flex_attention.py:_run",
        "titan_moe.ops.flex_attention:takes",
        lambda takes: lambda *heads: True,
        layout="cp=2",
        head_dim=8,
    ),
    Control(
        "heads that flash attention refuses",
        "refused",
        "varlen_attention.py:varlen_attention",
        "titan_moe.ops.varlen_attention:takes",
        lambda takes: lambda *heads: True,
        head_dim=20,
    ),
    Control(
        "a kernel that reads the host's memory",
        "wrong device",
        "move_rows_triton.py:copy_rows",
        "titan_moe.ops.move_rows:copy_rows",
        lambda copy_rows: lambda x_TD, source_R: copy_rows(x_TD, source_R.cpu()),
    ),
]
