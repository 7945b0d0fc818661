"""Recompute by operation with compiled flex attention, which no dispatch mode sees into."""

import torch

from titan_moe.config.job_config import ActivationCheckpoint
from titan_moe.distributed.activation_checkpoint import KeptAttention, apply_activation_checkpoint
from titan_moe.models.decoder import Decoder
from titan_moe.models.registry import model_config
from titan_moe.ops.attention import AttentionCore, FlexCore

ROWS, SEQ_LEN = 2, 512


class Counted:
    """A core that counts its calls."""

    def __init__(self, core: AttentionCore) -> None:
        self.mask, self.core, self.calls = core.mask, core, 0

    def __call__(self, *args):
        self.calls += 1
        return self.core(*args)


def backward(mode: str, device: str, core: AttentionCore) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients, and how often attention ran."""
    counted = Counted(core)
    torch.manual_seed(0)
    with torch.device(device):
        model = Decoder(model_config("qwen3", "debugmodel_moe"), KeptAttention(counted))
        for parameter in model.parameters():
            parameter.data = torch.nn.init.normal_(parameter.data, std=0.02).bfloat16()
        section = ActivationCheckpoint(mode=mode, selective_ac_option="op")
        apply_activation_checkpoint(model, section)
        tokens_BS = torch.randint(0, 2048, (ROWS, SEQ_LEN))
        documents_BS = torch.randint(0, 2, (ROWS, SEQ_LEN)).cumsum(1).int() // 40
        positions_BS = torch.arange(SEQ_LEN).expand(ROWS, -1)
    model(tokens_BS, documents_BS, positions_BS).float().square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}, counted.calls


def test_compiled_attention_is_kept_and_gradients_are_those_of_no_recompute():
    layers = model_config("qwen3", "debugmodel_moe").num_layers
    core = FlexCore(mask_documents=True, compiled=True)
    expected, calls = backward("none", "cuda", core)
    assert calls == layers
    grads, calls = backward("selective", "cuda", core)
    assert calls == layers
    for name, grad in grads.items():
        assert (grad - expected[name]).norm() <= 1e-2 * expected[name].norm(), name
    _, calls = backward("full", "cuda", core)
    assert calls == 2 * layers
