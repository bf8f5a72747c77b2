"""The accelerator that torch has in this process: its platform, devices, module and random generators.

A process has at most one accelerator type (`torch.accelerator`). One that is not in `PLATFORMS`, from a
package that registers a PrivateUse1 backend, may describe itself: `torch.<name>.memtune_platform` is a
mapping with fields of `Platform`, its capabilities by name (`"LIMIT"`).
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from memtune.device.platforms import ACCELERATOR, DEFAULT_ACCELERATOR, PLATFORMS, Capability, Platform
from memtune.errors import EnvironmentFault, UsageError


def device_type() -> str | None:
    """Return the type of the accelerator that is present and usable, such as `cuda`; None without one."""
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None and _is_present(found.type) else None


@cache
def _is_present(kind: str) -> bool:
    # Cached, because each call asks the driver.
    return torch.accelerator.is_available()


def is_present() -> bool:
    """Return whether this process has an accelerator that it can use."""
    return device_type() is not None


def is_started() -> bool:
    """Return whether the accelerator is in use."""
    # Torch starts it at the first use, and no tensor is on it before.
    found = torch.accelerator.current_accelerator()
    if found is None:
        return False
    # Modules of out-of-tree devices may lack it; a present one is then taken as started.
    asked = getattr(module_of(found), "is_initialized", None)
    return _is_present(found.type) if asked is None else bool(asked())


def module_of(device: torch.device | str) -> Any:
    """Return torch's module of a device type, such as `torch.cuda`."""
    return torch.get_device_module(device)


def count(kind: str | None = None) -> int:
    """Return the number of devices of type `kind` that this process sees; of its accelerator by default."""
    there = device_type()
    return torch.accelerator.device_count() if there is not None and kind in (None, there) else 0


def runtime() -> str:
    """Return the runtime that torch was built with and its version, `cuda 12.8`; empty without one."""
    found = {kind: getattr(torch.version, kind, None) for kind in ("cuda", "hip", "xpu")}
    return ", ".join(f"{kind} {version}" for kind, version in found.items() if version)


def name(device: torch.device | int = 0) -> str:
    """Return the driver's name of a device of the accelerator, which must be present."""
    kind = str(device_type())
    # Modules of out-of-tree devices may lack it.
    asked = getattr(module_of(kind), "get_device_name", None)
    return platform_of(kind).title if asked is None else str(asked(device))


def visible_devices(kind: str) -> str:
    """Return the variable that lists this process's devices of `kind`, with its value, for messages."""
    variable = platform_of(kind).visible_devices
    return (
        f"{variable}={os.environ.get(variable, '(not set)')}"
        if variable
        else f"{count(kind)} {kind} devices."
    )


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the version by which CUDA and ROCm kernels are chosen; None for other devices."""
    if device.type != "cuda":
        return None
    major, minor = module_of(device).get_device_capability(device)
    return int(major), int(minor)


def architecture(device: torch.device | int = 0) -> str:
    """Return the architecture of a device: `sm90`, on ROCm `gfx942` without features, else its type."""
    kind = device_type()
    if kind != "cuda":
        return str(kind)
    found = module_of(kind).get_device_properties(device)
    if torch.version.hip:
        return str(found.gcnArchName).split(":")[0]
    return f"sm{found.major}{found.minor}"


def reaches_peer(first: int, second: int) -> bool | None:
    """Return whether a device reaches another's memory without the host; None if that is unknown."""
    kind = device_type()
    asked = None if kind is None else getattr(module_of(kind), "can_device_access_peer", None)
    return None if asked is None else bool(asked(first, second))


def with_index(device: torch.device) -> torch.device:
    """Return `device` with an index: its own, the current device's, or `LOCAL_RANK` under torchrun."""
    if device.index is not None:
        return device
    index, rank = torch.accelerator.current_device_index(), os.environ.get("LOCAL_RANK", "")
    # torchrun selects no device: all of its ranks would meet on the first one.
    if index == 0 and rank.isdigit() and int(rank) < torch.accelerator.device_count():
        index = int(rank)
    return torch.device(device.type, index)


def select(device: torch.device) -> None:
    """Make `device` the current one of this thread; no effect on CPU, and without an index."""
    if not platform_of(device).is_host and device.index is not None:
        torch.accelerator.set_device_index(device)


