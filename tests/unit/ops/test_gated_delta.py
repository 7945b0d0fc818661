"""The gated delta rule in chunks and its convolution, against one token after another."""

import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.support.operations import Operations
from titan_moe.ops import gated_delta
from titan_moe.ops.gated_delta import Recurrence, choose_rule, chunked_rule, fla_kernels, fla_rule
from titan_moe.ops.recomputed import short_convolution
from titan_moe.verify.gradients.cores import TokenByToken, recur, recur_additively

# Sequence length, chunk size, key heads, value heads of each, channels of keys, of values; and
# whether the channels of a key decay apart.
SHAPES = [
    (1, 64, 1, 1, 1, 1),
    (5, 1, 1, 2, 3, 2),
    (16, 4, 2, 1, 4, 4),
    (17, 4, 2, 2, 4, 6),
    (33, 16, 1, 3, 8, 5),
    (40, 64, 2, 2, 4, 6),
    (96, 7, 2, 1, 5, 3),
    (130, 64, 1, 2, 6, 4),
]
SHAPES = [(*shape, by_channel) for shape in SHAPES for by_channel in (False, True)]
# A shape, and whether writes erase: channels decay apart in the gated delta rule alone.
RULES = [(shape, erases) for shape in SHAPES for erases in (True, False)[: 2 - shape[-1]]]
BATCH = 3


