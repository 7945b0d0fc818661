"""Steps of transformers with planted mistakes: the report explains each, and bad folders are
refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.foreign.write_step import gradients_of, write_facts, write_tensors
from tests.support.commands import run_command
from titan_moe.verify.parity.check import cases
from titan_moe.verify.parity.oracle import Oracle, computing_in

Tensors = dict[str, Tensor]
_GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
_ROUTER = "model.layers.1.mlp.gate.weight"
_OPTIMIZER = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
_STEP, _MODEL = "step", "model"


def _batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 96, (4, 13), generator=torch.Generator().manual_seed(1))
    labels = tokens[:, 1:].clone()
    for row in range(4):
        labels[row, : 2 * row] = -100
    return tokens[:, :-1].contiguous(), labels


def _gradients(oracle: Oracle, weights_BS: Tensor) -> tuple[float, Tensors]:
    """Returns the weighted sum of their losses, and its gradients."""
    tokens, labels = _batch()
    oracle.zero_grad()
    with computing_in(torch.float64):
        logits = oracle(tokens, None)[0].transpose(1, 2)
        loss_BS = cross_entropy(logits, labels, ignore_index=-100, reduction="none")
        (loss := (loss_BS * weights_BS).sum()).backward()
    return loss.item(), gradients_of(oracle.model)[0]


def _mean() -> Tensor:
    asked = (_batch()[1] != -100).double()
    return asked / asked.sum()


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    case = next(case for case in cases() if str(case) == "qwen3: plain")
    with computing_in(torch.float64):
        return Oracle(case.settings, seed=0)


@pytest.fixture(scope="module")
def honest(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of a float64 model of transformers, and the folder of its weights."""
    folder, model, layers = tmp_path_factory.mktemp("foreign"), oracle.model, dict[str, Tensor]()
    oracle.model.save_pretrained(folder / _MODEL)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    hooks = [
        layer.register_forward_hook(
            lambda _, __, out, n=number: layers.update({f"layers.{n}": out.detach().clone()})
        )
        for number, layer in enumerate(model.model.layers)
    ]
    loss, gradients = _gradients(oracle, _mean())
    for hook in hooks:
        hook.remove()
    step = folder / _STEP
    write_tensors(step, "gradients", gradients)
    adamw = torch.optim.AdamW(model.parameters(), **_OPTIMIZER)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
    adamw.step()
    write_tensors(step, "updated", dict(model.named_parameters()))
    save_file(layers, step / "activations.safetensors")
    facts = {"program": "transformers", "version": "5", "layout": "dp=2,ep=4", "dtype": "float64"}
    facts |= {"loss": loss, "grad_norm": norm, "max_norm": 0.5, "optimizer": _OPTIMIZER}
    write_facts(step, *_batch(), **facts)
    model.load_state_dict(before)
    return folder


@pytest.fixture
def step(honest: Path, tmp_path: Path) -> Path:
    """A copy of the step, to plant a mistake in."""
    shutil.copytree(honest, tmp_path, dirs_exist_ok=True)
    return tmp_path / _STEP


def judge(step: Path, *words: str) -> tuple[int, str]:
    done = run_command("verify", "foreign", step, "--model", step.parent / _MODEL, *words)
    return done.returncode, done.stdout + done.stderr


def change(step: Path, file: str, edit: Callable[[Tensors], object]) -> None:
    path = step / f"{file}.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def change_facts(step: Path, **facts: object) -> None:
    path = step / "foreign.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def test_honest_step_agrees_in_all_parts(honest: Path) -> None:
    code, text = judge(honest / _STEP, "--json")
    parts = {part["name"]: part for part in json.loads(text)}
    assert code == 0 and all(part["agrees"] for part in parts.values())
    assert [*parts] == ["step", "loss", "gradients", "norm", "clipping", "update", "layers"]
    assert (
        len(parts["gradients"]["tensors"]) == 27
        and "all 27 agree" in parts["gradients"]["lines"][0]
    )
    assert max(each["error"] for each in parts["gradients"]["tensors"]) < 1e-10
    assert max(each["error"] for each in parts["update"]["tensors"]) < 1e-6


def scaled(factor: float, pattern: str = "", rows: slice = slice(None)) -> Callable:
    def edit(tensors: Tensors, before: Tensors) -> None:
        for name in tensors:
            if pattern in name:
                tensors[name][rows] *= factor

    return edit


def added(factor: float, decay: float) -> Callable:
    """An edit that scales what was added to the output layer, and lets it decay more."""

    def edit(tensors: Tensors, before: Tensors) -> None:
        old = before["lm_head.weight"]
        tensors["lm_head.weight"].sub_(old).mul_(factor).add_(old, alpha=1 - decay)

    return edit


