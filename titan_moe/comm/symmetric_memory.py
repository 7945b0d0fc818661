"""Exchanges of rows whose sizes stay on the device, through torch's symmetric memory.

`torch.ops.symm_mem.all_to_all_vdev` is given how many rows go to each rank as a tensor on the
device. Every rank writes its rows into a buffer that its peers can read, the ranks of the group
tell each other sizes and offsets in one kernel that ends with a barrier, and a second kernel reads
the peers' rows. The host learns nothing and waits for nothing.

Two rules follow from peers reading what a rank wrote, and they hold without a further barrier
because all exchanges of a group run in one order on one stream:

- A send buffer is written again only two exchanges later. The barrier of the next exchange on the
  same buffers says that all peers have read it.
- The places for the received sizes, which the peers write, follow the same rule.

The backend is NVSHMEM: its memory is allocated by all ranks of the world together, in one order and
of one size, so buffers are made once, when the model is built, and never grow.

Without CUDA an emulation of the same signature stands in, over the group's own all-to-all. It
checks what torch's kernel assumes, and fills unwritten memory with rubbish. It has not been
compared with hardware.
"""

import warnings
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from titan_moe.config.errors import ConfigError

ROW_BYTES = 64
"""Divisor of a row's bytes. Up to this many thread blocks share the rows from one rank, and torch's
kernel gives all of them the same number of bytes."""

_KEY = "parallelism.expert_parallel_comm_backend=symmetric"


def check_available(device: torch.device) -> None:
    """Raises ConfigError where a GPU run cannot use these exchanges. A CPU emulates them for the
    gate; a training on a CPU is refused elsewhere."""
    if device.type != "cuda":
        return
    import torch.distributed._symmetric_memory as symm_mem

    if not symm_mem.is_nvshmem_available():
        raise ConfigError(
            f"{_KEY}: NVSHMEM is not found: install nvidia-nvshmem-cu12 or -cu13, or "
            "choose deduplicated or standard"
        )


