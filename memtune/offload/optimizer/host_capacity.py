"""Host memory that can still be allocated, and a check that a config fits in it before anything moves.

The machine is one limit; the control group of a container or batch system, and each group around it, are
others. A process over such a limit is killed without an error, so limits are read first. Ranks on one host
share its memory: they measure before any of them allocates, and add up their needs.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from memtune.errors import ApplyError, EnvironmentFault
from memtune.offload.optimizer.native_update import DTYPES, Moments, NativeUpdate
from memtune.runtime import SSD, Context
from memtune.units import format_bytes

_UNLIMITED = 1 << 60
"""Control groups of version 1 report a number near 2^63 for no limit."""


class Limit(NamedTuple):
    """A limit of new memory of this process: the machine, or a control group."""

    n_bytes: int
    """Bytes that can still be allocated without swapping."""
    owner: str
    """One for all processes that take from the same."""
    text: str
    """Name and limit of a control group; empty for the machine."""


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that new processes can allocate without swapping, within every limit, if known."""
    return min((each.n_bytes for each in limits(root)), default=None)


def limits(root: Path = Path("/")) -> list[Limit]:
    """Return the machine's `MemAvailable` and the rest of every control group of this process."""
    machine = _machine(root)
    found = list(_groups(root, machine))
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    return [*found, Limit(int(match[1]) * 1024, machine, "")] if match else found


def _machine(root: Path) -> str:
    """Return an identifier for all processes of a machine."""
    # It combines several values, because a sandbox or a clone may leave one of them empty or equal.
    kernel = root / "proc/sys/kernel"
    named = (
        _text(kernel / "random/boot_id").strip() or _text(kernel / "hostname").strip() or os.uname().nodename
    )
    total = re.search(r"^MemTotal:\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    return f"{named} {total[1]}" if total else named


def _groups(root: Path, machine: str) -> Iterator[Limit]:
    with contextlib.suppress(OSError):  # two containers may have groups of one name
        machine += os.readlink(root / "proc/self/ns/cgroup")
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            files = _V2 if controllers == "" else _V1
            for top, mounted in _mounted(root, files.file_system, controllers):
                if (inside := _below(path, mounted)) is None:
                    continue
                above = root / top.relative_to("/")
                yield from (
                    found
                    for group in _around(above / inside, above)
                    if (found := _remaining(group, files, machine))
                )


class _Files(NamedTuple):
    file_system: str
    limit: str
    used: str
    reclaimable: tuple[str, ...]
    """Lines of `memory.stat` with memory that the kernel reclaims when needed."""


_V1 = _Files(
    "cgroup", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)
_V2 = _Files("cgroup2", "memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable"))


def _mounted(root: Path, file_system: str, controllers: str) -> Iterator[tuple[Path, str]]:
    """Yield the mount points of groups of this kind and the group at the top of each."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind == file_system and (not controllers or "memory" in options.split(",")):
            top, mounted = left.split()[4], left.split()[3]
            yield Path(top), mounted


def _below(path: str, mounted: str) -> Path | None:
    """Return the path of the group `path` below a mount of `mounted`; None if it is not below it."""
    # A container sees its own group at the top. In a cgroup namespace, a path with `..` contains no more
    # information.
    if Path(path).is_relative_to(mounted) and ".." not in (inside := Path(path).relative_to(mounted)).parts:
        return inside
    return Path() if path.startswith("/..") or mounted.startswith("/..") else None


def _around(group: Path, top: Path) -> Iterator[Path]:
    while group != top and group.is_relative_to(top):
        yield group
        group = group.parent
    yield top


def _remaining(group: Path, files: _Files, machine: str) -> Limit | None:
    limit, used = _text(group / files.limit).strip(), _text(group / files.used).strip()
    # Version 2 writes `max` for no limit.
    if not limit.isdecimal() or not used.isdecimal() or int(limit) >= _UNLIMITED:
        return None
    stat = dict(line.split() for line in _text(group / "memory.stat").splitlines() if len(line.split()) == 2)
    # The page cache counts as used, and the kernel drops it when memory is short.
    taken = int(used) - sum(int(stat.get(name, 0)) for name in files.reclaimable)
    left = max(int(limit) - max(taken, 0), 0)
    return Limit(left, f"{machine} {group}", f"the control group {group} allows {format_bytes(int(limit))}")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def least_state_bytes(context: Context, share: float, moments: Moments = "float32") -> int:
    """Return a lower bound of the host bytes that a `share` of the optimizer's state newly takes."""
    # Gradients and buffers come on top. State in host memory already, such as on CPU after some steps, is not
    # new. Weights in host memory, as on CPU the device's, may be freed, so they are not new either.
    try:
        # Made only to ask for the state's size; it changes nothing but a hook that clears its own caches.
        native = NativeUpdate(context.optimizer, moments)
    except ApplyError:  # a custom optimizer, whose state's size is not known
        native = None
    total, of_each = 0, DTYPES[moments].itemsize
    for group in context.optimizer.param_groups:
        n_bytes = 0 if native is None else of_each * len(native.moment_names(group))
        for each in (parameter for parameter in group["params"] if parameter.requires_grad):
            total += max(each.numel() * n_bytes - _state_bytes(context.optimizer, each), 0)
            total += 0 if "cpu" in (each.device.type, context.device.type) else each.nbytes
    return int(share * total)


