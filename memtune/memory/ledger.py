"""Memory ledgers for all devices: live bytes, peaks, kinds, and a budget that raises the real out-of-memory
error.

| device | counted by | budget |
|---|---|---|
| CPU, with a C++ compiler | torch's CPU allocator, replaced (`memtune.memory.cpu_allocator`): exact,
near-free | before the allocation |
| CPU, without | a dispatch mode (`memtune.memory.dispatch_ledger`): exact but for workspace, slower | after
the op |
| others | torch's caching allocator | `set_per_process_memory_fraction`, on reserved bytes |
"""

from __future__ import annotations

import abc
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memtune.device import accelerator, memory_statistics, platform_of
from memtune.memory import arena, cpu_allocator
from memtune.memory.dispatch_ledger import ModeLedger
from memtune.program import Kind
from memtune.runtime import DEVICE, HOST, Tier, storages_of, tier_of_storage

__all__ = ["Ledger", "ModeLedger"]


class Ledger(abc.ABC):
    """Measures the memory of a trial. Open it before the model is built; it is a context manager."""

    counts_scratch = True
    """The bytes include kernel workspace."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._optimizer: Optimizer | None = None

    @staticmethod
    def open(
        device: torch.device | str,
        *,
        budget_bytes: int | None = None,
        counter: Literal["auto", "shim", "mode"] = "auto",
    ) -> Ledger:
        """Start counting on `device` (on CPU for the rest of the process; the budget ends with `close`).

        Args:
            device: Device of the model.
            budget_bytes: An allocation that would bring the device tier above this raises
                `torch.OutOfMemoryError`.
            counter: On CPU, `shim` or `mode`; `auto` is the shim if it can be built.

        Raises:
            EnvironmentFault: `counter="shim"` and it cannot be built.
        """
        device = torch.device(device)
        if not platform_of(device).is_host:
            return _AcceleratorLedger(device, budget_bytes)
        # With `shim` the fault is raised, not worked around: exact numbers were asked for.
        if counter == "mode" or (counter == "auto" and cpu_allocator.available() is not None):
            return _ModeBackend(device, budget_bytes)
        return _ShimLedger(budget_bytes)

    def track(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        """Set the model and optimizer whose tensors `breakdown` distinguishes."""
        self._model, self._optimizer = model, optimizer

    @abc.abstractmethod
    def live_bytes(self, tier: Tier = DEVICE) -> int:
        """Return the bytes live in `tier` now."""

    @abc.abstractmethod
    def peak_allocated_bytes(self, tier: Tier = DEVICE) -> int:
        """Return the peak of live bytes in `tier` since the start or the last `reset_peak`."""

    def peak_reserved_bytes(self) -> int:
        """Return the peak of reserved bytes.

        On CPU the allocated ones, unless memtune's own allocator serves.
        """
        return self.peak_allocated_bytes()

    @abc.abstractmethod
    def reset_peak(self) -> None:
        """Reset all peaks to the live bytes."""

    @abc.abstractmethod
    def close(self) -> None:
        """Lift the budget and drop the references to model and optimizer."""

    def breakdown(self) -> dict[Kind, int]:
        """Return the live device bytes by kind: of watched objects, others (also activations) `TEMPORARY`."""
        held = _held(self._model, self._optimizer, self._counts)
        return {**held, Kind.TEMPORARY: self.live_bytes() - sum(held.values())}

    def peak_breakdown(self) -> dict[Kind, int]:
        """Return the device bytes at the peak: those of the watched objects now, the rest as `TEMPORARY`."""
        held = _held(self._model, self._optimizer, self._counts)
        return {**held, Kind.TEMPORARY: self.peak_allocated_bytes() - sum(held.values())}

    def _counts(self, tensor: Tensor, storage: torch.UntypedStorage) -> bool:
        """Return whether `live_bytes` includes this storage."""
        return tier_of_storage(storage) == DEVICE

    def __enter__(self) -> Ledger:
        """Return the ledger, which is already counting."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the ledger."""
        self.close()


