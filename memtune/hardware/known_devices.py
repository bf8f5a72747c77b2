"""Constants of known GPUs and of the nodes that usually hold them: field of `Hardware` → (value, source).

`known_devices.toml` has a row per GPU and per node, with the source of its values.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memtune import device
from memtune.errors import UsageError
from memtune.hardware import mechanism_costs, outside_allocator
from memtune.units import GIB

if TYPE_CHECKING:  # importing it loads torch, and a typo in a name should cost nothing
    from memtune.hardware.cpu_probe import CpuRates

Constants = Mapping[str, tuple[Any, str]]


_TABLE: Mapping[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_GPU_MODELS: Mapping[str, Mapping[str, Any]] = {
    key: {**_TABLE["nodes"][row["node"]], **row} for key, row in _TABLE["gpus"].items()
}

_MAMF = (
    "largest measured bf16 rate of torch.matmul over the data sheet's: stas00/ml-engineering,"
    ' compute/accelerator/README.md @744d01e, "Maximum Achievable Matmul FLOPS comparison table"'
    " (A100 SXM 0.869, A100 PCIe 0.811, H100 SXM 0.803, GH200 0.838, B200 0.776, GB200 0.729, MI300X 0.514,"
    " MI325X 0.604, MI355X 0.68); cards missing there: median of the runs of torch.matmul in"
    " zzc0721/torch-performance-test-data database.md @9d82827 (RTX 3090 76.6 TFLOP/s, RTX 4090 164.8,"
    " RTX 4070 Ti SUPER 91, RTX 5090 238, L40S 269, L4 70.9, RTX A6000 123, H100 PCIe 496, H20 141.8,"
    " RTX PRO 6000 413.7; float16: V100 94.8, T4 42; RTX 3060 as RTX 3090): GeForce"
    " cards run at higher clocks than their data sheets state; 0.8 where neither has the card"
)
_MATMUL = {"sm80": 0.869, "sm90": 0.803, "sm100": 0.776, "sm103": 0.786, "gfx942": 0.514, "gfx950": 0.68}
_MATMUL_FP32 = {
    "sm70": 0.896,
    "sm75": 0.537,
    "sm80": 0.98,
    "sm86": 0.69,
    "sm89": 0.66,
    "sm90": 0.77,
    "sm100": 0.83,
    "sm120": 0.645,
}
_FP32 = (
    "median of torch.matmul in float32 over the data sheet's rate: zzc0721/torch-performance-test-data"
    " database.md @9d82827 (TFLOP/s: V100 14.06, T4 4.35, A100 19.1, RTX 3090 24.8, RTX 4090 54.7, H100 SXM"
    " 51.9, H100 PCIe 36.95, H20 31.95, L40S 46.9, L4 15.4, RTX A6000 23.9, RTX 5090 67.6, RTX PRO 6000 77.1,"
    " B200 66.2); as tensor cores on other architectures"
)

ALIASES = {
    "h100": "h100-80g",
    "h100-sxm": "h100-80g",
    "h100-80gb": "h100-80g",
    "a100": "a100-80g",
    "a100-80gb": "a100-80g",
    "a100-40gb": "a100-40g",
    "h200-141g": "h200",
    "4090": "rtx-4090",
    "rtx4090": "rtx-4090",
    "5090": "rtx-5090",
    "rtx5090": "rtx-5090",
    "3090": "rtx-3090",
    "rtx3090": "rtx-3090",
    "v100-32g": "v100",
    "max-1550": "max1550",
    "gh200": "gh200-96g",
    "h100-sxm-96g": "h100-96g",
    "a6000": "rtx-a6000",
    "3060": "rtx-3060",
    "rtx-pro-6000-blackwell": "rtx-pro-6000",
}


def _outside(name: str, found: outside_allocator.ByteRange) -> dict[str, Any]:
    bounds = (found.low_bytes, found.high_bytes)
    return {f"{name}_bytes": (found.n_bytes, found.source), f"{name}_range": (bounds, found.source)}


def _constants(card: Mapping[str, Any]) -> Constants:
    sheet = f"dense, 32-bit accumulation: {card['sheet']}"
    matmul = card.get("matmul_share") or _MATMUL.get(card["architecture"], 0.8)
    usual = card["source"]
    python = "rule of thumb: 8 to 10 times a dispatch; 8 to 15 times on a CPU"
    node: dict[str, Any] = {
        "host_to_device_bytes_per_s": card["pcie_gb_per_s"] * 1e9,
        "device_to_host_bytes_per_s": card["pcie_gb_per_s"] * 1e9,
        "intra_link_bytes_per_s": card["link_gb_per_s"] * 1e9,
        "inter_link_bytes_per_s": card["network_gb_per_s"] * 1e9,
        "host_memory_bytes": card["host_memory_gib"] * GIB,
        "host_adam_bytes_per_s": card["host_adam_gb_per_s"] * 1e9,
        "cores": card["cores"],
        "gpus_per_node": card["gpus"],
    }
    return {
        "title": (card["title"], sheet),
        "architecture": (
            card["architecture"],
            "CUDA compute capability, https://developer.nvidia.com/cuda-gpus; AMD: ROCm's target; Intel: its"
            " family",
        ),
        "memory_bytes": (int(card["memory_gib"] * GIB), "total that torch commonly reports for this card"),
        **_outside("context", outside_allocator.context(card["architecture"])),
        **_outside("cudnn", outside_allocator.cudnn(card["architecture"])),
        "bf16_flops_per_s": (card["bf16_tflops"] * 1e12, sheet),
        "fp16_flops_per_s": (card.get("fp16_tflops", card["bf16_tflops"]) * 1e12, sheet),
        "tf32_flops_per_s": (card["tf32_tflops"] * 1e12, sheet),
        "fp32_flops_per_s": (card["fp32_tflops"] * 1e12, sheet),
        "memory_bytes_per_s": (card["memory_tb_per_s"] * 1e12, sheet),
        "launch_s": (5e-6, "rule of thumb: eager PyTorch dispatch and launch"),
        "hook_s": (50e-6, python),
        **mechanism_costs.defaults(5e-6),
        "intra_link_latency_s": (3e-6, "rule of thumb: one step of an NCCL ring"),
        "all_gather_rounds": (1.0, "NCCL's ring"),
        "reduce_scatter_rounds": (1.0, "NCCL's ring"),
        "inter_link_latency_s": (10e-6, "rule of thumb: one step of an NCCL ring"),
        "ssd_read_bytes_per_s": (6e9, "rule of thumb: one PCIe 4 NVMe drive"),
        "ssd_write_bytes_per_s": (4e9, "rule of thumb: one PCIe 4 NVMe drive"),
        "allocation_rounding_bytes": (512, "PyTorch's caching allocator, kMinBlockSize"),
        "gpus_per_pcie_root": (
            card.get("gpus_per_pcie_root", 1),
            "HGX A100: 4 PCIe switches for 8 GPUs; elsewhere taken as 1",
        ),
        "links_through_host": (
            card["title"].startswith("NVIDIA GeForce"),
            "drivers of GeForce cards let none read another's memory over PCIe; NVLink not counted",
        ),
        "link_slowdown": (
            0.189,
            "mean over GPT and LLaMA on A100, H100, MI210, MI250: arXiv 2507.03114, abstract",
        ),
        **_outside("communicator", outside_allocator.communicator(card["link_gb_per_s"])),
        "matmul_efficiency": (matmul, _MAMF),
        "fp32_matmul_efficiency": (
            card.get("fp32_matmul_share") or _MATMUL_FP32.get(card["architecture"], matmul),
            _FP32,
        ),
        **{name: (value, usual) for name, value in node.items()},
    }


GPUS: Mapping[str, Constants] = {key: _constants(card) for key, card in _GPU_MODELS.items()}


def match(title: str, memory_bytes: int) -> str | None:
    """Return the key of the card that the driver calls `title`, None if it is not in the table."""
    # Variants of a card differ in memory.
    # "Intel Data Center GPU Max 1550" is two words, and "max" alone occurs in names of laptops' cards.
    words = title.lower().replace("-", " ").replace("max 1", "max1").split()
    stems = {key: key.removeprefix("rtx-").split("-")[0] for key in _GPU_MODELS}
    hits = [key for key, stem in stems.items() if stem in words]
    hits = [key for key in hits if all(each in words for each in ("ti", "super") if f"-{each}" in key)]
    if "pcie" not in words:
        hits = [key for key in hits if not key.endswith("-pcie")] or hits
    elif any(key.endswith("-pcie") for key in hits):
        hits = [key for key in hits if key.endswith("-pcie")]
    return min(hits, key=lambda key: abs(_GPU_MODELS[key]["memory_gib"] * GIB - memory_bytes), default=None)


def cpu(rates: CpuRates) -> Constants:
    """Return the constants of this machine's CPU as a device."""
    measured = f"measured in {rates.measured_s:.2f} s on this machine, one core × {rates.cores} cores"
    system = "the operating system, this machine"
    copies = rates.memory_bytes_per_s / 2  # one copying thread next to the training threads
    python = "the time of a small op, as steps of a GPT showed on a 2-core server"
    gloo = "gloo over loopback, median of twelve trials of two ranks on two 2-core servers; not this machine"
    return {
        "title": (rates.title, system),
        "architecture": ("cpu", system),
        "memory_bytes": (rates.memory_bytes, system),
        "context_bytes": (0, "the ledger counts all bytes"),
        "context_range": ((0, 0), "the ledger counts all bytes"),
        "cudnn_bytes": (0, "the ledger counts all bytes"),
        "cudnn_range": ((0, 0), "the ledger counts all bytes"),
        "bf16_flops_per_s": (rates.bf16_flops_per_s, measured),
        "fp16_flops_per_s": (rates.fp32_flops_per_s, "assumed equal to float32"),
        "tf32_flops_per_s": (rates.fp32_flops_per_s, measured),
        "fp32_flops_per_s": (rates.fp32_flops_per_s, measured),
        "memory_bytes_per_s": (rates.memory_bytes_per_s, measured),
        "launch_s": (rates.op_s, measured),
        "hook_s": (15 * rates.op_s, f"15 times {python}"),
        **mechanism_costs.defaults(rates.op_s),
        "host_to_device_bytes_per_s": (copies, "half of the measured memory rate"),
        "device_to_host_bytes_per_s": (copies, "half of the measured memory rate"),
        "intra_link_bytes_per_s": (1.45e9, gloo),
        "intra_link_latency_s": (750e-6, gloo),
        "all_gather_rounds": (1.5, gloo),
        "reduce_scatter_rounds": (2.5, gloo),
        "inter_link_bytes_per_s": (0.1e9, "rule of thumb: gloo over 1 Gb/s Ethernet"),
        "inter_link_latency_s": (300e-6, "rule of thumb: gloo over 1 Gb/s Ethernet"),
        "ssd_read_bytes_per_s": (1e9, "rule of thumb: one SATA or shared drive"),
        "ssd_write_bytes_per_s": (0.5e9, "rule of thumb: one SATA or shared drive"),
        "host_memory_bytes": (rates.memory_bytes, system),
        "host_adam_bytes_per_s": (rates.memory_bytes_per_s, "torch's fused AdamW runs at the memory rate"),
        "cores": (rates.cores, system),
        "gpus_per_node": (1, "the device is the machine"),
        "allocation_rounding_bytes": (1, "the CPU ledger counts what is asked for"),
        "gpus_per_pcie_root": (1, "the device is the machine"),
        "links_through_host": (False, "the device is the machine"),
        "link_slowdown": (0.0, "not measured: only the measured rates of trials include gloo's threads"),
        "communicator_bytes": (0, "gloo's buffers are not in the ledger"),
        "communicator_range": ((0, 0), "gloo's buffers are not in the ledger"),
        "matmul_efficiency": (1.0, "rates of matrix products were measured"),
        "fp32_matmul_efficiency": (1.0, "rates of matrix products were measured"),
    }


def device_of(name: str) -> str:
    """Return torch's device type of a GPU of the table: `xpu` for Intel's, `cuda` for the others."""
    return device.device_of(_GPU_MODELS[name]["architecture"])


def names() -> tuple[str, ...]:
    """Return the names of all GPUs in the table."""
    return tuple(GPUS)


def known_name(name: str) -> str:
    """Return the table's name of a GPU; upper case, spaces and underscores are accepted for `h100-80g`.

    Raises:
        UsageError: There is no such GPU; the message has the most similar ones.
    """
    key = re.sub(r"[\s_]+", "-", name.strip().lower())
    key = ALIASES.get(key, key)
    if key in GPUS:
        return key
    begun = [each for each in names() if key and each.startswith(key)]
    near = begun[:5] or difflib.get_close_matches(key, names(), n=3, cutoff=0.4)
    raise UsageError(
        f"No hardware is called '{name}'.",
        evidence=f"Known: {', '.join(names())}.",
        fix=f"use {' or '.join(near)}" if near else "use one of the known names",
        code="MT208",
    )