def replaced_bytes(context: Context, *, state: bool, weights: Literal["none", "blocks", "all"]) -> int:
    """Return the host bytes held before `apply` that the config's own state and weights replace."""
    n_bytes = sum(_state_bytes(context.optimizer, each) for each in context.optimizer.state) if state else 0
    if weights == "none":
        return n_bytes
    inside = context.blocks if weights == "blocks" else [""]
    leave = {parameter for name in inside for parameter in context.model.get_submodule(name).parameters()}
    return n_bytes + sum(each.nbytes for each in leave if "cpu" in (each.device.type, context.device.type))


def made_bytes(context: Context, ranks: int) -> int:
    """Return a lower bound of the host bytes that `apply` needs to materialize a deferred model."""
    # Each rank keeps a part of a CPU model; a GPU model is made on the host one tensor at a time.
    tensors = (*context.model.named_parameters(), *context.model.named_buffers())
    sizes = {name: each.nbytes for name, each in tensors if each.is_meta}
    largest = max(sizes.values(), default=0)
    if context.device.type != "cpu":
        return largest
    on_ssd = context.off_device() if context.placement.offload.parameters_on == SSD else set()
    return max(sum(n_bytes for name, n_bytes in sizes.items() if name not in on_ssd) // ranks, largest)


def _state_bytes(optimizer: Optimizer, parameter: Tensor) -> int:
    """Return the bytes of the moments of `parameter` in host memory."""
    state = optimizer.state.get(parameter, {}).values()
    return sum(
        each.nbytes for each in state if isinstance(each, Tensor) and each.ndim and each.device.type == "cpu"
    )


def require(
    context: Context, needed_bytes: int, what: str, all_gather: Callable[[Any, torch.device], list[Any]]
) -> None:
    """Check that the memory of every host holds what its ranks are going to keep there.

    All ranks call it, before any of them takes what it needs, and all get the same answer.

    Args:
        context: This rank's context.
        needed_bytes: Bytes that this rank needs.
        what: Name of what needs them, for the message.
        all_gather: Returns the objects of all ranks, by rank (`gather_descriptions`); called on several ranks
            only.

    Raises:
        EnvironmentFault: It does not; the message has the bytes needed and available of the first host or
            control group that lacks memory.
    """
    mine = needed_bytes, limits()
    everyone: list[tuple[int, list[Limit]]]
    everyone = [mine] if context.placement.world_size == 1 else all_gather(mine, context.device)
    sharing: dict[str, list[tuple[int, Limit]]] = {}
    for needs, found in everyone:
        for limit in found:
            # Ranks of one container share its limit, ranks of one machine its memory.
            sharing.setdefault(limit.owner, []).append((needs, limit))
    # Ranks read a limit at different moments: the least reading counts.
    for together in sharing.values():
        _require_room([needs for needs, _ in together], min(limit for _, limit in together), what)


def _require_room(needs: list[int], limit: Limit, what: str) -> None:
    if sum(needs) <= limit.n_bytes:
        return
    several = f" for {len(needs)} ranks of up to {format_bytes(max(needs))}" if len(needs) > 1 else ""
    # A trial has no `strict` argument.
    anyway = "" if "MEMTUNE_TRIAL_FILE" in os.environ else "; strict=False tries it all the same"
    raise EnvironmentFault(
        f"The host has too little memory: at least {format_bytes(sum(needs))} are needed{several}, "
        f"{format_bytes(limit.n_bytes)} are available.",
        evidence=". ".join(each[:1].upper() + each[1:] for each in (what, limit.text) if each) + ".",
        fix=f"offload less, or to SSD: offload: {{states: {{kind: zero_infinity}}}}{anyway}",
        code="MT366",
    )
