"""A step's gradient is the sum of its pieces' gradients, and an expert that blew up is named."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.tiny import ROWS, global_batch, make_job, tiny
from titan_moe.runtime.ranks import run_on_ranks

FLOAT64 = 1e-12


def _batches(config, rows):
    from titan_moe.data.batch import Batch

    tokens, labels, documents = global_batch(1, config.vocab_size)
    names = [[f"{row}a", f"{row}b"] for row in range(ROWS)]
    return [
        Batch(tokens[at : at + 2], labels[at : at + 2], documents[at : at + 2], names[at : at + 2])
        for at in range(0, rows, 2)
    ]


def _model(family, **tables):
    import torch

    from titan_moe.debug.why.pieces import Pieces
    from titan_moe.distributed.parallelize import build_sharded_model

    job = make_job(family, **tables)
    config, device = tiny(job), torch.device("cpu")
    if family == "deepseek_v3":
        config = replace(config, num_mtp_layers=1)
    sharded = build_sharded_model(job, config, device=device, world_size=1)
    return sharded, Pieces(sharded, device)


def add_up_pieces(family, mask):
    """Relative difference between the step's gradient and the sum of its pieces', with the sum of
    all shares and of all losses."""
    import torch

    from titan_moe.data.tokenizer import ByteTokenizer
    from titan_moe.debug.why.explain import Study

    training = {"dtype": "float64", "mask_documents": mask, "seq_len": 32, "local_batch_size": 1}
    sharded, pieces = _model(family, training=training)
    batches = _batches(sharded.config, 4)
    study = Study(pieces, batches, ByteTokenizer())
    whole = {p: p.grad.clone() for _, p in sharded.named_parameters() if p.grad is not None}
    total = {p: torch.zeros_like(grad) for p, grad in whole.items()}
    along = pieces.along

    def adding():
        for parameter, grad in total.items():
            grad += parameter.grad
        return along()

    rows = study.rows()
    pieces.along = adding  # type: ignore[method-assign]
    parts = study.documents(rows, most=1000)
    off = max(float((total[p] - whole[p]).norm() / whole[p].norm()) for p in whole)
    loss = sum(part.loss * part.targets for part in parts if part.targets) / study.num_targets
    return {
        "off": off,
        "rows": sum(part.share for part in rows) - 1,
        "documents": sum(part.share for part in parts) - 1,
        "loss": loss / study.now.figures.loss - 1,
        "tokens": sum(token.loss for token in study.tokens.worst()[:1]) > study.now.figures.loss,
        "names": len(parts),
    }


@pytest.mark.parametrize(("family", "mask"), [("deepseek_v3", True), ("qwen3", False)])
def test_documents_and_balance_losses_add_up_to_the_step(family: str, mask: bool):
    (found,) = run_on_ranks(add_up_pieces, 1, family, mask)
    assert found["names"] > 6 and found["tokens"]
    for what in ("off", "rows", "documents", "loss"):
        assert abs(found[what]) < FLOAT64, (what, found)


def leave_out(family):
    """The step without two documents, beside the same step less these documents' gradients."""
    from titan_moe.debug.why.pieces import only, sequences, without

    sharded, pieces = _model(family)
    batches = _batches(sharded.config, 4)
    rows = sequences(batches)
    whole = pieces.sums(batches)
    pieces.keep()
    parts = {}
    for row, document in ((1, 0), (2, 1)):
        parts[row] = pieces.sums([only(rows[row], document)], balance=False)
        for parameter, grad in pieces._whole.items():
            grad -= parameter.grad
    left = pieces.sums(without(batches, {(1, 0), (2, 1)}))
    off = max(
        float((parameter.grad - grad).norm() / grad.norm())
        for parameter, grad in pieces._whole.items()
    )
    gone = sum(part.loss for part in parts.values())
    return off, (whole.loss - gone) / left.loss - 1, whole.num_targets - left.num_targets


def test_a_document_that_is_left_out_takes_its_gradient_along():
    ((off, loss, targets),) = run_on_ranks(leave_out, 1, "deepseek_v3")
    assert off < FLOAT64 and abs(loss) < FLOAT64 and targets > 0


def blow_up(layer, expert):
    """An expert with large weights: what an explanation of the step names, and what the step is
    without its output."""
    import torch

    from titan_moe.debug.why.places import expert_figures, layer_figures, norm_without_expert
    from titan_moe.debug.why.usual import from_sums

    sharded, pieces = _model("deepseek_v3")
    batches = _batches(sharded.config, 4)
    before = from_sums(pieces.sums(batches))
    weight = sharded.moe_layers()[layer].experts.w1
    with torch.no_grad():
        weight[expert] *= 30
        kept = {name: p.clone() for name, p in sharded.named_parameters()}
    now = from_sums(pieces.sums(batches))
    with pieces.without_output(layer, expert):
        silent = from_sums(pieces.sums(batches))
    again = from_sums(pieces.sums(batches))
    worst = expert_figures(now, before, [])[0]
    return {
        "named": (worst.layer, worst.expert),
        "layer": layer_figures(now, before)[0].name,
        "grown": now.figures.norm / before.figures.norm,
        "silent": norm_without_expert(silent.norms, layer, expert) / before.figures.norm,
        "same": again == now
        and all(torch.equal(p, kept[name]) for name, p in sharded.named_parameters()),
        "counts": sum(now.counts[layer]),
    }


def test_an_expert_that_blew_up_is_named_and_its_output_left_out():
    (found,) = run_on_ranks(blow_up, 1, "layers.2", 5)
    assert found["named"] == ("layers.2", 5) and found["layer"] == "layers.2"
    assert found["grown"] > 1.1 > 1.01 > found["silent"], found
    assert found["same"], "the model is as it was"
    assert found["counts"] == 4 * 32 * 2


def not_a_number():
    """A token whose embedding is NaN, in one sequence alone."""
    import json

    import torch

    from titan_moe.config.job_config import JobConfig
    from titan_moe.data.tokenizer import ByteTokenizer
    from titan_moe.debug.why import explain, words
    from titan_moe.debug.why.pieces import documents_of, sequences
    from titan_moe.debug.why.run import Run
    from titan_moe.debug.why.usual import from_sums
    from titan_moe.verify.report.why import why_page

    sharded, pieces = _model("deepseek_v3")
    batches = _batches(sharded.config, 6)
    for batch in batches:
        batch.tokens_BS[batch.tokens_BS == 95] = 94
    following = from_sums(pieces.sums(batches))
    batches[1].tokens_BS[1, 30] = 95
    with torch.no_grad():
        dict(sharded.named_parameters())["tok_embeddings.weight"][95] = float("nan")
    study = explain.Study(pieces, batches, ByteTokenizer())
    run = Run(Path("x"), 5, JobConfig(), None, {})
    found = explain._explanation(run, study, {}, following, 64)
    page = why_page(found, run)
    lines = words.lines(found)
    json.dumps(found.as_json(), allow_nan=False)
    inside = len(documents_of(sequences(batches)[3]))
    return found.rows[0].row, found.needed, inside, "not finite" in page, lines


def test_a_sequence_that_is_not_finite_is_left_out_whole():
    ((row, needed, inside, said, lines),) = run_on_ranks(not_a_number, 1)
    assert row == 3 and needed == inside and said
    assert any("The next batch on the same weights is usual" in line for line in lines)
    assert any(f"Without {needed} of" in line for line in lines)
