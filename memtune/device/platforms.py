"""Device types as data: the capabilities of each, and the names by which its runtime is addressed.

Torch is not imported: a search on a CPU plans for devices that are not present.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType


class Capability(StrEnum):
    """A facility of a device that memtune uses; the value is its description in messages and documents."""

    STREAMS = "streams and events that run asynchronously to the host"
    PINNED = "pinned host memory"
    STATISTICS = "counts of allocated and peak bytes"
    """By torch's caching allocator, on CPU by memtune's ledger."""
    LIMIT = "a limit on a process's device memory"
    GENERATORS = "random generators whose state can be read and set"
    ALLOCATOR_SETTINGS = "allocator settings from the environment (PYTORCH_ALLOC_CONF)"
    EXPANDABLE_SEGMENTS = "expandable segments"
    STREAM_ORDERED = "an allocator of the driver, ordered by streams (cudaMallocAsync)"
    OWN_ALLOCATOR = "memtune's own allocator under torch"
    TRITON = "kernels in Triton"
    INDUCTOR = "torch.compile with the inductor backend"
    TRANSLATION = "predictions with the device's own kernels and saved tensors"
    """`autotune/translate` has a table of them; others are predicted with those of a recording on CPU."""


@dataclass(frozen=True)
class Platform:
    """A device type under one runtime; CUDA and ROCm are two platforms of torch's device type `cuda`."""

    name: str
    """Key in `PLATFORMS`, or the name of an out-of-tree device type."""
    device: str
    """Torch's device type."""
    title: str
    capabilities: frozenset[Capability] = frozenset()
    backend: str = ""
    """Process-group backend that sends its tensors; empty: torch is asked (`accelerator.backend_of`)."""
    ray_resource: str = ""
    """Ray's name for its devices; empty if Ray does not assign them."""
    visible_devices: str = ""
    """Environment variable that lists the devices a process may use; empty if there is none."""
    driver_files: tuple[str, ...] = ()
    """Files of which one exists where the driver is loaded."""
    out_of_memory: tuple[str, ...] = ()
    """Beginnings of out-of-memory messages that arrive as plain RuntimeErrors, not as torch's class."""
    deterministic_environment: Mapping[str, str] = field(default_factory=dict)
    """Variables without which deterministic algorithms are refused."""
    tested: str = "not tested"
    """Tests that run on it, for the documents."""
    gaps: tuple[str, ...] = ()
    """Known not to work, beyond the capabilities it lacks."""

    @property
    def lacks(self) -> tuple[Capability, ...]:
        """Capabilities that it does not have, in the order of `Capability`."""
        return tuple(each for each in Capability if each not in self.capabilities)

    @property
    def is_host(self) -> bool:
        """True if its memory is the host's: no copies between host and device, no driver."""
        return self.device in ("cpu", "meta")


# An accelerator in torch's sense has them all; https://docs.pytorch.org/docs/stable/accelerator.html
ACCELERATOR = frozenset({Capability.STREAMS, Capability.PINNED, Capability.STATISTICS, Capability.GENERATORS})
_CUDA_MESSAGES = (
    # The first is from memtune's allocator, which cannot raise a torch class; the second from the driver, for
    # a kernel or context that finds no memory outside of the allocator; the third from cuBLAS.
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED",
)

_ALL = (
    Platform(
        "cpu",
        "cpu",
        "CPU",
        frozenset(
            {
                Capability.LIMIT,  # memtune's ledger
                Capability.STATISTICS,
                Capability.GENERATORS,
                Capability.OWN_ALLOCATOR,
                Capability.INDUCTOR,
                Capability.TRANSLATION,
            }
        ),
        backend="gloo",
        ray_resource="CPU",
        tested="every test",
    ),
    Platform(
        "cuda",
        "cuda",
        "NVIDIA GPUs (CUDA)",
        frozenset(Capability),
        backend="nccl",
        ray_resource="GPU",
        visible_devices="CUDA_VISIBLE_DEVICES",
        driver_files=("/dev/nvidiactl", "/dev/dxg"),
        out_of_memory=_CUDA_MESSAGES,
        deterministic_environment=MappingProxyType({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
        tested="not yet on hardware; `make gpu-check` holds the tests, `DEVICE=sim` rehearses them",
    ),
    Platform(
        "rocm",
        "cuda",
        "AMD GPUs (ROCm)",
        ACCELERATOR
        | {
            Capability.LIMIT,
            Capability.ALLOCATOR_SETTINGS,
            Capability.TRITON,
            Capability.INDUCTOR,
            Capability.TRANSLATION,
        },
        ray_resource="GPU",
        backend="nccl",  # RCCL under NCCL's name
        visible_devices="CUDA_VISIBLE_DEVICES",  # HIP reads it as well
        driver_files=("/dev/kfd",),
        out_of_memory=(*_CUDA_MESSAGES, "HIP out of memory", "HIP error: out of memory"),
        deterministic_environment=MappingProxyType({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
        tested="not yet on hardware",
    ),
    Platform(
        "xpu",
        "xpu",
        "Intel GPUs (XPU)",
        ACCELERATOR | {Capability.LIMIT, Capability.TRITON, Capability.INDUCTOR},
        backend="xccl",
        ray_resource="GPU",
        visible_devices="ZE_AFFINITY_MASK",
        driver_files=("/dev/dri",),
        out_of_memory=("XPU out of memory", "UR error", "level_zero backend failed with error: 39"),
        tested="not yet on hardware",
    ),
    Platform(
        "npu",
        "npu",
        "Ascend NPUs (torch_npu)",
        ACCELERATOR | {Capability.LIMIT},
        backend="hccl",
        ray_resource="NPU",
        visible_devices="ASCEND_RT_VISIBLE_DEVICES",
        driver_files=("/dev/davinci_manager",),
        out_of_memory=("NPU out of memory",),
        tested="not yet on hardware",
        gaps=("its allocator reads PYTORCH_NPU_ALLOC_CONF, which memtune does not set",),
    ),
)
PLATFORMS: Mapping[str, Platform] = MappingProxyType({each.name: each for each in _ALL})
"""All platforms that memtune knows by name. Others are described by their own module (`accelerator`)."""


DISPATCH_KEYS = ("CPU", "CUDA", "XPU", "PrivateUse1")
"""Keys of torch's dispatcher under which memtune's operators are registered: ROCm's is `CUDA`, that of Ascend
and other out-of-tree devices `PrivateUse1`. Fake tensors have kernels of their own.
"""
TENSOR_FLAGS = frozenset(f"is_{each.device}" for each in _ALL)
"""Attributes of tensors that are true on one device type."""
DEFAULT_ACCELERATOR = "cuda"
"""Device type that predictions are for if the user names none."""


def device_of(architecture: str) -> str:
    """Return torch's device type of a GPU by its architecture: `xe` is Intel's, `sm` and `gfx` are CUDA's."""
    return "xpu" if architecture.startswith("xe") else DEFAULT_ACCELERATOR


def of_hardware(device: str, architecture: str) -> str:
    """Return the platform of a device that need not be present: its type, or `rocm` for one of AMD."""
    return "rocm" if device == "cuda" and architecture.startswith("gfx") else device
