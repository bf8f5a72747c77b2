"""Counts live bytes per tier and kind, op by op, under a dispatch mode.

It works on all devices and on fake tensors, without a compiler. It sees outputs of ops, but not the workspace
that their kernels allocate and free (`memtune.memory.workspace` measures that), and costs tens of
microseconds per op: the native ledger (`memtune.memory.cpu_allocator`) is for trials, this one for audits and
dry runs.

Storages are counted, not tensors, from the op that returns or first reads them until their finalizer runs.
Finalizers may run in any thread at any time, so they only append to a queue (`_dead`), which the next op
empties.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from memtune.program import Kind
from memtune.runtime import (
    DEVICE,
    HOST,
    SEAM,
    TIERS,
    Tier,
    current_tier,
    mark_storage,
    storages_of,
    tier_of_storage,
)

Workspace = Callable[[Any, tuple[Any, ...], dict[str, Any]], int]
"""Maps an op and its arguments to the bytes that its kernel allocates in addition to its outputs."""


@dataclass(slots=True, eq=False)
class _Record:
    """The current state of one storage."""

    bytes: int
    tier: Tier
    kind: Kind


class ModeLedger(TorchDispatchMode):  # torch's __init_subclass__
    """Counts live bytes while it is entered (`with ledger:`), in this thread and its backward threads.

    Args:
        device: Device of the model; on a GPU, CPU storages belong to the host tier.
        workspace: Kernel workspace of an op in bytes, live while that op runs; default: none.
        keep_timeline: Fill `timeline`: device bytes after each op.
        block_bytes: Granularity of the counted bytes.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        workspace: Workspace | None = None,
        keep_timeline: bool = False,
        block_bytes: int = 1,
    ):
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._workspace, self._keep_timeline = torch.device(device), workspace, keep_timeline
        self._block_bytes = block_bytes
        self._records: dict[int, _Record] = {}  # by storage address
        self._dead: deque[tuple[int, _Record]] = deque()  # filled by finalizers; `append` is thread-safe
        self._live = dict.fromkeys(TIERS, 0)
        self._peak = dict.fromkeys(TIERS, 0)
        self._budget: dict[Tier, int] = {}
        self._base: list[tuple[_Record, int]] = []  # what was live when the log below was last cleared
        self._events: list[tuple[_Record, int]] = []
        self._peak_at = dict.fromkeys(TIERS, (0, "", 0))  # length of the log, op, its workspace
        self._parameters: list[nn.Parameter] = []
        self._optimizer: Optimizer | None = None
        self._handles: list[RemovableHandle] = []
        self._resize: Any = None
        self.timeline: list[tuple[str, int]] = []

    # -- queries ---------------------------------------------------------------------------------------------

    def live_bytes(self, tier: Tier = DEVICE) -> int:
        """Return the bytes live in `tier` now."""
        self._drop_freed()
        return self._live[tier]

    def peak_bytes(self, tier: Tier = DEVICE) -> int:
        """Return the peak of live bytes in `tier`, with workspaces, since the last `reset_peak`."""
        return self._peak[tier]

    def peak_op(self, tier: Tier = DEVICE) -> str:
        """Return the op that was running at the peak; empty if none has run since `reset_peak`."""
        return self._peak_at[tier][1]

    def breakdown(self, tier: Tier = DEVICE) -> dict[Kind, int]:
        """Return the bytes live in `tier` now, by kind, without empty kinds."""
        self._drop_freed()
        self._find_kinds()
        return _by_kind([(record, record.bytes) for record in self._records.values()], tier)

    def peak_breakdown(self, tier: Tier = DEVICE) -> dict[Kind, int]:
        """Return the bytes at the peak of `tier`, by kind; they add up to `peak_bytes`."""
        self._find_kinds()
        length, _, workspace = self._peak_at[tier]
        kinds = _by_kind(self._base + self._events[:length], tier)
        return {**kinds, Kind.WORKSPACE: workspace} if workspace else kinds

    def reset_peak(self) -> None:
        """Reset peaks, log and timeline to the live bytes.

        Call it once per step, as the log grows without bound.
        """
        self._drop_freed()
        self._find_kinds()
        self._peak = dict(self._live)
        self._base = [(record, record.bytes) for record in self._records.values()]
        self._events.clear()
        self.timeline.clear()
        self._peak_at = dict.fromkeys(TIERS, (0, "", 0))

    def set_budget(self, budget_bytes: int | None, tier: Tier = DEVICE) -> None:
        """Raise `torch.OutOfMemoryError` for ops that bring `tier` above the budget; None lifts it."""
        self._budget.pop(tier, None)
        if budget_bytes is not None:
            self._budget[tier] = budget_bytes

    # -- kinds of storages -----------------------------------------------------------------------------------

    def track(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        """Track the kinds of the tensors of `model` and `optimizer`, later ones included."""
        self._parameters, self._optimizer = list(model.parameters()), optimizer
        self.label(self._parameters, Kind.PARAMETER)
        self.label(list(model.buffers()), Kind.BUFFER)
        for parameter in self._parameters:
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(
                    lambda p: self.label(p.grad, Kind.GRADIENT)
                )
                self._handles.append(handle)
        if optimizer is not None:
            self._handles.append(optimizer.register_step_pre_hook(lambda *_: self._find_kinds()))
            self._handles.append(optimizer.register_step_post_hook(lambda *_: self._find_kinds()))
        self._find_kinds()

    def label(self, values: Any, kind: Kind) -> None:
        """Set the kind of the tensors in `values` (any nesting of containers).

        Unknown storages are counted from now on.
        """
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor):
                for storage in storages_of(tensor):
                    record = self._records.get(storage._cdata)
                    if record is None:
                        self._add(storage, kind, self._tier_of(tensor, storage))
                    else:
                        record.kind = kind

    def close(self) -> None:
        """Remove the hooks of `watch` from the model and the optimizer."""
        while self._handles:
            self._handles.pop().remove()

    def _find_kinds(self) -> None:
        # Again at each query: gradients and state are replaced by new tensors in every step.
        self.label([parameter.grad for parameter in self._parameters], Kind.GRADIENT)
        if self._optimizer is not None:
            self.label(list(self._optimizer.state.values()), Kind.OPTIMIZER)

    # -- while ops run ---------------------------------------------------------------------------------------

    def __enter__(self) -> ModeLedger:
        """Start counting."""
        original = self._resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            before = storage.nbytes()
            result = original(storage, size)
            try:
                self._resized(storage, Kind.COMMUNICATION)
            except torch.OutOfMemoryError:
                original(storage, before)
                self._resized(storage, Kind.COMMUNICATION)
                raise
            return result

        # FSDP2 frees by `resize_(0)`, which is no operator and so bypasses the dispatch mode.
        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        """Stop counting; live storages stay accounted."""
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op and count its outputs."""
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # a DTensor: dispatched again as an op on this rank's local tensor
        kwargs = kwargs or {}
        inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        self._drop_freed()
        # Before inputs are looked up: a new storage may have the address of one that has died.
        for tensor in inputs:
            for storage in storages_of(tensor):
                # Seen for the first time as an input: made before `__enter__`, or outside of torch (numpy).
                if storage._cdata not in self._records:
                    self._add(storage, Kind.BATCH, self._tier_of(tensor, storage))
        before = dict(self._live)
        out = func(*args, **kwargs)
        # No new memory; views would find their base's storage anyway, at a cost per op.
        if func.namespace in ("prim", "profiler") or func.is_view:
            return out
        self._drop_freed()
        self._count(str(func), out)
        # `resize_` and `out=` variants grow the storage of an argument.
        if func._schema.is_mutable:
            for tensor in inputs:
                for storage in storages_of(tensor):
                    self._resized(storage, Kind.TEMPORARY)
        workspace = self._workspace(func, args, kwargs) if self._workspace is not None else 0
        try:
            self._settle(str(func), before, workspace)
        except torch.OutOfMemoryError:
            del out  # the outputs die with the error, as they would if the device had refused them
            raise
        return out

    def _count(self, op: str, out: Any) -> None:
        """Count the storages of an op's outputs, on the tier of its operator."""
        seam = SEAM.get(op)
        for tensor in tree_leaves(out):
            if not isinstance(tensor, Tensor):
                continue
            for storage in storages_of(tensor):
                if storage._cdata in self._records:
                    self._resized(storage, Kind.TEMPORARY)
                    continue
                tier = self._tier_of(tensor, storage)
                if tier == DEVICE:
                    tier = TIERS[seam.output_tier] if seam is not None else current_tier()
                if tier != DEVICE:
                    mark_storage(storage, tier)  # so that `tier_of` answers for fake tensors too
                self._add(storage, Kind.TEMPORARY, tier)

    def _settle(self, op: str, before: dict[Tier, int], workspace: int) -> None:
        """Compare the moment in the op with budget and peak."""
        for tier in TIERS:
            scratch = workspace if tier == DEVICE else 0
            # Inputs that die in the op are still there while it runs, so both moments count.
            high = max(before[tier], self._live[tier]) + scratch
            if high > before[tier] and high > self._budget.get(tier, high):
                raise torch.OutOfMemoryError(self._refusal(op, tier, high - before[tier], before[tier]))
            if high > self._peak[tier]:
                self._peak[tier] = high
                # A position in the log, broken down on request: a gradient's kind is known only after
                # autograd has accumulated it.
                self._peak_at[tier] = (len(self._events), op, scratch)
        if self._keep_timeline:
            self.timeline.append((op, self._live[DEVICE]))

    def _refusal(self, op: str, tier: Tier, request_bytes: int, live_bytes: int) -> str:
        kinds = ", ".join(f"{kind.name.lower()} {n_bytes}" for kind, n_bytes in self.breakdown(tier).items())
        return (
            f"memtune: out of memory in {op}: it asks for {request_bytes} bytes, but {live_bytes} of the"
            f" {self._budget[tier]} bytes of {tier} memory are live (by kind, with this op's: {kinds}; peak"
            f" {tier} {self._peak[tier]} bytes)"
        )

    # -- records ---------------------------------------------------------------------------------------------

    def _tier_of(self, tensor: Tensor, storage: torch.UntypedStorage) -> Tier:
        tier = tier_of_storage(storage)
        return HOST if tier == DEVICE and tensor.device.type == "cpu" != self._device.type else tier

    def _add(self, storage: torch.UntypedStorage, kind: Kind, tier: Tier) -> None:
        address, record = storage._cdata, _Record(0, tier, kind)
        self._records[address] = record
        # At exit no component reads the counters, and torch may already be finalized.
        weakref.finalize(storage, self._dead.append, (address, record)).atexit = False
        self._change(record, self._bytes_of(storage))

    def _bytes_of(self, storage: torch.UntypedStorage) -> int:
        return -(-storage.nbytes() // self._block_bytes) * self._block_bytes

    def _drop_freed(self) -> None:
        while self._dead:
            address, record = self._dead.popleft()
            # The address may belong to a newer storage already, whose record remains.
            if self._records.get(address) is record:
                del self._records[address]
            self._change(record, 0)

    def _resized(self, storage: torch.UntypedStorage, kind: Kind) -> None:
        self._drop_freed()
        record = self._records.get(storage._cdata)
        if record is None or record.bytes == self._bytes_of(storage):
            return
        if record.bytes == 0 and record.kind == Kind.TEMPORARY:
            record.kind = kind
        before, grows = dict(self._live), self._bytes_of(storage) > record.bytes
        self._change(record, self._bytes_of(storage))
        if grows:
            self._settle("UntypedStorage.resize_", before, 0)

    def _change(self, record: _Record, new_bytes: int) -> None:
        delta = new_bytes - record.bytes
        if delta:
            record.bytes = new_bytes
            self._live[record.tier] += delta
            self._events.append((record, delta))


def _by_kind(entries: list[tuple[_Record, int]], tier: Tier) -> dict[Kind, int]:
    totals: dict[Kind, int] = {}
    for record, n_bytes in entries:
        if record.tier == tier:
            totals[record.kind] = totals.get(record.kind, 0) + n_bytes
    return {kind: totals[kind] for kind in sorted(totals) if totals[kind]}
