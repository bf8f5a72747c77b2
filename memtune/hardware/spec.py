"""Hardware of a program: memory sizes, rates and links, each with its source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from memtune.device import Platform, accelerator, memory_statistics, of_hardware
from memtune.hardware import calibration_cache, cpu_probe, known_devices
from memtune.hardware.calibration_cache import Curve
from memtune.hardware.cpu_cores import usable_cores

Device = str
"""A device type of torch: `cpu`, `cuda` (ROCm too), `xpu` or that of an out-of-tree backend."""


@dataclass(frozen=True)
class Hardware:
    """One device and its node.

    Rates are those of the data sheet; `op_costs` applies the fraction that ops reach.
    """

    name: str
    """Key in the table (`h100-80g`), or `cpu`."""
    title: str
    device: Device
    architecture: str
    """Architecture by which kernels are chosen: `sm90`, `gfx942`, `cpu`."""
    memory_bytes: int
    context_bytes: int
    """Device memory of a process before it allocates: context and kernels, which no ledger counts."""
    bf16_flops_per_s: float
    fp16_flops_per_s: float
    tf32_flops_per_s: float
    fp32_flops_per_s: float
    memory_bytes_per_s: float
    launch_s: float
    """Cost of issuing one op: the host's time on CUDA, part of the op itself on CPU."""
    hook_s: float
    """Python time of a hook that issues a copy, a collective or a host update, beyond `launch_s`."""
    recomputed_block_s: float
    """Python time of a block that the activation table claims, for both runs; see `mechanism_costs.py`."""
    saved_tensor_s: float
    """Python time of the hooks on a tensor that autograd saves in such a block."""
    observed_op_s: float
    """Python time of an op, views included, that the table's dispatch modes see."""
    moved_tensor_s: float
    """Python time of a saved tensor that is offloaded and reloaded, beyond its hooks."""
    scheduled_call_s: float
    """Python time of a call that a schedule runs, for forward and backward."""
    scheduled_gradient_s: float
    """Python time of a parameter's gradient under a schedule."""
    grouped_copy_s: float
    """Python time of a small tensor that is copied, or updated on the host, together with others."""
    host_to_device_bytes_per_s: float
    device_to_host_bytes_per_s: float
    intra_link_bytes_per_s: float
    """Per device and direction, to the other devices of the node."""
    intra_link_latency_s: float
    """Per step of a ring."""
    inter_link_bytes_per_s: float
    """Per device and direction, to other nodes."""
    inter_link_latency_s: float
    ssd_read_bytes_per_s: float
    ssd_write_bytes_per_s: float
    host_memory_bytes: int
    """Host memory of the node."""
    host_adam_bytes_per_s: float
    """Bytes that an optimizer reads and writes per second on all host threads of the node together."""
    cores: int
    gpus_per_node: int
    allocation_rounding_bytes: int
    """The allocator rounds requests up to multiples of this; 1 is exact."""
    gpus_per_pcie_root: int = 1
    """Consecutive devices that share the link from one PCIe switch to the host."""
    links_through_host: bool = False
    """Devices of the node exchange data through host memory only, so it crosses their PCIe roots."""
    link_slowdown: float = 0.0
    """Fraction of its time by which compute is slower while a collective runs."""
    all_gather_rounds: float = 1.0
    """Duration of an all-gather in passes of its bytes around a ring; an all-reduce makes two passes."""
    reduce_scatter_rounds: float = 1.0
    """Likewise of a reduce-scatter: gloo all-reduces a copy of the input and keeps one chunk."""
    communicator_bytes: int = 0
    """Device memory of one communicator, outside PyTorch's allocator."""
    context_range: tuple[int, int] = (0, 0)
    """Bounds of `context_bytes`."""
    cudnn_bytes: int = 0
    """Device memory that cuDNN's first op adds to the context."""
    cudnn_range: tuple[int, int] = (0, 0)
    """Bounds of `cudnn_bytes`."""
    communicator_range: tuple[int, int] = (0, 0)
    """Bounds of `communicator_bytes`."""
    matmul_efficiency: float = 1.0
    """Share of the matrix rates that products of large, aligned matrices reach on tensor cores."""
    fp32_matmul_efficiency: float = 1.0
    """Likewise of float32 products, which NVIDIA's tensor cores do not compute."""
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Source of each constant, by field."""
    curves: Mapping[str, Curve] = field(default_factory=dict, compare=False, repr=False)
    """Measured times by op class, if any; see `op_costs`."""
    residuals: Mapping[str, Curve] = field(default_factory=dict, compare=False, repr=False)
    """(Seconds at peak rates, measured over predicted) by op class; `autotune/predict/calibration.py`."""
    rates_from: str = field(default="table", compare=False)
    """Basis of predictions: `table`, or `measured on this machine` with the date."""

    @property
    def platform(self) -> Platform:
        """Device type and runtime, with their capabilities."""
        return accelerator.named_platform(of_hardware(self.device, self.architecture))

    def matmul_flops_per_s(self, dtype: str) -> float:
        """Return the peak rate of matrix products of `dtype`: bfloat16, float16, tf32; others as float32."""
        rates = {
            "bfloat16": self.bf16_flops_per_s,
            "float16": self.fp16_flops_per_s,
            "tf32": self.tf32_flops_per_s,
        }
        return rates.get(dtype, self.fp32_flops_per_s)

    def has_tensor_cores(self, dtype: str) -> bool:
        """Return whether tensor cores multiply `dtype`; those before Ampere multiply float16 alone."""
        if self.architecture in ("sm70", "sm75"):
            return dtype == "float16"
        return dtype in ("bfloat16", "float16", "tf32")

    def matmul_share(self, dtype: str) -> float:
        """Return the part of `matmul_flops_per_s` that products of large, aligned matrices reach."""
        return self.matmul_efficiency if self.has_tensor_cores(dtype) else self.fp32_matmul_efficiency

    def usable_bytes(self, ranks: int) -> int:
        """Return the device memory without CUDA's context and, with several `ranks`, their communicator."""
        return self.memory_bytes - self.context_bytes - (self.communicator_bytes if ranks > 1 else 0)

    def local_ranks(self, ranks: int) -> int:
        """Return the number of `ranks` on one node's host; on CPU they share the device too."""
        return ranks if self.device == "cpu" else min(ranks, self.gpus_per_node)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain data."""
        return {
            **asdict(self),
            "sources": dict(self.sources),
            "curves": dict(self.curves),
            "residuals": dict(self.residuals),
        }


def find(name: str) -> Hardware:
    """Return the table's entry for `name`; upper case, spaces and underscores are accepted for `h100-80g`.

    Raises:
        UsageError: There is no such entry; the message has the most similar ones.
    """
    key = known_devices.known_name(name)
    return _from_constants(key, known_devices.device_of(key), known_devices.GPUS[key])


def detect(device: Device = "cpu") -> Hardware:
    """Return this machine's hardware: measurements of `memtune doctor --calibrate`, and defaults.

    Defaults are the table's entry with this device's memory, and a half-second measurement on CPU.

    Raises:
        UsageError: Torch has no device type `device`.
        EnvironmentFault: It has, and sees no such device.
    """
    found = of_cpu(cpu_probe.cpu()) if device == "cpu" else _detect_accelerator(device)
    known = calibration_cache.load(device)
    # A cache may have come with a home directory from another machine.
    if known is None or (device == "cpu" and not cpu_probe.cpu().is_given and _contradicts(known, found)):
        return found
    return with_measured(found, known)


def _contradicts(known: calibration_cache.Calibration, found: Hardware) -> bool:
    """Return whether a CPU's saved calibration does not match this machine."""
    rate = known.constants.get("fp32_flops_per_s")
    return rate is not None and not 0.5 < rate / found.fp32_flops_per_s < 2.0


