"""Installs memtune's own allocator under torch: stitched memory, pools and planned arenas (csrc/vmm).

On CPU it replaces torch's allocator through the shim, from `apply` on. On a GPU it was installed when memtune
was imported (`memory.cuda_arena`), and `apply` checks that it was.

There is one allocator per process: it serves all requests of the device tier from its installation on.
Earlier blocks stay where they are, and each block is returned to the allocator that it came from.
"""

from __future__ import annotations

import gc
import warnings
from typing import Any

from memtune import _native
from memtune.device import platform_of
from memtune.errors import ApplyError
from memtune.memory import cpu_allocator, cuda_arena
from memtune.memory.arena_settings import VARIABLE, ArenaSettings
from memtune.runtime import Context
from memtune.units import format_bytes

_installed: ArenaSettings | None = None


def installed() -> ArenaSettings | None:
    """Return the settings of the allocator of torch's CPU storages; None if it is not memtune's."""
    return _installed


def statistics() -> _native.ArenaStatistics:
    """Return the counters of the CPU allocator since the process began."""
    return _native.arena_statistics(_native.ARENA_CPU)


def restart_peaks() -> None:
    """Reset the CPU allocator's peaks to its current bytes."""
    _native.arena_restart_peaks(_native.ARENA_CPU)


def install(settings: ArenaSettings) -> None:
    """Allocate CPU storages of the device tier from memtune's allocator from now on.

    No effect if it serves already.

    Raises:
        ApplyError: It cannot be made here (no compiler, no Linux), or another one holds memory in this
            process.
    """
    global _installed
    if (fault := cpu_allocator.available()) is not None:
        raise ApplyError(
            f"allocator: {{kind: {settings.kind}}} needs memtune's CPU ledger.",
            evidence=str(fault),
            fix=fault.fix,
            code="MT351",
        )
    if _installed != settings:
        _make(settings)
    cpu_allocator.install()
    # After the shim: it routes each free to the source of its block, so old blocks stay valid.
    cpu_allocator.set_source(*_native.arena_functions())
    _installed = settings


def uninstall() -> None:
    """Allocate storages with malloc again; the arena keeps its storages until they are freed."""
    global _installed
    if _installed is not None:
        cpu_allocator.set_source(None, None)
        _installed = None


def _make(settings: ArenaSettings) -> None:
    """Replace the process's allocator; one that holds the memory of a model is not replaced."""
    if _installed is not None:
        # A deleted model may be in a reference cycle and still hold its memory.
        gc.collect()
        if held := _native.arena_statistics(_native.ARENA_CPU).allocated_bytes:
            raise ApplyError(
                f"this process trains with an allocator already, and {format_bytes(held)} are in use there.",
                evidence=f"A model was tuned with allocator: {{kind: {_installed.kind}}} before.",
                fix="apply one config with an allocator per process, or delete the first model",
                code="MT352",
            )
    if why := _native.arena_replace(_native.ARENA_CPU, settings.options()):
        raise ApplyError(
            f"allocator: {{kind: {settings.kind}}} cannot be used here.", evidence=why, code="MT351"
        )


def use(context: Context, settings: ArenaSettings) -> None:
    """Install the allocator for the training in `context`, notify it of the ends of steps, and add its audit.

    Raises:
        ApplyError: As `install` does; on a GPU, it was not installed before CUDA started, or is another one.
    """
    if not platform_of(context.device).is_host:
        number = context.device.index  # a tensor's device always has one
        _require_on_gpu(settings)
    else:
        number = _native.ARENA_CPU
        # An earlier `apply` has installed it then, and a failure of this one must not remove it.
        serves_already = _installed == settings
        install(settings)
        if not serves_already:
            context.undo.callback(uninstall)
    # The end of backward: requests of the update are in another part of the plan.
    begins = context.optimizer.register_step_pre_hook(lambda *_: _native.arena_begin_update(number))
    # The end of a step, at which the allocator compares requests with the plan, and may plan again.
    ends = context.optimizer.register_step_post_hook(_StepEnd(number))
    for hook in (begins, ends):
        context.undo.callback(hook.remove)
    context.checks["allocator"] = lambda: _facts(settings, number)


def _require_on_gpu(settings: ArenaSettings) -> None:
    found = cuda_arena.installed()
    if found is None:
        raise ApplyError(
            f"allocator: {{kind: {settings.kind}}} is not in this process.",
            evidence=f"{cuda_arena.why_not()}.",
            fix="memtune run tuned.yaml -- python train.py, with  import memtune  before CUDA is used",
            code="MT351",
        )
    if found != settings:
        raise ApplyError(
            f"allocator: {{kind: {settings.kind}}} is not the one of this process.",
            evidence=f"{VARIABLE}={found.text()} when memtune was imported.",
            fix="one config with an allocator in a process",
            code="MT352",
        )


def _in_effect(number: int) -> ArenaSettings | None:
    return _installed if number == _native.ARENA_CPU else cuda_arena.installed()


class _StepEnd:
    """A hook after each optimizer step; warns once if a step deviated from the plan."""

    def __init__(self, number: int) -> None:
        self._number, self._is_reported = number, False

    def __call__(self, *args: Any) -> None:
        settings = _in_effect(self._number)
        if settings is None:
            return
        _native.arena_end_step(self._number)
        found = _native.arena_statistics(self._number)
        if settings.planned and found.deviations and not self._is_reported:
            self._is_reported = True
            warnings.warn(
                f"memtune: a training step asks for other memory than planned ({found.first_deviation}). Such"
                f" requests are served by the fallback allocator; after more than {settings.replan_after} of"
                " them another step is planned.",
                RuntimeWarning,
                stacklevel=2,
            )


def _facts(settings: ArenaSettings, number: int) -> dict[str, Any]:
    found_settings = _in_effect(number)
    if found_settings != settings:
        raise ApplyError(
            f"allocator: {{kind: {settings.kind}}} is not what torch allocates from.",
            evidence=f"In effect: {found_settings.kind if found_settings else 'malloc'}.",
            code="MT352",
        )
    found = _native.arena_statistics(number)
    facts: dict[str, Any] = {
        "kind": settings.kind,
        "reserved_bytes": found.reserved_bytes,
        "in_use_bytes": found.allocated_bytes,
        "driver_calls": found.driver_calls,
    }
    if settings.planned:
        facts |= {
            "planned_bytes": found.plan_bytes,
            "planned_requests": found.plan_served,
            "deviations": found.deviations,
        }
    if settings.pools:
        facts |= {"learned": found.plans, "deviations": found.deviations}
    return facts
