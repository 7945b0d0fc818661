"""Multi-token prediction against its equations written out, token by token."""

import pytest
import torch
import torch.nn.functional as F

from titan_moe.data.batch import IGNORE_INDEX, Batch
from titan_moe.models.attention import plain_core
from titan_moe.models.config import (
    GQAConfig,
    IndexerConfig,
    MLAConfig,
    ModelConfig,
    RopeConfig,
    tied_weights,
)
from titan_moe.models.decoder import Decoder
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.router import update_routers
from titan_moe.training.train_step import look_ahead

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1, 2]])
# The next token, but at the end of a document; the row's last label lies beyond the row.
LABELS = torch.tensor([[1, 4, -100, 5, 9, 2, 6, 7], [3, 5, 8, 9, 7, -100, -100, 4]])


ROPE = RopeConfig(100.0)
SPARSE = MLAConfig(2, 12, 8, 8, 4, 6, ROPE, indexer=IndexerConfig(2, 8, top_k=2))


def _model(depths: int, *, sparse: bool = False, **balance: float) -> Decoder:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=11,
        dim=16,
        num_layers=2,
        attention=SPARSE if sparse else GQAConfig(2, 1, 8, ROPE),
        hidden_dim=24,
        moe=MoEConfig(num_experts=4, top_k=2, hidden_dim=8, normalize_top_k=True, **balance),
        num_dense_layers=1,
        num_mtp_layers=depths,
        mtp_loss_weight=0.3,
    )
    model = Decoder(config, plain_core(config, mask_documents=True)).double()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.4)
    for first, *copies in tied_weights(config):
        for copy in copies:
            model.get_parameter(copy).data.copy_(model.get_parameter(first).data)
    return model


def _slow_losses(model: Decoder, depths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums of cross-entropies of the decoder, and of all depths, arXiv 2412.19437, 21 to 25."""
    main, further = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for row in range(len(TOKENS)):
        tokens, documents = TOKENS[row : row + 1], DOCUMENTS[row : row + 1]
        length = tokens.shape[1]
        positions = torch.arange(length)[None]
        stream = model.tok_embeddings(tokens)
        rotation, mask = model.ropes[0](positions, stream.dtype), model.core.mask(documents)
        for block in model.layers.values():
            stream = block(stream, rotation, mask)
        hidden = model.norm(stream)
        for i in range(length):
            if LABELS[row, i] >= 0:
                main = main - model.output(hidden[0, i]).log_softmax(-1)[LABELS[row, i]]
        for depth, layer in enumerate(model.mtp.layers.values(), 1):
            both = []
            for i in range(length):
                token = tokens[0, i + depth] if i + depth < length else torch.tensor(0)
                embedded = layer.tok_embeddings(token)
                normed = [
                    F.rms_norm(x, x.shape, module.weight, module.eps)
                    for x, module in (
                        (embedded, layer.embedding_norm),
                        (hidden[0, i], layer.hidden_norm),
                    )
                ]
                both.append(layer.projection.weight @ torch.cat(normed))
            hidden = layer.norm(layer.block(torch.stack(both)[None], rotation, mask))
            for i in range(length - depth):
                label = LABELS[row, i + depth]
                if documents[0, i] == documents[0, i + depth] and label >= 0:
                    further = further - model.output(hidden[0, i]).log_softmax(-1)[label]
    return main, 0.3 / depths * further


@pytest.mark.parametrize("depths", [1, 2])
def test_mtp_losses_and_gradients_equal_the_equations(depths: int):
    model = _model(depths)
    ahead = look_ahead(Batch(TOKENS, LABELS, DOCUMENTS, [[], []]), depths)
    main = model(TOKENS, DOCUMENTS, None, LABELS, *ahead)
    main.backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    slow_main, slow_further = _slow_losses(model, depths)
    (slow_main + slow_further).backward()
    torch.testing.assert_close(main, slow_main)
    torch.testing.assert_close(model.mtp.loss_sum, slow_further.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, msg=name)


def test_an_evaluation_needs_no_tokens_ahead_and_counts_none():
    model = _model(1).eval()
    assert model(TOKENS, DOCUMENTS).shape == (*TOKENS.shape, 11)
    for moe in model.moe_layers().values():
        assert not moe.router.tokens_per_expert.any()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("depths", "targets"), [(1, [12]), (2, [12, 6])])
def test_positions_without_a_target_have_no_effect(depths: int, targets: list[int], sparse: bool):
    """Six documents of four tokens: a depth has two targets of each, the next depth one."""
    weights = {"sequence_aux_loss_weight": 0.1, "global_aux_loss_weight": 0.2, "z_loss_weight": 0.3}
    tokens = torch.randint(0, 11, (1, 24), generator=torch.Generator().manual_seed(0))
    documents = torch.arange(6).repeat_interleave(4)[None]
    labels = tokens.roll(-1, 1).masked_fill(torch.arange(24) % 4 == 3, IGNORE_INDEX)
    ahead_tokens, ahead_labels = look_ahead(Batch(tokens, labels, documents, [[]]), depths)
    found = []
    for filler in (3, 8):
        model = _model(depths, sparse=sparse, **weights)
        filled = ahead_tokens.masked_fill(ahead_labels == IGNORE_INDEX, filler)
        loss = model(tokens, documents, None, labels, filled, ahead_labels)
        loss.backward()
        routers = {n: moe.router for n, moe in model.moe_layers().items()}
        counts = {n: router.tokens_per_expert for n, router in routers.items()}
        for depth, number in enumerate(targets):
            assert counts[f"mtp.layers.{depth}.block"].sum() == 2 * number
        assert counts["layers.1"].sum() == 2 * 24
        assert all(router.balance_loss > 0 for router in routers.values())
        numbers = {f"balance loss of {n}": router.balance_loss for n, router in routers.items()}
        gradients = {name: p.grad for name, p in model.named_parameters()}
        found.append({"loss": loss, "further": model.mtp.loss_sum} | counts | numbers | gradients)
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-12, atol=1e-14, msg=name)


def test_documents_that_end_before_a_target_train_no_router():
    tokens, documents = TOKENS[:1], torch.arange(8)[None]
    labels = torch.full_like(tokens, IGNORE_INDEX)
    ahead = look_ahead(Batch(tokens, labels, documents, [[]]), 1)
    model = _model(1, sequence_aux_loss_weight=0.1, global_aux_loss_weight=0.2, z_loss_weight=0.3)
    model(tokens, documents, None, labels, *ahead).backward()
    moe = model.moe_layers()["mtp.layers.0.block"]
    assert moe.router.balance_loss == 0 and not moe.router.gate.weight.grad.any()
    assert not moe.router.tokens_per_expert.any()
    update_routers({"mtp": moe.router}, ["mtp"], moe.router.tokens_per_expert[None])
    assert (moe.router.previous_load == 0.25).all(), "the load of before stays"
    assert not moe.router.expert_bias.any()
