"""Steps of transformers with planted mistakes: the report explains each, and bad folders are
refused."""

import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.support.commands import run_command
from tests.support.paths import REPO
from titan_moe.verify.parity.check import cases
from titan_moe.verify.parity.oracle import Oracle, computing_in

Tensors = dict[str, Tensor]
_WRITER = runpy.run_path(str(REPO / "tests" / "foreign" / "write_step.py"))
_GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
_ROUTER = "model.layers.1.mlp.gate.weight"
_ADAMW = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
_TOKENS = torch.randint(0, 96, (4, 13), generator=torch.Generator().manual_seed(1))
_LABELS = _TOKENS[:, 1:].where(torch.arange(12) >= 2 * torch.arange(4)[:, None], -100)
_BATCH = _TOKENS[:, :-1].contiguous(), _LABELS.contiguous()
_MEAN = (_LABELS != -100).double() / 36


def _gradients(oracle: Oracle, weights_BS: Tensor) -> tuple[float, Tensors]:
    """Returns the weighted sum of a model's losses, and its gradients."""
    oracle.zero_grad()
    with computing_in(torch.float64):
        logits_BVS = oracle(_BATCH[0], None)[0].transpose(1, 2)
        loss_BS = cross_entropy(logits_BVS, _LABELS, ignore_index=-100, reduction="none")
        (loss := (loss_BS * weights_BS).sum()).backward()
    return loss.item(), _WRITER["gradients_of"](oracle.model)[0]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    case = next(case for case in cases() if str(case) == "qwen3: plain")
    with computing_in(torch.float64):
        return Oracle(case.settings, seed=0)