_PLANTED = {
    "one expert doubled": (
        ("gradients-0", scaled(2, _GATE_UP, slice(3, 4))),
        "one expert's gradient doubled: 3, exactly 2, the fingerprint of a sum reduced twice",
        "    layers.1.moe.experts.w1 (model.layers.1.mlp.experts.gate_up_proj): ratio ",
        "gradients  2 of 27 differ, worst of the others ",
    ),
    "the experts of a rank halved": (
        ("gradients-0", scaled(0.5, _GATE_UP, slice(2, 4))),
        "several experts' gradients halved: 2, 3 (ep rank 1), exactly 1/2, the fingerprint of a ",
    ),
    "a sum": (("gradients-0", scaled(36)), "  a sum over 36 targets: not their mean:", "27 of 27"),
    "experts divided by ep": (
        ("gradients-0", scaled(1 / 4, "experts")),
        "  exactly 1/4, the fingerprint of a sum not reduced, or averaged over ep:",
        "6 of 27 differ",
    ),
    "experts divided by all ranks": (("gradients-0", scaled(1 / 8, "experts")), "over dp x ep:"),
    "a mean over positions": (
        ("gradients-0", scaled(36 / 48)),
        "divided by 48 positions: not by 36 targets",
    ),
    "an odd factor": (("gradients-0", scaled(-0.3)), "of the same direction: -0.3 times"),
    "a router of zeros": (
        ("gradients-0", scaled(0, _ROUTER)),
        "  router detached: its gradient is zero:",
    ),
    "another direction": (
        ("gradients-0", scaled(-1, _ROUTER, slice(1))),
        "  of another direction:",
        "layers.1.moe.router.gate.weight",
    ),
    "an output": (
        ("activations", scaled(1.1, "layers.1", slice(2, 3))),
        "layers.1 is the first that differs: 12 of 48 tokens, first at sequence 2, position 0",
    ),
    "weight decay doubled": (
        ("updated-0", added(1, 1e-3)),
        "  weight decay 0.2 in place of 0.1:",
        "    output.weight (lm_head.weight): ratio",
    ),
    "no weight decay": (("updated-0", added(1, -1e-3)), "  no weight decay:"),
    "half the learning rate": (("updated-0", added(0.5, 0)), "learning rate 0.005 in place of "),
    "no update": (("updated-0", added(0, 0)), "  not updated:"),
}


@pytest.mark.parametrize("name", _PLANTED)
def test_report_explains_a_planted_mistake(name: str, step: Path) -> None:
    (file, edit), *says = _PLANTED[name]
    before = load_file(step.parent / _MODEL / "model.safetensors")
    change(step, file, lambda tensors: edit(tensors, before))
    code, text = judge(step)
    assert code == 1 and all(words in text for words in says), text


def test_report_explains_norms(step: Path) -> None:
    gradients = load_file(step / "gradients-0.safetensors")
    sets = {
        "a norm over one EP group: experts of ep rank 1, and all that is no expert": slice(2, 4),
        "of no expert (of its own gradients)": slice(0),
    }
    for says, rows in sets.items():
        kept = [g[rows] if "experts" in name else g for name, g in gradients.items()]
        change_facts(step, grad_norm=torch.stack([g.norm() for g in kept]).norm().item())
        code, text = judge(step)
        assert code == 1 and f"norm       differs, {says}" in text, text
        assert "clipping   differs, by that norm" in text and "gradients  all 27 agree" in text
    change_facts(step, max_norm=None)
    change(step, "gradients-0", lambda tensors: scaled(0.5)(tensors, {}))
    assert "halved: exactly 1/2" in judge(step)[1]


def test_report_explains_clipped_gradients_and_a_summed_loss(step: Path) -> None:
    facts = json.loads((step / "foreign.json").read_text())
    clip = facts["max_norm"] / facts["grad_norm"]
    change(step, "gradients-0", lambda tensors: scaled(clip)(tensors, {}))
    change_facts(step, loss=36 * facts["loss"])
    text = judge(step)[1]
    assert "  clipped: written after clipping:" in text
    assert "loss       differs, a sum over 36 targets: not their mean: " in text


def test_report_explains_a_detached_router_and_what_follows(oracle: Oracle, step: Path) -> None:
    gate = oracle.model.model.layers[1].mlp.gate
    frozen = gate.weight.requires_grad_(False)
    hook = gate.register_forward_hook(lambda _, __, out: tuple(each.detach() for each in out))
    _, gradients = _gradients(oracle, _mean())
    hook.remove()
    frozen.requires_grad_(True)
    assert _ROUTER not in gradients
    save_file(gradients, step / "gradients-0.safetensors")
    change_facts(step, no_gradient=[_ROUTER])
    code, text = judge(step)
    assert code == 1 and "  router detached: no gradient:\n    layers.1.moe.router.gate" in text
    assert "  as the detached router makes it:" in text and "direction" not in text, text


