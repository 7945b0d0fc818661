"""Sparse attention in a whole model: what its indexer's loss trains, and packed documents."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.packing import filled, gradients, train_packed_and_alone
from titan_moe.checks.job import check
from titan_moe.config.job_config import JobConfig, Lora, Training
from titan_moe.models.attention import plain_core
from titan_moe.models.config import MLAConfig, ModelConfig
from titan_moe.models.decoder import Decoder
from titan_moe.models.registry import model_config
from titan_moe.models.stats import part_flops
from titan_moe.models.trained import freeze
from titan_moe.verify.gradients.reference import without_balance_losses

GATE = replace(model_config("deepseek_v32", "gate"), num_layers=3, num_mtp_layers=0)
GATE = without_balance_losses(GATE)


def sparse(**changes: object) -> ModelConfig:
    attention = GATE.attention
    assert isinstance(attention, MLAConfig) and attention.indexer is not None
    indexer = replace(attention.indexer, **changes)
    return replace(GATE, attention=replace(attention, indexer=indexer))


def built(config: ModelConfig, *, mask_documents: bool = True) -> Decoder:
    model = filled(config, plain_core(config, mask_documents=mask_documents))
    stage = "dense" if config.indexer.warm_up else "sparse"
    freeze(model, Training(indexer_stage=stage), Lora())
    return model


def drawn(length: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, GATE.vocab_size, (2, length), generator=generator)


def test_indexer_loss_trains_the_indexer_and_nothing_else():
    tokens = drawn(30)
    found = {}
    for indexer_learns in (True, False):
        model = built(GATE)
        for layer in model.layers.values():
            layer.attention.indexer.train(indexer_learns)
        model(tokens).square().sum().backward()
        found[indexer_learns] = gradients(model)
    with_loss, without = found[True], found[False]
    assert {name for name in with_loss if ".indexer." in name} == with_loss.keys() - without.keys()
    assert len(with_loss) - len(without) == 5 * GATE.num_layers
    assert all(torch.equal(with_loss[name], gradient) for name, gradient in without.items())


def test_evaluation_has_no_indexer_loss():
    model = built(GATE).eval()
    model(drawn(30)).sum().backward()
    assert all(not layer.attention.indexer.loss_sum for layer in model.layers.values())
    assert not any(".indexer." in name for name in gradients(model))


def test_warm_up_trains_indexers_alone_and_attends_to_all_keys():
    tokens = drawn(30)
    model, dense = built(sparse(warm_up=True)), built(sparse(top_k=30))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), dense(tokens), rtol=1e-13, atol=1e-13)
    model(tokens).square().sum().backward()
    assert gradients(model).keys() == {n for n, _ in model.named_parameters() if ".indexer." in n}


def test_packed_documents_are_trained_as_one_by_one():
    packed, alone = built(GATE), built(GATE, mask_documents=False)
    train_packed_and_alone(packed, alone, (1, 2, 13, 5))
    losses = (
        [layer.attention.indexer.loss_sum for layer in model.layers.values()]
        for model in (packed, alone)
    )
    torch.testing.assert_close(*losses, rtol=1e-11, atol=0)


@pytest.mark.parametrize("seq_len", [4, 6, 64])
def test_flop_counts_leave_out_keys_that_are_not_selected(seq_len: int):
    """The gate's top-k is 6."""
    layer = part_flops(GATE, seq_len)["layers.1"]
    more = part_flops(sparse(top_k=seq_len), seq_len)["layers.1"]
    left_out = sum(max(0, seen - 6) for seen in range(1, seq_len + 1)) / seq_len
    heads, channels = GATE.attention.num_heads, GATE.attention.qk_dim + GATE.attention.v_dim
    assert more - layer == pytest.approx(2 * heads * channels * left_out)


@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_sparse_attention_gathers_keys_over_cp(method: str) -> None:
    degrees = {"context_parallel_degree": 2, "context_parallel_rotate_method": method}
    model = {"name": "deepseek_v32", "flavor": "gate"}
    job = JobConfig.model_validate({"model": model, "parallelism": degrees})
    (line,) = check(job, model_config("deepseek_v32", "gate"), 2)
    assert line.startswith(f"parallelism.context_parallel_rotate_method={method}: an indexer of")


def test_stages_begin_with_layers_that_select_keys() -> None:
    """Layers 1, 3, 4, 6 and 7 share keys."""
    layers = [f"layers.{layer}" for layer in range(8)]
    model = {"name": "deepseek_v32", "flavor": "gate_shared"}
    found = []
    for cut in (None, 5, 4):
        degrees: dict[str, object] = {"pipeline_parallel_degree": 2}
        if cut is not None:
            parts = [["tok_embeddings", *layers[:cut]], [*layers[cut:], "norm", "output"]]
            degrees["module_fqns_per_model_part"] = parts
        job = JobConfig.model_validate({"model": model, "parallelism": degrees})
        found.append(check(job, model_config("deepseek_v32", "gate_shared"), 2))
    (line,), right, wrong = found
    assert "list stages in module_fqns_per_model_part" in line
    assert (right, wrong) == ([], [line])


def test_layers_that_share_keys_have_no_indexer() -> None:
    for number, layer in Decoder(model_config("deepseek_v32", "gate_shared")).layers.items():
        assert any("indexer" in n for n, _ in layer.named_parameters()) == (number in "025")