def selected(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which `device` is the current one; no effect on CPU."""
    return torch.accelerator.device_index(None if platform_of(device).is_host else device.index)


def known_types() -> tuple[str, ...]:
    """Return the device types that a user may name: `types`, and the usual accelerator if there is none."""
    return types() if is_present() else ("cpu", DEFAULT_ACCELERATOR)


def types() -> tuple[str, ...]:
    """Return the device types that this process can train on, `cpu` first."""
    there = device_type()
    return ("cpu",) if there is None else ("cpu", there)


def platform_of(device: torch.device | str) -> Platform:
    """Return the platform of a device or device type.

    Raises:
        UsageError: Torch has no such device type.
    """
    kind = device if isinstance(device, str) else device.type
    found = _platforms.get(kind)
    if found is None:
        found = _platforms[kind] = _platform(kind)
    return found


_platforms: dict[str, Platform] = {}


def _platform(kind: str) -> Platform:
    # ROCm's build of torch calls its devices `cuda`.
    if kind == "cuda" and torch.version.hip:
        return PLATFORMS["rocm"]
    if kind in PLATFORMS:
        return PLATFORMS[kind]
    if kind == "meta":
        return Platform("meta", "meta", "meta device")
    module = getattr(torch, require_type(kind), None)
    # A copy: `pop` must not change the module's own.
    described = dict(getattr(module, "memtune_platform", {}))
    has = described.pop("capabilities", None)
    return Platform(
        kind,
        kind,
        **{
            "title": f"devices of type {kind}",
            **described,
            "capabilities": _of(module) if has is None else frozenset(Capability[each] for each in has),
        },
    )


def _of(module: Any) -> frozenset[Capability]:
    """Return the capabilities that an unknown accelerator's module shows."""
    shown = {Capability.LIMIT: "set_per_process_memory_fraction"}
    return ACCELERATOR | {each for each, function in shown.items() if hasattr(module, function)}


def has_type(kind: str) -> bool:
    """Return whether torch has the device type `kind`, whether or not there is such a device."""
    try:
        torch.device(kind)
    except RuntimeError:
        return False
    return True


def require_type(kind: str) -> str:
    """Return `kind` if torch has this device type.

    Raises:
        UsageError: It has not.
    """
    if has_type(kind):
        return kind
    raise UsageError(
        f"torch {torch.__version__} has no device type {kind}.",
        evidence=f"This process can train on {' and '.join(types())}.",
        fix="choose one of these, or import the package that adds the type to torch",
        code="MT131",
    )


def require_present(kind: str, fix: str = "use --device cpu") -> None:
    """Check that this process has devices of type `kind`.

    Raises:
        UsageError: Torch has no such device type.
        EnvironmentFault: It has, and sees no device of it.
    """
    platform = platform_of(kind)
    if not platform.is_host and device_type() != kind:
        raise EnvironmentFault(f"torch sees no {_named(platform)} device.", fix=fix, code="MT104")


def require_device(device: torch.device | str) -> torch.device:
    """Return `device`, with the current index if it has none.

    Raises:
        UsageError: Torch has no such device type.
        EnvironmentFault: This process sees no such device.
    """
    kind, _, _ = str(device).partition(":")
    require_present(kind, f"one of {', '.join(types())}")
    if platform_of(kind).is_host:
        return torch.device(device)
    found = with_index(torch.device(device))
    if found.index >= count(kind):
        raise EnvironmentFault(
            f"There is no device {found}: this process sees {count(kind)} of this type.",
            evidence=visible_devices(kind),
            fix=f"{kind}:0 is the first one",
            code="MT104",
        )
    return found


def _named(platform: Platform) -> str:
    return {"cuda": "CUDA"}.get(platform.device, platform.device)


def named_platform(name: str) -> Platform:
    """Return the platform called `name`, present or not, or that of a device type of torch.

    Raises:
        UsageError: There is neither.
    """
    return PLATFORMS.get(name) or platform_of(name)


_has_streams: dict[str, bool] = {}


def has_streams(device: torch.device) -> bool:
    """Return whether kernels and copies on `device` run on streams, asynchronously to the host."""
    kind = device.type
    # Asked for every copy: a dictionary of booleans is faster than a platform and its set.
    found = _has_streams.get(kind)
    if found is None:
        found = _has_streams[kind] = Capability.STREAMS in platform_of(kind).capabilities
    return found


def runs_triton(device: torch.device) -> bool:
    """Return whether Triton is installed and compiles for `device`."""
    return Capability.TRITON in platform_of(device).capabilities and find_spec("triton") is not None


def float32_products() -> Any:
    """Return torch's settings of float32 matrix products on CUDA and ROCm, TF32 among them."""
    return torch.backends.cuda.matmul


def get_rng_state(device: torch.device) -> Tensor:
    """Return the state of the generator of `device`, an accelerator: uint8 on the host."""
    state: Tensor = module_of(device).get_rng_state(device)
    return state


def set_rng_state(device: torch.device, state: Tensor) -> None:
    """Set the state of the generator of `device`, an accelerator."""
    module_of(device).set_rng_state(state, device)


def fork_rng(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that restores the generators of CPU and of `device` at its end."""
    # Torch takes the type from the accelerator, or assumes CUDA; of no devices it needs none.
    if platform_of(device).is_host:
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def started_devices() -> list[torch.device]:
    """Return the devices of an accelerator that has started; generators of others have drawn nothing."""
    kind = device_type() if is_started() else None
    return [] if kind is None else [torch.device(kind, index) for index in range(count())]


def backend_of(device_type: str) -> str:
    """Return torch's default backend for a device type: `nccl` for `cuda`, `gloo` for `cpu`."""
    # An out-of-tree type has registered its own.
    kind = require_type(device_type)
    return dist.Backend.default_device_backend_map.get(kind) or platform_of(kind).backend or "gloo"


def backends_of(device_type: str) -> str:
    """Return the backends of host and device as `init_process_group` takes them: `cpu:gloo,cuda:nccl`."""
    return ",".join(dict.fromkeys(f"{kind}:{backend_of(kind)}" for kind in ("cpu", device_type)))