@pytest.fixture(scope="module")
def honest(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of a float64 model of transformers, beside a folder of its weights."""
    step, model, layers = tmp_path_factory.mktemp("foreign") / "step", oracle.model, Tensors()
    model.save_pretrained(step.parent / "model")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for number, layer in enumerate(model.model.layers):
        keep = lambda _, __, x, n=number: layers.update({f"layers.{n}": x.detach().clone()})  # noqa: E731
        layer.register_forward_hook(keep)
    loss, gradients = _gradients(oracle, _MEAN)
    _WRITER["write_tensors"](step, "gradients", gradients)
    save_file(layers, step / "activations.safetensors")
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
    torch.optim.AdamW(model.parameters(), **_ADAMW).step()
    _WRITER["write_tensors"](step, "updated", dict(model.named_parameters()))
    facts = {"program": "transformers", "version": "5", "layout": "dp=2,ep=4", "dtype": "float64"}
    _WRITER["write_facts"](
        step, *_BATCH, **facts, loss=loss, grad_norm=norm, max_norm=0.5, optimizer=_ADAMW
    )
    model.load_state_dict(before)
    return step


@pytest.fixture
def step(honest: Path, tmp_path: Path) -> Path:
    """A copy of the step, to plant a mistake in."""
    shutil.copytree(honest.parent, tmp_path, dirs_exist_ok=True)
    return tmp_path / "step"


def judge(step: Path, *words: str) -> tuple[int, str]:
    done = run_command("verify", "foreign", step, "--model", step.parent / "model", *words)
    return done.returncode, done.stdout + done.stderr


def change(step: Path, file: str, edit: Callable) -> None:
    """Edits the tensors or the facts of a file."""
    path = step / file
    if path.suffix == ".json":
        edit(facts := json.loads(path.read_text()))
        path.write_text(json.dumps(facts))
    else:
        edit(tensors := load_file(path))
        save_file({name: each.contiguous() for name, each in tensors.items()}, path)


def scaled(factor: float, pattern: str = "", rows: slice = slice(None)) -> Callable:
    return lambda tensors: [each[rows].mul_(factor) for n, each in tensors.items() if pattern in n]


def test_honest_step_agrees_in_all_parts(honest: Path) -> None:
    code, text = judge(honest, "--json")
    parts = {part["name"]: part for part in json.loads(text)}
    assert code == 0 and all(part["agrees"] for part in parts.values())
    assert [*parts] == ["step", "loss", "gradients", "norm", "clipping", "update", "layers"]
    assert len(parts["gradients"]["tensors"]) == 27
    assert max(each["error"] for each in parts["gradients"]["tensors"]) < 1e-10
    assert max(each["error"] for each in parts["update"]["tensors"]) < 1e-6


_FINGERPRINT = "the fingerprint of a sum"
_PLANTED = [
    (scaled(2, _GATE_UP, slice(3, 4)), "one expert's gradient doubled: 3, exactly 2, the fingerpr"),
    (scaled(2, _GATE_UP, slice(3, 4)), "layers.1.moe.experts.w1 (model.layers.1.mlp.experts.gate_"),
    (scaled(0.5, _GATE_UP, slice(2, 4)), "several experts' gradients halved: 2, 3 (ep rank 1), ex"),
    (scaled(36), "gradients  27 of 27 differ\n  a sum over 36 targets: not their mean:"),
    (scaled(1 / 4, "experts"), f"exactly 1/4, {_FINGERPRINT} not reduced, or averaged over ep:"),
    (scaled(1 / 8, "experts"), f"{_FINGERPRINT} not reduced, or averaged over dp x ep:"),
    (scaled(36 / 48), "  divided by 48 positions: not by 36 targets:"),
    (scaled(-0.3), "  of the same direction: -0.3 times:"),
    (scaled(0, _ROUTER), "  router detached: its gradient is zero:"),
    (scaled(-1, _ROUTER, slice(1)), "  of another direction:\n    layers.1.moe.router.gate.weight"),
]


@pytest.mark.parametrize(("edit", "says"), _PLANTED)
def test_report_explains_gradients(edit: Callable, says: str, step: Path) -> None:
    change(step, "gradients-0.safetensors", edit)
    code, text = judge(step)
    assert code == 1 and says in text, text


@pytest.mark.parametrize(
    ("factor", "decay", "says"),
    [
        (
            1,
            1e-3,
            "  weight decay 0.2 in place of 0.1:\n    output.weight (lm_head.weight): ratio ",
        ),
        (1, -1e-3, "  weight decay 0 in place of 0.1:"),
        (0.5, 0, "  learning rate 0.005 in place of 0.01:"),
        (0, 0, "  not updated:"),
    ],
)
def test_report_explains_an_update(factor: float, decay: float, says: str, step: Path) -> None:
    before = load_file(step.parent / "model" / "model.safetensors")["lm_head.weight"]

    def edit(tensors: Tensors) -> None:
        tensors["lm_head.weight"].sub_(before).mul_(factor).add_(before, alpha=1 - decay)

    change(step, "updated-0.safetensors", edit)
    code, text = judge(step)
    assert code == 1 and "update     1 of 27 differ" in text and says in text, text


def test_report_names_the_first_layer(step: Path) -> None:
    change(step, "activations.safetensors", scaled(1.1, "layers.1", slice(2, 3)))
    says = "layers.1 is the first that differs: 12 of 48 tokens, first at sequence 2, position 0"
    assert says in judge(step)[1]


def test_report_explains_norms_clipping_and_loss(step: Path) -> None:
    gradients = load_file(step / "gradients-0.safetensors")
    one_group = "a norm over one EP group: experts of ep rank 1, and all that is no expert"
    for says, rows in {one_group: slice(2, 4), "of no expert": slice(0)}.items():
        kept = [g[rows] if "experts" in name else g for name, g in gradients.items()]
        norm = torch.stack([gradient.norm() for gradient in kept]).norm().item()
        change(step, "foreign.json", lambda facts, norm=norm: facts.update(grad_norm=norm))
        code, text = judge(step)
        assert code == 1 and f"norm       differs, {says} (of its own gradients)" in text, text
        assert "clipping   differs, by that norm" in text and "gradients  all 27 agree" in text
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    change(step, "gradients-0.safetensors", scaled(0.5 / norm))
    change(step, "foreign.json", lambda facts: facts.update(loss=36 * facts["loss"]))
    text = judge(step)[1]
    assert "  clipped: written after clipping:" in text
    assert "loss       differs, a sum over 36 targets: not their mean: " in text


def test_report_explains_a_detached_router_and_what_follows(oracle: Oracle, step: Path) -> None:
    gate = oracle.model.model.layers[1].mlp.gate
    hook = gate.register_forward_hook(lambda _, __, out: tuple(each.detach() for each in out))
    _, gradients = _gradients(oracle, _MEAN)
    hook.remove()
    assert _ROUTER not in gradients
    save_file(gradients, step / "gradients-0.safetensors")
    change(step, "foreign.json", lambda facts: facts.update(no_gradient=[_ROUTER]))
    code, text = judge(step)
    assert code == 1 and "  router detached: no gradient:\n    layers.1.moe.router.gate" in text
    assert "  as the detached router makes it:" in text and "direction" not in text, text


def _of_parts(number: int, factor: float) -> Tensor:
    return torch.cat([x * (factor / x.sum()) for x in _MEAN.chunk(number)])


_LAST_TWO = torch.tensor([0, 0, 1, 1])[:, None]
_STEPS = [
    ("dp=2,ep=4", _MEAN * _LAST_TWO, "of rank 1's sequences alone: a sum over 2 ranks is missing"),
    ("dp=2,ep=4", _of_parts(2, 1 / 2), "a mean of 2 ranks' means: not the mean over all targets:"),
    ("", _MEAN * _LAST_TWO, "of microbatch 1's sequences alone: a sum over 2 microbatches is"),
    ("", _of_parts(4, 1 / 4), "a mean of 4 microbatches' means: not the mean over all targets:"),
    ("", _of_parts(4, 1), "a mean of 4 microbatches' means: not the mean over all targets, exact"),
]


@pytest.mark.parametrize(("layout", "weights_BS", "says"), _STEPS)
def test_report_explains_ranks_and_microbatches(
    oracle: Oracle, step: Path, layout: str, weights_BS: Tensor, says: str
) -> None:
    save_file(_gradients(oracle, weights_BS)[1], step / "gradients-0.safetensors")
    change(step, "foreign.json", lambda facts: facts.update(layout=layout))
    code, text = judge(step)
    assert code == 1 and f"  {says}" in text and "direction" not in text, text


def test_ranks_may_hold_parts_and_copies(step: Path) -> None:
    gradients = load_file(step / "gradients-0.safetensors")
    missing = "  ranks hold different copies: a sum over ranks is missing:\n    output.weight"
    for factors, says in ([1] * 4, "all 27 agree"), ([0.1, 0.2, 0.3, 0.4], missing):
        for rank in range(4):
            rows, part = slice(2 * rank, 2 * rank + 2), dict(gradients)
            part |= {n: g[rows].contiguous() for n, g in gradients.items() if "experts" in n}
            part["lm_head.weight"] = gradients["lm_head.weight"] * factors[rank]
            first = {"rows": json.dumps({name: 2 * rank for name in part if "experts" in name})}
            save_file(part, step / f"gradients-{rank}.safetensors", first)
        assert says in judge(step)[1]


def test_report_in_16_bits_asks_for_float32(step: Path) -> None:
    change(step, "foreign.json", lambda facts: facts.update(dtype="bfloat16"))
    code, text = judge(step)
    assert code == 0 and text.splitlines()[0].endswith("mistakes, hand in float32"), text


def test_copies_may_differ_by_rounding(step: Path) -> None:
    gradients = load_file(step / "gradients-0.safetensors")
    for noise, says in (1e-15, "all 27 agree"), (1e-8, "27 of 27 differ\n  ranks hold different"):
        copies = {name: each + noise * each.norm() for name, each in gradients.items()}
        save_file(copies, step / "gradients-1.safetensors")
        assert f"gradients  {says}" in judge(step)[1]


def test_frozen_parameters_have_no_update_and_wrapped_ones_their_names(step: Path) -> None:
    before = load_file(step.parent / "model" / "model.safetensors")[_ROUTER]
    change(step, "gradients-0.safetensors", lambda tensors: tensors.pop(_ROUTER))
    change(step, "foreign.json", lambda facts: facts.update(no_gradient=[_ROUTER]))
    change(step, "updated-0.safetensors", lambda tensors: tensors.update({_ROUTER: before}))
    for kind in "gradients", "updated":
        held = load_file(step / f"{kind}-0.safetensors")
        names = {name: name.replace("s.1.", "s.1._checkpoint_wrapped_module.") for name in held}
        wrapped = {f"module._orig_mod.{names[name]}": each for name, each in held.items()}
        _WRITER["write_tensors"](step, kind, wrapped)
    code, text = judge(step)
    assert code == 1 and "gradients  1 of 27 differ" in text, text
    assert "update     all 27" in text and "agree, worst 1.0e+00" not in text, text


_BAD: dict[str, list[tuple[Callable, str]]] = {
    "gradients-0.safetensors": [
        (
            lambda t: t.update(lost=t.pop(_ROUTER)),
            f"1 tensor missing: {_ROUTER}; 1 tensor of no use",
        ),
        (
            lambda t: t.update({_ROUTER: t[_ROUTER][1:]}),
            f"shape: {_ROUTER} [7, 32] (wanted [8, 32])",
        ),
        (
            lambda t: t[_ROUTER].fill_(torch.nan),
            f"0.safetensors: {_ROUTER} has values that are NaN",
        ),
        (lambda t: t.update({_ROUTER: t[_ROUTER].long()}), f"{_ROUTER} is torch.int64: write floa"),
        (lambda t: t.update({_ROUTER: t[_ROUTER].bfloat16()}), "bfloat16: write float64 or finer"),
    ],
    "updated-0.safetensors": [
        (lambda t: t.pop("lm_head.weight"), "tensor missing: lm_head.weight")
    ],
    "activations.safetensors": [
        (lambda t: t.update({"layers.2": t.pop("layers.1")}), "of no use to this model: layers.2"),
        (
            lambda t: t.update({"layers.0": t["layers.0"][1:]}),
            "shape: layers.0 [3, 12, 32] (wanted",
        ),
    ],
    "batch.safetensors": [
        (lambda t: t.pop("labels"), "batch.safetensors holds tokens torch.int64 [4, 12]: write "),
        (lambda t: t.update(tokens=t["tokens"].int()), "tokens torch.int32 [4, 12]"),
        (lambda t: t.update(tokens=t["tokens"][1:]), "tokens torch.int64 [3, 12]"),
        (lambda t: t["tokens"][0, 0].fill_(96), "an id is outside of the vocabulary of 96: [96]"),
        (lambda t: t["labels"][0].fill_(-100), "24 targets, but num_targets=36; write the batch"),
        (
            lambda t: t.update(labels=t["tokens"].where(_LABELS >= 0, -100)),
            "labels are tokens: shi",
        ),
    ],
    "foreign.json": [
        (lambda t: t.update(lost=1), "lost = 1 ({step}/foreign.json): no such key"),
        (lambda t: t.update(dtype="int8"), 'dtype = "int8" ({step}/foreign.json): must be '),
        (lambda t: t["optimizer"].update(eps=0), "optimizer.eps = 0 ({step}/foreign.json): must"),
        (lambda t: t.update(grad_norm=-1), "grad_norm = -1 ({step}/foreign.json): must be greater"),
        (
            lambda t: t.update(layout="ep:2"),
            'layout = "ep:2" ({step}/foreign.json): write each axis',
        ),
        (
            lambda t: t.update(layout="dp=2,dp=4"),
            'layout = "dp=2,dp=4" ({step}/foreign.json): write',
        ),
        (lambda t: t.pop("loss"), "loss ({step}/foreign.json): is required"),
        (lambda t: t.update(no_gradient=["lost"]), "1 tensor of no use to this model: lost; writ"),
    ],
}


@pytest.mark.parametrize("file", _BAD)
def test_bad_folder_is_refused_in_a_line(file: str, step: Path) -> None:
    whole = (step / file).read_bytes()
    for edit, says in _BAD[file]:
        change(step, file, edit)
        code, text = judge(step)
        assert code == 2 and text.count("\n") == 1 and says.format(step=step) in text, text
        (step / file).write_bytes(whole)
    (step / file).unlink()
    assert judge(step)[0] == (0 if file.startswith(("updated", "activations")) else 2)


def test_first_rows_that_are_no_numbers_are_refused(step: Path) -> None:
    file = step / "gradients-0.safetensors"
    for rows in ("{", '{"lm_head.weight": "first"}', '{"lm_head.weight": -1}'):
        save_file(load_file(file), file, {"rows": rows})
        code, text = judge(step)
        assert code == 2 and text.count("\n") == 1 and f"rows={rows}: write first rows" in text, (
            text
        )


def test_updated_parameters_without_an_optimizer_are_refused(step: Path) -> None:
    facts = json.loads((step / "foreign.json").read_text())
    (step / "foreign.json").write_text(json.dumps(facts | {"optimizer": None}))
    code, text = judge(step)
    assert code == 2 and "optimizer=null beside updated parameters" in text, text
