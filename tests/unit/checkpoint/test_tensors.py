import pytest
import torch
from torch import nn

from titan_moe.checkpoint.tensors import model_tensors, optimizer_tensors
from titan_moe.config.job_config import Optimizer
from titan_moe.models.registry import model_config
from titan_moe.optim.optimizers import build_optimizer

MODEL = model_config("deepseek_v3", "gate")


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
    names = ("linear.weight", "linear.bias", "frozen", "bias_E")
    assert set(named) == {f"model.{name}" for name in names}
    named["model.linear.bias"].zero_()
    assert not model.linear.bias.any()


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_state_before_the_first_step_is_torchs_own_in_zeros(name, implementation):
    model, theirs = _Toy(), _Toy()
    config = Optimizer(name=name, implementation=implementation)
    ours = optimizer_tensors([model], build_optimizer(config, model.named_parameters(), MODEL))
    assert not any(tensor.any() for tensor in ours.values())
    options = {key: implementation == key for key in ("fused", "foreach")}
    trainable = [each for each in theirs.parameters() if each.requires_grad]
    stepped = getattr(torch.optim, name)(trainable, **options)
    for parameter in trainable:
        parameter.grad = parameter.detach() + 1
    stepped.step()
    expected = optimizer_tensors([theirs], stepped)
    assert ours.keys() == expected.keys()
    for key, tensor in expected.items():
        assert tensor.dtype == ours[key].dtype and tensor.shape == ours[key].shape, key


def test_an_optimizer_without_state_is_refused():
    model = _Toy()
    with pytest.raises(TypeError, match="AdamW has no state of"):
        optimizer_tensors([model], torch.optim.AdamW(model.parameters()))
