"""Who calls a kernel of ours, and who torch's operation for it."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import profile

from tests.support.operations import Operations
from titan_moe.ops.grouped_mm import grouped_mm
from titan_moe.ops.operation import KERNELS
from titan_moe.ops.permute_indices import permute_indices


def _gradients() -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=drawn).requires_grad_() for shape in ((6, 8), (2, 4, 8)))
    y = grouped_mm(x, w, torch.tensor([2, 6], dtype=torch.int32))
    (y * y).sum().backward()
    return [y.detach(), x.grad, w.grad]


def test_kernels_skip_torchs_dispatcher_unless_a_mode_watches():
    products = {"grouped_mm", "grouped_mm_grad_weights"}
    with profile() as profiled:
        _gradients()
    names = {event.name for event in profiled.events()}
    assert "aten::_grouped_mm" in names and not any("titan_moe::" in name for name in names)
    with Operations() as seen:
        _gradients()
    ours = {name for name in seen.calls if name.startswith("titan_moe.")}
    assert ours == {f"titan_moe.{name}" for name in products}
    assert products <= KERNELS.keys()


def test_an_operation_and_its_kernel_give_the_same_bits_and_gradients():
    directly = _gradients()
    with Operations():
        assert all(map(torch.equal, directly, _gradients()))


def test_operations_on_meta_tensors_return_meta_tensors():
    counts = torch.empty(3, 5, dtype=torch.int64, device="meta")
    assert permute_indices(counts, 7, 8).source_R.is_meta
    with FakeTensorMode() as mode:
        fake = torch.empty(3, 5, dtype=torch.int64, device="cuda")
    # After its mode as well: a kernel would be launched on memory that is not there.
    found = permute_indices(fake, 7, 8)
    assert found.source_R.fake_mode is mode and found.position_R.shape == (7,)
