"""Copies of tied weights are compared every so many steps, beside replicas."""

import pytest
import torch
from torch import nn

from titan_moe.checkpoint import replicas
from titan_moe.checkpoint.replicas import ReplicaCheck
from titan_moe.runtime.errors import RunError


def test_copies_that_differ_stop_a_run_when_it_is_time(monkeypatch):
    copies = [["model.first.weight", "model.last.weight"]]
    monkeypatch.setattr(replicas, "tied_names", lambda config: copies)
    model = nn.ModuleDict({"first": nn.Linear(3, 2), "last": nn.Linear(3, 2)})
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    check = ReplicaCheck([model], None, optimizer, freq=2)
    check(1)
    with pytest.raises(
        RunError, match=r"^after step 2 first\.weight and its copies last\.weight are not the same"
    ):
        check(2)
    model["last"].load_state_dict(model["first"].state_dict())
    check(4)
