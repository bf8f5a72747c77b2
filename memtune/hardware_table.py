"""Constants of known GPUs and of the nodes they usually stand in: field of `Hardware` → (value, source).

Rates are dense (no sparsity), with 32-bit accumulation, per direction. Memory is what torch reports as the total of such a
card, which is less than its name says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from memtune.measure import CpuRates
from memtune.units import GIB

Constants = Mapping[str, tuple[Any, str]]


class _Node(NamedTuple):
    """What a card stands in."""

    source: str
    pcie: float  # GB/s that pinned copies reach
    link: float  # GB/s per GPU and direction inside the node
    network: float  # GB/s per GPU and direction between nodes
    host: int  # GiB
    host_adam: float  # GB/s
    cores: int
    gpus: int


_HGX5 = _Node("typical 8-GPU HGX node, PCIe 5, 400 Gb/s per GPU", 55, 450, 50, 2048, 300, 112, 8)
_HGX4 = _Node("typical 8-GPU HGX A100 node, PCIe 4, 200 Gb/s per GPU", 25, 300, 25, 1024, 200, 128, 8)
_PCIE5 = _Node("typical 8-GPU server, PCIe 5 without NVLink, 100 Gb/s per node", 50, 40, 1.5, 1024, 250, 96, 8)
_PCIE4 = _Node("typical 8-GPU server, PCIe 4 without NVLink, 100 Gb/s per node", 25, 20, 1.5, 512, 150, 64, 8)
_DESK4 = _Node("typical workstation, PCIe 4, 10 Gb/s", 25, 12, 1.2, 128, 50, 16, 2)
_DESK5 = _Node("typical workstation, PCIe 5, 10 Gb/s", 50, 25, 1.2, 128, 60, 16, 2)
_DGX1 = _Node("typical DGX-1 V100 node, PCIe 3, 4 × 100 Gb/s", 12, 150, 6, 512, 100, 40, 8)


class _Card(NamedTuple):
    title: str
    memory: float  # GiB as torch reports it
    bf16: float  # TFLOP/s, as the next two
    tf32: float
    fp32: float
    bandwidth: float  # TB/s
    node: _Node
    fp16: float = 0.0  # TFLOP/s where it differs from bf16


_CARDS = {
    "h200": _Card("NVIDIA H200 SXM", 139.8, 989, 494, 67, 4.8, _HGX5),
    "h100-80g": _Card("NVIDIA H100 SXM 80 GB", 79.1, 989, 494, 67, 3.35, _HGX5),
    "h100-pcie": _Card("NVIDIA H100 PCIe 80 GB", 79.1, 756, 378, 51, 2.0, _PCIE5),
    "b200": _Card("NVIDIA B200", 178.3, 2250, 1125, 75, 7.7, _HGX5._replace(link=900)),
    "a100-80g": _Card("NVIDIA A100 SXM 80 GB", 79.2, 312, 156, 19.5, 2.039, _HGX4),
    "a100-40g": _Card("NVIDIA A100 SXM 40 GB", 39.4, 312, 156, 19.5, 1.555, _HGX4),
    "l40s": _Card("NVIDIA L40S", 44.4, 362, 183, 91.6, 0.864, _PCIE4),
    "l4": _Card("NVIDIA L4", 22.0, 121, 60, 30.3, 0.3, _PCIE4),
    "a10": _Card("NVIDIA A10", 22.0, 125, 62.5, 31.2, 0.6, _PCIE4),
    "rtx-4090": _Card("NVIDIA GeForce RTX 4090", 23.6, 165, 82.6, 82.6, 1.008, _DESK4),
    "rtx-5090": _Card("NVIDIA GeForce RTX 5090", 31.4, 209.5, 104.8, 104.8, 1.792, _DESK5),
    "rtx-3090": _Card("NVIDIA GeForce RTX 3090", 23.7, 71, 35.6, 35.6, 0.936, _DESK4),
    "v100": _Card("NVIDIA V100 SXM2 32 GB", 31.7, 15.7, 15.7, 15.7, 0.9, _DGX1, fp16=125),
    "mi300x": _Card("AMD Instinct MI300X", 191.9, 1307, 653, 163, 5.3, _HGX5._replace(link=448)),
}

ALIASES = {
    "h100": "h100-80g", "h100-sxm": "h100-80g", "h100-80gb": "h100-80g", "a100": "a100-80g", "a100-80gb": "a100-80g",
    "a100-40gb": "a100-40g", "h200-141g": "h200", "4090": "rtx-4090", "rtx4090": "rtx-4090", "5090": "rtx-5090",
    "rtx5090": "rtx-5090", "3090": "rtx-3090", "rtx3090": "rtx-3090", "v100-32g": "v100",
}  # fmt: skip


def _constants(card: _Card) -> Constants:
    sheet = f"data sheet of {card.title}, dense"
    usual = card.node.source
    node: dict[str, Any] = {
        "host_to_device_bytes_per_s": card.node.pcie * 1e9,
        "device_to_host_bytes_per_s": card.node.pcie * 1e9,
        "intra_link_bytes_per_s": card.node.link * 1e9,
        "inter_link_bytes_per_s": card.node.network * 1e9,
        "host_memory_bytes": card.node.host * GIB,
        "host_adam_bytes_per_s": card.node.host_adam * 1e9,
        "cores": card.node.cores,
        "gpus_per_node": card.node.gpus,
    }
    return {
        "title": (card.title, sheet),
        "memory_bytes": (int(card.memory * GIB), "total that torch commonly reports for this card"),
        "bf16_flops_per_s": (card.bf16 * 1e12, sheet),
        "fp16_flops_per_s": ((card.fp16 or card.bf16) * 1e12, sheet),
        "tf32_flops_per_s": (card.tf32 * 1e12, sheet),
        "fp32_flops_per_s": (card.fp32 * 1e12, sheet),
        "memory_bytes_per_s": (card.bandwidth * 1e12, sheet),
        "launch_s": (5e-6, "rule of thumb: eager PyTorch dispatch and launch"),
        "intra_link_latency_s": (3e-6, "rule of thumb: one step of an NCCL ring"),
        "inter_link_latency_s": (10e-6, "rule of thumb: one step of an NCCL ring"),
        "ssd_read_bytes_per_s": (6e9, "rule of thumb: one PCIe 4 NVMe drive"),
        "ssd_write_bytes_per_s": (4e9, "rule of thumb: one PCIe 4 NVMe drive"),
        "allocation_rounding_bytes": (512, "PyTorch's caching allocator, kMinBlockSize"),
        **{name: (value, usual) for name, value in node.items()},
    }


GPUS: Mapping[str, Constants] = {key: _constants(card) for key, card in _CARDS.items()}


def match(title: str, memory_bytes: int) -> str | None:
    """The key of the card that a driver calls `title`, None if the table has none; memory tells variants apart."""
    words = title.lower().replace("-", " ").split()
    stems = {key: key.removeprefix("rtx-").split("-")[0] for key in _CARDS}
    hits = [key for key, stem in stems.items() if stem in words]
    if "pcie" not in words:
        hits = [key for key in hits if not key.endswith("-pcie")] or hits
    elif any(key.endswith("-pcie") for key in hits):
        hits = [key for key in hits if key.endswith("-pcie")]
    return min(hits, key=lambda key: abs(_CARDS[key].memory * GIB - memory_bytes), default=None)


def cpu(rates: CpuRates) -> Constants:
    """Constants of this machine as a device of its own."""
    measured = f"measured in {rates.measured_s:.2f} s on this machine, one core × {rates.cores} cores"
    system = "the operating system, this machine"
    copies = rates.memory_bytes_per_s / 2  # one copying thread beside the training threads
    gloo = "gloo over loopback, two ranks on a 2-core server, 1 MiB messages; not this machine"
    return {
        "title": (rates.title, system),
        "memory_bytes": (rates.memory_bytes, system),
        "bf16_flops_per_s": (rates.bf16_flops_per_s, measured),
        "fp16_flops_per_s": (rates.fp32_flops_per_s, "taken as float32"),
        "tf32_flops_per_s": (rates.fp32_flops_per_s, measured),
        "fp32_flops_per_s": (rates.fp32_flops_per_s, measured),
        "memory_bytes_per_s": (rates.memory_bytes_per_s, measured),
        "launch_s": (rates.op_s, measured),
        "host_to_device_bytes_per_s": (copies, "half of the measured memory rate"),
        "device_to_host_bytes_per_s": (copies, "half of the measured memory rate"),
        "intra_link_bytes_per_s": (0.6e9, gloo),
        "intra_link_latency_s": (150e-6, gloo),
        "inter_link_bytes_per_s": (0.1e9, "rule of thumb: gloo over 1 Gb/s Ethernet"),
        "inter_link_latency_s": (300e-6, "rule of thumb: gloo over 1 Gb/s Ethernet"),
        "ssd_read_bytes_per_s": (1e9, "rule of thumb: one SATA or shared drive"),
        "ssd_write_bytes_per_s": (0.5e9, "rule of thumb: one SATA or shared drive"),
        "host_memory_bytes": (rates.memory_bytes, system),
        "host_adam_bytes_per_s": (rates.memory_bytes_per_s, "torch's fused AdamW runs at the memory rate"),
        "cores": (rates.cores, system),
        "gpus_per_node": (1, "the device is the machine"),
        "allocation_rounding_bytes": (1, "the CPU ledger counts what is asked for"),
    }