class Channel:
    """Exchanges rows over one group, up to a number and a width. Collective over the world: all
    ranks make their channels in the same order and of the same sizes.

    Memory: three times `num_rows` rows.

    Args:
        num_rows: the most that a rank sends, and the most that it receives.
        width: elements of a row; a buffer's row is the next multiple of `ROW_BYTES`.
    """

    def __init__(
        self,
        group: ProcessGroup,
        num_rows: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        stream: "torch.cuda.Stream | None",
    ) -> None:
        self.num_rows, self.width = num_rows, width
        self._group, self._stream = group, stream
        self._done: dict[int, torch.cuda.Event] = {}
        self._exchange: Callable[..., None] = torch.ops.symm_mem.all_to_all_vdev
        if device.type != "cuda":
            self._exchange = Emulation(group)
        new = partial(_allocate, device=device, group=group)
        unit = ROW_BYTES // dtype.itemsize
        shape, ranks = (num_rows, -(-width // unit) * unit), group.size()
        self._received = new(shape, dtype)
        # The buffers that two consecutive exchanges write to: rows to send, and both sizes.
        turns = [
            (new(shape, dtype), new((ranks,), torch.int64), new((2, ranks), torch.int64))
            for _ in range(2)
        ]
        self._turns = cycle(turns)

    def start(self, x_RD: Tensor, sent_P: Tensor, num_received: int) -> Tensor:
        """Send `sent_P[p]` consecutive rows to each rank p.

        Returns:
            A buffer of `num_received` rows. The first ones hold the received rows, in rank order.
        """
        width = x_RD.shape[1]
        # Made on the stream that it is used and freed on.
        rows_RD = x_RD.new_empty(num_received, width)
        send, in_splits, out_splits_offsets = next(self._turns)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            x_RD.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            send[: len(x_RD), :width].copy_(x_RD)
            in_splits.copy_(sent_P)
            name = self._group.group_name
            self._exchange(send, self._received, in_splits, out_splits_offsets, name)
            rows_RD.copy_(self._received[:num_received, :width])
            if self._stream is not None:
                self._done[_memory_of(rows_RD)] = self._stream.record_event()
        return rows_RD

    def wait(self, rows_RD: Tensor) -> Tensor:
        """Returns the rows of `start`, readable on the current stream."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_event(self._done.pop(_memory_of(rows_RD)))
        return rows_RD


def _memory_of(x: Tensor) -> int:
    """Returns a number for a tensor's memory, unique while the tensor lives. Empty and fake tensors
    share the address 0."""
    return x.untyped_storage()._cdata


class DeviceAllToAll(NamedTuple):
    """An all-to-all of rows, like `AllToAll`, whose sizes only the device knows."""

    channel: Channel
    sent_P: Tensor
    """int64: rows to each rank."""
    received_P: Tensor
    most_sent: int
    """Rows of the sent and of the received tensor. The last ones of either may be unused."""
    most_received: int

    def reverse(self) -> "DeviceAllToAll":
        return self._replace(
            sent_P=self.received_P,
            received_P=self.sent_P,
            most_sent=self.most_received,
            most_received=self.most_sent,
        )

    def start(self, x_RD: Tensor) -> Tensor:
        return self.channel.start(x_RD.contiguous(), self.sent_P, self.most_received)

    def wait(self, in_flight: Tensor) -> Tensor:
        return self.channel.wait(in_flight)


class Channels(NamedTuple):
    """Holds the channels that all layers of a rank share: for rows, and for routing weights, which
    have a single column and at least 32 bits."""

    rows: Channel
    weights: Channel


def open_channels(
    group: ProcessGroup, num_rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> Channels:
    """Makes the channels that all layers share. Collective over the world, as `Channel` is."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    wide = torch.promote_types(dtype, torch.float32)
    return Channels(
        Channel(group, num_rows, width, dtype, device, stream),
        Channel(group, num_rows, 1, wide, device, stream),
    )


def _allocate(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, group: ProcessGroup
) -> Tensor:
    """Returns zeros that every rank of the group can read and write."""
    if device.type != "cuda":
        return torch.zeros(shape, dtype=dtype, device=device)
    import torch.distributed._symmetric_memory as symm_mem

    if symm_mem.get_backend(device) != "NVSHMEM":
        symm_mem.set_backend("NVSHMEM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        buffer = symm_mem.empty(shape, dtype=dtype, device=device).zero_()
        symm_mem.rendezvous(buffer, group)
    return buffer


class Emulation:
    """Emulates `all_to_all_vdev` of one channel over a group's own all-to-all.

    Raises AssertionError where torch's kernel would read or write what it must not.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._last: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(
        self,
        input: Tensor,
        out: Tensor,
        in_splits: Tensor,
        out_splits_offsets: Tensor,
        group_name: str,
    ) -> None:
        ranks = self._group.size()
        assert group_name == self._group.group_name, "another group"
        assert in_splits.shape == (ranks,), "in_splits: one number for each rank"
        assert out_splits_offsets.shape == (2, ranks), "splits, then offsets"
        splits = in_splits, out_splits_offsets
        assert all(each.dtype is torch.int64 for each in splits), "sizes are int64"
        assert all(each.is_contiguous() for each in (input, out, *splits)), "gaps"
        assert input.dtype is out.dtype and input.stride(0) == out.stride(0), "unequal rows"
        assert input.stride(0) * input.element_size() % ROW_BYTES == 0, "rows of odd size"
        if self._last is not None:
            before, copy, places = self._last
            assert torch.equal(before.view(torch.uint8), copy.view(torch.uint8)), (
                "a send buffer was written while peers read it"
            )
            assert places.data_ptr() != out_splits_offsets.data_ptr(), (
                "received sizes were written while they were read"
            )
        received = torch.empty_like(in_splits)
        dist.all_to_all_single(received, in_splits, group=self._group)
        sent, sizes = in_splits.tolist(), received.tolist()
        assert sum(sent) <= len(input), "more rows than there are"
        assert sum(sizes) <= len(out), "more rows than the buffer holds"
        out.view(torch.uint8).fill_(0xFF)  # NaN in every type.
        dist.all_to_all_single(
            out[: sum(sizes)], input[: sum(sent)], sizes, sent, group=self._group
        )
        out_splits_offsets[0] = received
        out_splits_offsets[1] = received.cumsum(0) - received
        self._last = input, input.clone(), out_splits_offsets