def _rows(shape, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v, decay, beta, the rows before heads, and the state before the rows."""
    length, _, groups, each, keys, values, by_channel = shape
    torch.manual_seed(seed)
    heads = groups * each
    q, k = torch.randn(2, BATCH, length, groups, keys)
    v = torch.randn(BATCH, length, heads, values)
    # Some states hardly decay, others are gone after a token.
    decay = -torch.rand(BATCH, length, heads) * torch.logspace(-3, 1.5, heads)
    if by_channel:
        decay = decay[..., None] * torch.rand(BATCH, length, heads, keys)
    beta, state = torch.rand(BATCH, length, heads), torch.randn(BATCH, heads, keys, values)
    return [x.to(dtype).requires_grad_() for x in (q, k, v, decay, beta, state)]


@pytest.mark.parametrize("erases", [True, False])
def test_a_sequence_twice_as_long_takes_twice_the_work(erases: bool) -> None:
    work = []
    for length in (256, 512):
        *rows, _ = _rows((length, 4, 1, 2, 4, 4, False))
        with Operations() as operations:
            o, _ = chunked_rule(*rows, torch.arange(length)[None], chunk_size=4, erases=erases)
            torch.autograd.grad(o.sum(), rows)
        work.append(operations.num_bytes)
    assert work[1] < 2.01 * work[0]


def _documents(length: int, seed: int = 0) -> Tensor:
    """A row of one document, one of many, one of single tokens at its ends."""
    torch.manual_seed(seed)
    begins = torch.stack([torch.zeros(length), torch.rand(length) < 0.2, torch.zeros(length)])
    begins[2, [1 % length, length - 1]] = 1
    begins[:, 0] = 0
    return begins.cumsum(1).long()


def _places(documents: Tensor, *, continued: bool) -> Tensor:
    """Counts places token by token; if continued, documents began 7 tokens before the row."""
    places = torch.zeros_like(documents)
    places[:, 0] = 7 * continued
    for t in range(1, documents.shape[1]):
        same = documents[:, t] == documents[:, t - 1]
        places[:, t] = (places[:, t - 1] + 1) * same
    return places


def _slow(q, k, v, decay, beta, state, documents, *, erases: bool = True):
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    slow = recur if erases else recur_additively
    o, last = slow(*heads_first, documents, decay.transpose(1, 2), beta.mT, state)
    return o.transpose(1, 2), last


def _close(found: Tensor, wanted: Tensor, bound: float = 1e-12) -> None:
    assert found.shape == wanted.shape
    assert (found - wanted).norm() <= bound * wanted.norm().clamp_min(1e-3)


@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize(("shape", "erases"), RULES)
def test_chunked_rule_equals_the_recurrence_token_by_token(shape, erases: bool, continued: bool):
    rows, documents = _rows(shape), _documents(shape[0])
    *tensors, state = rows
    wanted = _slow(*tensors, state if continued else None, documents, erases=erases)
    places = _places(documents, continued=continued)
    # Without a document that goes on, a state before the row is there and is not seen.
    found = chunked_rule(*tensors, places, state, chunk_size=shape[1], erases=erases)
    upstream = [torch.randn_like(x) for x in wanted]
    inputs = rows if continued else tensors
    wanted_grads = torch.autograd.grad(wanted, inputs, upstream)
    for ours, theirs in zip(found, wanted, strict=True):
        _close(ours, theirs)
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs, upstream), wanted_grads, strict=True
    ):
        _close(ours, theirs)


@pytest.mark.parametrize("at", [1, 5, 16, 31])
def test_recurrent_state_continues_across_a_cut_sequence(at: int):
    rows, documents = _rows(SHAPES[8]), _documents(33)
    *tensors, state = rows
    places = _places(documents, continued=True)
    whole, last = chunked_rule(*tensors, places, state)
    first, between = chunked_rule(*(x[:, :at] for x in tensors), places[:, :at], state)
    second, end = chunked_rule(*(x[:, at:] for x in tensors), places[:, at:], between)
    _close(torch.cat([first, second], 1), whole)
    _close(end, last)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_short_convolution_equals_a_slow_loop(width: int, biased: bool):
    torch.manual_seed(0)
    x, weight = torch.randn(BATCH, 20, 6).double(), torch.randn(6, 1, width).double()
    bias = [torch.randn(6).double()] * biased
    upstream, documents = torch.randn_like(x), _documents(20)
    grads = []
    slow = TokenByToken(mask_documents=True)
    plain = Recurrence(chunked_rule, mask_documents=True)
    for core in (slow, plain):
        given = [each.clone().requires_grad_() for each in (x, weight, *bias)]
        y = core.convolve(*given[:2], core.mask(documents), *given[2:])
        grads.append([y, *torch.autograd.grad(y, given, upstream)])
    for theirs, ours in zip(*grads, strict=True):
        _close(ours, theirs)


def test_short_convolution_continues_across_a_cut_sequence():
    torch.manual_seed(0)
    x, weight = torch.randn(BATCH, 20, 6).double(), torch.randn(6, 1, 4).double()
    places = _places(_documents(20), continued=False)
    whole = short_convolution(x, weight, places)
    _close(short_convolution(x[:, 9:], weight, places[:, 9:], x[:, 6:9]), whole[:, 9:])


@pytest.mark.parametrize("masked", [False, True])
def test_recurrent_mask_counts_tokens_from_each_documents_start(masked: bool):
    documents = _documents(20)
    mask = Recurrence(chunked_rule, mask_documents=masked).mask(documents)
    wanted = documents if masked else torch.zeros_like(documents)
    assert torch.equal(mask.expand(BATCH, -1), _places(wanted, continued=False))


def test_rule_and_convolution_keep_only_their_arguments():
    *tensors, state = _rows(SHAPES[14])
    places, kept = _places(_documents(130), continued=False), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        chunked_rule(*tensors, places, state)
        short_convolution(tensors[2].flatten(2), torch.randn(8, 1, 4).double(), places)
    given = {x.data_ptr() for x in (*tensors, state, places)}
    assert len(kept) == 10 and sum(x.data_ptr() not in given for x in kept) == 1  # The weight.


def test_delta_rule_computes_16_bit_inputs_in_float32():
    *tensors, state = _rows(SHAPES[15], dtype=torch.bfloat16)
    places = _places(_documents(130), continued=True)
    o, last = chunked_rule(*tensors, places, state)
    wide, wide_last = chunked_rule(*(x.float() for x in tensors), places, state.float())
    assert o.dtype == torch.bfloat16 and last.dtype == torch.float32
    assert torch.equal(o, wide.bfloat16()) and torch.equal(last, wide_last)


# --- the kernels of fla ---


def _kernel(
    q, k, v, g, beta=None, initial_state=None, output_final_state=False, *,
    cu_seqlens, **options,
):  # fmt: skip
    """Computes fla's kernels by their documentation, one sequence after another."""
    erases = beta is not None
    assert len(q) == 1 and output_final_state
    assert options == ({"use_qk_l2norm_in_kernel": True} if erases else {"scale": 1})
    beta = beta if erases else torch.ones_like(g, dtype=v.dtype)
    assert q.shape == k.shape and q.shape[:3] == v.shape[:3] == g.shape[:3] == (*beta.shape,)
    assert cu_seqlens.dtype == torch.int64 and cu_seqlens[0] == 0 and cu_seqlens[-1] == q.shape[1]
    assert g.dtype == torch.float32 and q.dtype == v.dtype == beta.dtype
    outputs, states = [], []
    for n, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        assert begin < end
        own = (x[:, begin:end] for x in (q, k, v, g, beta))
        state = None if initial_state is None else initial_state[n : n + 1].to(v.dtype)
        o, state = _slow(*own, state, torch.zeros(1, end - begin), erases=erases)
        outputs.append(o)
        states.append(state)
    return torch.cat(outputs, 1), torch.cat(states)


@pytest.fixture
def installed(monkeypatch) -> Iterator[list[Tensor]]:
    """A stand-in for the package; yields the sequences that its kernels are called with."""
    called: list[Tensor] = []

    def kernel_for(ndim: int) -> Callable[..., tuple[Tensor, Tensor]]:
        def kernel(q, k, v, g, *args, **options) -> tuple[Tensor, Tensor]:
            assert g.ndim == ndim
            called.append(options["cu_seqlens"])
            return _kernel(q, k, v, g, *args, **options)

        return kernel

    names = "fla", "fla.ops", "fla.ops.gated_delta_rule", "fla.ops.kda", "fla.ops.simple_gla"
    modules = {name: ModuleType(name) for name in names}
    modules[names[2]].chunk_gated_delta_rule = kernel_for(3)  # type: ignore[attr-defined]
    modules[names[3]].chunk_kda = kernel_for(4)  # type: ignore[attr-defined]
    modules[names[4]].chunk_simple_gla = kernel_for(3)  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    fla_kernels.cache_clear()
    yield called
    fla_kernels.cache_clear()


@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize(("shape", "erases"), RULES[3:15])
def test_fla_kernels_get_the_start_of_each_document(
    installed, shape, erases: bool, continued: bool
):
    *tensors, state = rows = _rows(shape, dtype=torch.float32)
    places = _places(_documents(shape[0]), continued=continued)
    given = state if continued else None
    inputs = rows if continued else tensors
    found, wanted = (
        rule(*tensors, places, given, erases=erases) for rule in (fla_rule, chunked_rule)
    )
    grads = [torch.autograd.grad([o.sum(), last.sum()], inputs) for o, last in (found, wanted)]
    for ours, theirs in zip([*found, *grads[0]], [*wanted, *grads[1]], strict=True):
        _close(ours, theirs, 1e-4)


def test_layers_under_one_mask_share_the_tensor_of_their_documents(installed):
    """Each new one is a wait for the device, here and in the kernels."""
    *tensors, _ = _rows(SHAPES[4], dtype=torch.float32)
    places = _places(_documents(16), continued=False)
    for mask in (places, places, places.clone()):
        fla_rule(*tensors, mask)
    first, second, other = installed
    assert first is second and first is not other and torch.equal(first, other)


def test_fla_kernels_need_cuda_and_16_bits_and_at_most_256_channels(installed):
    assert choose_rule("cuda", torch.bfloat16, 256) is fla_rule
    assert choose_rule("cuda", torch.bfloat16, 264) is chunked_rule
    assert choose_rule("cuda", torch.float32, 64) is chunked_rule
    assert choose_rule("cpu", torch.bfloat16, 64) is chunked_rule


def test_without_fla_torch_computes_the_delta_rule(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    fla_kernels.cache_clear()
    assert choose_rule("cuda", torch.bfloat16, 64) is gated_delta.chunked_rule
    fla_kernels.cache_clear()