def _held(model: nn.Module | None, optimizer: Optimizer | None, counts: Any) -> dict[Kind, int]:
    """Return the bytes of each counted storage once, by the first kind that holds it."""
    parameters = [] if model is None else list(model.parameters())
    groups: Iterable[tuple[Kind, list[Any]]] = (
        (Kind.PARAMETER, parameters),
        (Kind.GRADIENT, [parameter.grad for parameter in parameters]),
        (Kind.BUFFER, [] if model is None else list(model.buffers())),
        (Kind.OPTIMIZER, [] if optimizer is None else tree_leaves(list(optimizer.state.values()))),
    )
    seen: set[int] = set()
    held: dict[Kind, int] = {}
    for kind, values in groups:
        for tensor in values:
            for storage in storages_of(tensor) if isinstance(tensor, Tensor) else ():
                # Tied weights and views share a storage, which the first kind in this order gets.
                if storage._cdata not in seen and counts(tensor, storage):
                    seen.add(storage._cdata)
                    held[kind] = held.get(kind, 0) + storage.nbytes()
    return {kind: n_bytes for kind, n_bytes in held.items() if n_bytes}


class _ShimLedger(Ledger):
    def __init__(self, budget_bytes: int | None) -> None:
        super().__init__()
        cpu_allocator.install()
        cpu_allocator.reset_peak()
        cpu_allocator.set_budget(budget_bytes)

    def live_bytes(self, tier: Tier = DEVICE) -> int:
        return cpu_allocator.live_bytes(tier)

    def peak_allocated_bytes(self, tier: Tier = DEVICE) -> int:
        return cpu_allocator.peak_bytes(tier)

    def peak_reserved_bytes(self) -> int:
        if arena.installed() is None:
            return self.peak_allocated_bytes()
        # Storages from before the arena's installation are malloc's, which reserves nothing.
        outside = cpu_allocator.live_bytes() - cpu_allocator.source_live_bytes()
        return max(self.peak_allocated_bytes(), arena.statistics().peak_reserved_bytes + outside)

    def reset_peak(self) -> None:
        cpu_allocator.reset_peak()
        arena.restart_peaks()

    def _counts(self, tensor: Tensor, storage: torch.UntypedStorage) -> bool:
        return cpu_allocator.counted(storage) and super()._counts(tensor, storage)

    def close(self) -> None:
        cpu_allocator.set_budget(None)
        self._model = self._optimizer = None


class _ModeBackend(Ledger):
    counts_scratch = False

    def __init__(self, device: torch.device, budget_bytes: int | None) -> None:
        super().__init__()
        self.mode = ModeLedger(device)
        self.mode.set_budget(budget_bytes)
        # Entered for the life of the ledger: `open` comes before the model is built, `close` ends it.
        self.mode.__enter__()
        self._open = True

    def track(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        super().track(model, optimizer)
        self.mode.track(model, optimizer)

    def live_bytes(self, tier: Tier = DEVICE) -> int:
        return self.mode.live_bytes(tier)

    def peak_allocated_bytes(self, tier: Tier = DEVICE) -> int:
        return self.mode.peak_bytes(tier)

    def reset_peak(self) -> None:
        self.mode.reset_peak()

    def breakdown(self) -> dict[Kind, int]:
        return self.mode.breakdown()

    def peak_breakdown(self) -> dict[Kind, int]:
        return self.mode.peak_breakdown()

    def close(self) -> None:
        if self._open:
            self._open = False
            self.mode.__exit__(None, None, None)
            self.mode.close()
            self._model = self._optimizer = None


class _AcceleratorLedger(Ledger):
    def __init__(self, device: torch.device, budget_bytes: int | None) -> None:
        super().__init__()
        # torch sets limits only for a device with an index.
        self._device = accelerator.with_index(device)
        memory_statistics.limit(self._device, budget_bytes)
        self.reset_peak()

    def live_bytes(self, tier: Tier = DEVICE) -> int:
        if tier == DEVICE:
            return memory_statistics.allocated_bytes(self._device)
        return self._pinned_bytes(tier, "current")

    def peak_allocated_bytes(self, tier: Tier = DEVICE) -> int:
        if tier == DEVICE:
            return memory_statistics.peak_allocated_bytes(self._device)
        return self._pinned_bytes(tier, "peak")

    def _pinned_bytes(self, tier: Tier, which: str) -> int:
        """Return pinned bytes, the only host memory that torch counts; SSD bytes are not torch's."""
        return memory_statistics.pinned_bytes(self._device, which) if tier == HOST else 0

    def peak_reserved_bytes(self) -> int:
        return memory_statistics.peak_reserved_bytes(self._device)

    def reset_peak(self) -> None:
        memory_statistics.reset_peaks(self._device)
        memory_statistics.reset_pinned_peaks(self._device)

    def _counts(self, tensor: Tensor, storage: torch.UntypedStorage) -> bool:
        return tensor.device.type == self._device.type

    def close(self) -> None:
        memory_statistics.limit(self._device, None)
        self._model = self._optimizer = None
