"""Lists known devices: figures of data sheets, and the shares of them that kernels reach.

Dense bf16 FLOP/s, memory and its bandwidth are those of the makers' data sheets. `link` is one
way to the other GPUs of a node (half of the "total bandwidth" of NVLink or Infinity Fabric; PCIe
for cards without), `network` a GPU's adapter in the maker's own servers (DGX A100: 200 Gb/s, later
ones 400 Gb/s).
"""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One device, its links to others, and what a program reaches of both."""

    name: str
    flops: float
    """Dense bf16 FLOP/s; of a CPU, FLOP/s of its products in float32."""
    memory: float
    """Bytes that a program may use."""
    bandwidth: float
    """Bytes/s of its memory."""
    link: float
    """Bytes/s one way to the devices of its node."""
    network: float
    """Bytes/s one way to other nodes."""
    node: int = 8
    """Devices of a node."""
    products: float = 0.70
    """Share of `flops` in large products: 650 to 700 TFLOP/s were seen on H100s."""
    experts: float = 0.55
    """Share in grouped products."""
    attention: float = 0.45
    """Share in attention: FlashAttention-2 reaches 0.35 on H100s, FlashAttention-3 0.65 (arXiv
    2407.08608, figure 5)."""
    reach: float = 0.80
    """Share of bandwidths that copies and collectives reach."""
    dispatch: float = 5e-6
    """Seconds of the host for one operation."""
    latency: float = 20e-6
    """Seconds of a collective without bytes; of a CPU, those of each of its rounds."""
    cores: int = 0
    """Cores of a CPU, one thread a rank, which all ranks share with its memory; 0: a GPU. The other
    figures are those of a rank that has a core for itself."""
    fresh: float = 1.0
    """Share of a CPU's bandwidth in memory whose pages the kernel has to clear."""


def _gpu(name: str, tflops: float, gib: float, tbs: float, link: float, **more: float) -> Device:
    """Returns an entry from TFLOP/s, GiB, TB/s and GB/s."""
    network = more.pop("network", 50.0) * 1e9
    return Device(name, tflops * 1e12, gib * GIB, tbs * 1e12, link * 1e9, network, **more)  # type: ignore[arg-type]


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("A100", 312, 79.0, 2.04, 300, network=25.0),
        _gpu("H100 NVL", 835, 93.0, 3.94, 300),
        _gpu("H100 PCIe", 756, 79.0, 2.04, 64),
        _gpu("H100", 989, 79.0, 3.35, 450),
        _gpu("H200", 989, 139.0, 4.8, 450),
        _gpu("GB200", 2500, 184.0, 8.0, 900, node=72),
        _gpu("B200", 2250, 178.0, 8.0, 900),
        _gpu("L40S", 362, 44.0, 0.86, 32),
        _gpu("MI300X", 1307, 191.0, 5.3, 448),
    )
}
"""Devices by name. The first whose words all occur in a GPU's CUDA name is meant: a family's
exceptions stand above it."""


def gpu_of(cuda_name: str) -> Device | None:
    """Returns the device of a GPU's CUDA name; None if it is not known."""
    known = (gpu for name, gpu in GPUS.items() if all(word in cuda_name for word in name.split()))
    return next(known, None)