def of_cpu(rates: cpu_probe.CpuRates) -> Hardware:
    """Return a CPU with these `rates` as a device; other constants are from the table."""
    return _from_constants("cpu", "cpu", known_devices.cpu(rates))


def with_measured(hardware: Hardware, known: calibration_cache.Calibration) -> Hardware:
    """Return `hardware` with its measured constants and curves."""
    constants: dict[str, Any] = {
        name: value for name, value in known.constants.items() if name in hardware.sources
    }
    for name in ("context", "cudnn"):
        if f"{name}_bytes" in constants:
            n_bytes = constants[f"{name}_bytes"] = int(constants[f"{name}_bytes"])
            constants[f"{name}_range"] = (n_bytes, n_bytes)
    return replace(
        hardware,
        sources={
            **hardware.sources,
            **{name: f"{known.source}: {known.how.get(name, '')}" for name in constants},
        },
        curves=known.curves,
        rates_from=known.source,
        **constants,
    )


def gpu_name() -> str:
    """Return the name of the first device as in `detect`: the table's key, else from the driver's name."""
    title, memory_bytes = _seen()
    return known_devices.match(title, memory_bytes) or re.sub(r"\W+", "-", title.lower())


def _seen() -> tuple[str, int]:
    """Return the driver's name of the first device of the accelerator, and its memory in bytes."""
    first = torch.device(str(accelerator.device_type()), 0)
    return accelerator.name(first), memory_statistics.total_bytes(first)


def _detect_accelerator(device: Device) -> Hardware:
    accelerator.require_present(device, "use --device cpu, or name a GPU: --gpu-type")
    title, memory_bytes = _seen()
    known = known_devices.match(title, memory_bytes)
    seen = f"torch.{device}, this machine"
    # A card that is not in the table is predicted as an A10 with this card's memory: slow enough that plans
    # are not too optimistic.
    constants = dict(known_devices.GPUS[known or "a10"])
    if known is None:
        constants = {
            name: (value, f"not in the table, taken from the A10: {why}")
            for name, (value, why) in constants.items()
        }
    constants |= {
        "title": (title, seen),
        "architecture": (accelerator.architecture(), seen),
        "memory_bytes": (memory_bytes, seen),
        "gpus_per_node": (accelerator.count(), seen),
        "host_memory_bytes": (cpu_probe.host_memory_bytes(), "the operating system, this machine"),
        "cores": (usable_cores(), "the operating system, this machine"),
    }
    reaches = accelerator.reaches_peer(0, 1) if accelerator.count() > 1 else None
    if reaches is not None:
        constants["links_through_host"] = (not reaches, seen)
    return _from_constants(gpu_name(), device, constants)


def _from_constants(name: str, device: Device, constants: Mapping[str, tuple[Any, str]]) -> Hardware:
    values: dict[str, Any] = {key: value for key, (value, _) in constants.items()}
    return Hardware(
        name=name, device=device, sources={key: source for key, (_, source) in constants.items()}, **values
    )