@pytest.mark.parametrize(
    ("rows", "mean", "says"),
    [
        (slice(2, 4), False, "of rank 1's sequences alone: a sum over 2 ranks is missing"),
        (slice(2, 4), True, "of rank 1's sequences alone: a sum over 2 ranks is missing, of the "),
        (slice(4), True, "a mean of 2 ranks' means: not the mean over all targets"),
    ],
)
def test_report_explains_sequences(
    oracle: Oracle, step: Path, rows: slice, mean: bool, says: str
) -> None:
    weights = torch.zeros_like(_mean())
    weights[rows] = _mean()[rows]
    if mean:
        ranks_RT = weights.view(2, -1)
        weights = (ranks_RT / ranks_RT.sum(1, keepdim=True).clamp(min=1e-9) / 2).view_as(weights)
    save_file(_gradients(oracle, weights)[1], step / "gradients-0.safetensors")
    code, text = judge(step)
    assert code == 1 and f"  {says}" in text and "another direction" not in text, text


def test_ranks_may_hold_parts_and_copies(oracle: Oracle, step: Path) -> None:
    gradients = load_file(step / "gradients-0.safetensors")
    for rank in range(4):
        rows = slice(2 * rank, 2 * rank + 2)
        part = {n: g[rows].contiguous() if "experts" in n else g for n, g in gradients.items()}
        first = {"rows": json.dumps({name: 2 * rank for name in part if "experts" in name})}
        save_file(part, step / f"gradients-{rank}.safetensors", first)
    assert judge(step)[0] == 0
    part = {name: g * 2 if "norm" in name else g for name, g in part.items()}
    save_file(part, step / "gradients-3.safetensors", first)
    code, text = judge(step)
    assert code == 1 and "  ranks hold different copies:" in text


def _renamed(tensors: Tensors) -> None:
    tensors["model.layers.7.mlp.gate.weight"] = tensors.pop(_ROUTER)


_BAD = {
    "gradients-0": [
        (_renamed, "1 tensor missing: model.layers.1.mlp.gate.weight; 1 tensor of no use to this "),
        (
            lambda t: t.update({_ROUTER: t[_ROUTER][1:]}),
            f"shape: {_ROUTER} [7, 32] (wanted [8, 32])",
        ),
        (
            lambda t: t[_ROUTER].fill_(torch.nan),
            f"0.safetensors: {_ROUTER} has values that are NaN",
        ),
        (
            lambda t: t.update({_ROUTER: t[_ROUTER].long()}),
            f"{_ROUTER} is torch.int64: write floa",
        ),
    ],
    "updated-0": [(lambda t: t.pop("lm_head.weight"), "1 tensor missing: lm_head.weight")],
    "activations": [
        (
            lambda t: t.update({"layers.2": t.pop("layers.1")}),
            "1 tensor of no use to this model: la",
        ),
        (
            lambda t: t.update({"layers.0": t["layers.0"][:, 1:].contiguous()}),
            "shape: layers.0 [4, 11, 32] (want",
        ),
    ],
    "batch": [
        (lambda t: t.pop("labels"), "batch.safetensors holds tokens torch.int64 [4, 12]: write "),
        (lambda t: t.update(tokens=t["tokens"].int()), "holds labels torch.int64 [4, 12], tokens "),
        (
            lambda t: t.update(tokens=t["tokens"][:3]),
            "tokens torch.int64 [3, 12]: write tokens and",
        ),
        (
            lambda t: t["tokens"][0, 0].fill_(96),
            "an id is outside of the vocabulary of 96: [96]; wr",
        ),
        (
            lambda t: t["labels"][0].fill_(-100),
            "30 targets, but num_targets=36; write the batch of ",
        ),
        (
            lambda t: t["labels"].copy_(t["tokens"].where(t["labels"] >= 0, -100)),
            "labels are tokens: shift them by one",
        ),
    ],
    "foreign": [
        (lambda t: t.update(lost=1), "lost = 1 ({folder}/foreign.json): no such key"),
        (lambda t: t.update(dtype="int8"), 'dtype = "int8" ({folder}/foreign.json): must be '),
        (lambda t: t.update(layout="ep:2"), 'layout = "ep:2" ({folder}/foreign.json): '),
        (lambda t: t.pop("loss"), "loss ({folder}/foreign.json): is required"),
        (lambda t: t.update(no_gradient=["lost"]), "1 tensor of no use to this model: lost; list"),
    ],
}


@pytest.mark.parametrize("file", _BAD)
def test_bad_folder_is_refused_in_a_line(file: str, step: Path) -> None:
    path = step / ("foreign.json" if file == "foreign" else f"{file}.safetensors")
    whole = path.read_bytes()
    for edit, says in _BAD[file]:
        path.write_bytes(whole)
        if file == "foreign":
            facts = json.loads(whole)
            edit(facts)
            path.write_text(json.dumps(facts))
        else:
            change(step, file, edit)
        code, text = judge(step)
        assert code == 2 and text.count("\n") == 1 and says.format(folder=step) in text, text
    path.unlink()
    if file != "updated-0":
        assert judge(step)[0] == (0 if file == "activations" else 2)
