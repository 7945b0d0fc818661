import pytest
import torch
from torch import nn

from titan_moe.checkpoint.tensors import model_tensors, optimizer_tensors


class _Toy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 4)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("bias_E", torch.ones(4))
        self.register_buffer("cache", torch.ones(4), persistent=False)


def test_model_tensors_are_parameters_and_persistent_buffers():
    model = _Toy()
    named = model_tensors([model])
    assert set(named) == {
        "model.linear.weight",
        "model.linear.bias",
        "model.frozen",
        "model.bias_E",
    }
    named["model.linear.bias"].zero_()
    assert not model.linear.bias.any()


def test_wrappers_do_not_change_names():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain, wrapped = _Toy(), _Toy()
    wrapped.linear = checkpoint_wrapper(wrapped.linear)
    assert set(model_tensors([wrapped])) == set(model_tensors([plain]))
    adam = torch.optim.AdamW(wrapped.parameters())
    assert "optimizer.linear.weight.exp_avg" in optimizer_tensors([wrapped], adam)


IMPLEMENTATIONS = [{"fused": True}, {"foreach": True}, {"foreach": False}, {"amsgrad": True}]


@pytest.mark.parametrize("options", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adam])
def test_created_state_is_torchs_own(optimizer_class, options):
    def stepped(create):
        model = _Toy()
        optimizer = optimizer_class(model.parameters(), lr=0.1, weight_decay=0.1, **options)
        if create:
            created = optimizer_tensors([model], optimizer)
            assert not any(tensor.any() for tensor in created.values())
        for parameter in model.parameters():
            parameter.grad = parameter.detach() + 1
        optimizer.step()
        return {**model_tensors([model]), **optimizer_tensors([model], optimizer)}

    created, own = stepped(True), stepped(False)
    assert created.keys() == own.keys()
    for name, tensor in own.items():
        assert torch.equal(tensor, created[name]), name
        assert tensor.dtype == created[name].dtype, name


def test_unknown_optimizers_are_refused():
    model = _Toy()
    with pytest.raises(TypeError, match="SGD"):
        optimizer_tensors([model], torch.optim.SGD(model.parameters()))
