"""Table of a running model's values under a byte budget: their producers and holders, evictions and replays.

The native rematerializer (`csrc/remat`) accounts and decides; this table applies its journal to real tensors.
All storages made while the region runs are accounted: values, incoming gradients, copies and kernel
workspace. So the accounted peak is the device's.

A value that Python or autograd's engine hold cannot be evicted: it is held in the rematerializer until the
table's alias is the only reference to its storage. The table keeps values for autograd (`pack`) and restores
them (`unpack`). An op runs again on its recorded arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memtune import _native
from memtune.activations.capture import no_autocast
from memtune.activations.eviction.evictable_tensor import (
    OutsideTensor,
    PackedValue,
    Read,
    RepeatableOp,
    ReplayRecord,
    StorageWatch,
    Value,
    run_again,
    run_in_parts,
    too_small,
    view_of,
    whole_of,
    written_since,
)
from memtune.activations.eviction.op_metadata import OpMetadata, OpMetadataCache, OpProperties
from memtune.activations.eviction.policy import ALONG, EVICT, OVERWRITE, REPLAY, Policy
from memtune.device import is_out_of_memory
from memtune.errors import ApplyError
from memtune.program import ON_GPU_ONLY
from memtune.runtime import RandomState, element_bytes, generator_of, is_uncounted, mutated, tensors_in

_TRIES = 4
"""Attempts of an op for which the device is out of memory, each after more evictions."""


class OnlineTable:
    """Values of the forwards that wait for their backward, with their rematerializer.

    Args:
        module: The module that runs.
        policy: The eviction policy.
        budget_bytes: Budget of the values alone.
        background_bytes: Other resident bytes, for messages.
        facts: Metadata of ops, kept over many steps.
        waits: Another forward waits for its backward, for messages.
    """

    def __init__(
        self,
        module: nn.Module,
        policy: Policy,
        budget_bytes: int,
        background_bytes: int,
        facts: OpMetadataCache,
        *,
        waits: bool = False,
    ) -> None:
        self.budget_bytes, self.background_bytes = budget_bytes, background_bytes
        self.backward, self.paused, self.waits = False, False, waits
        self.ran: list[OpMetadata] = []
        """Every op, once for each first run."""
        self.replays: list[ReplayRecord] = []
        """Second runs, in order."""
        self._module, self._facts = module, facts
        self._values: dict[int, Value] = {}  # by address of the storage
        self._by_number: dict[int, Value] = {}
        self._held: dict[int, Value] = {}  # values with references outside the table, by number
        self._given: dict[int, OutsideTensor] = {}
        self._ops: list[RepeatableOp] = []
        self._watches: dict[int, StorageWatch] = {}  # storages that the table accounts but does not hold
        # Weakref callbacks and `PackedValue.__del__` may run at any allocation, also inside a call on the
        # rematerializer, so they only append here; `_settle` applies them.
        self._dead: deque[StorageWatch] = deque()
        self._unkept: deque[Value] = deque()
        if budget_bytes <= 0:
            raise too_small("the model", 0, 0, background_bytes, waits=waits)
        self._parts = policy.parts
        self._remat = _native.Rematerializer(policy.settings(budget_bytes))

    # -- an op runs ------------------------------------------------------------------------------------------

    def run(self, about: OpProperties, args: Any, kwargs: Any) -> Any:
        """Run an op of the model's forward or backward, after evicting until its outputs fit."""
        self._settle()
        # First: references that were dropped since the last op make values evictable.
        facts = self._facts.lookup(about, args, kwargs)
        self.ran.append(facts)
        inputs = tensors_in(args)
        if kwargs:
            inputs += tensors_in(list(kwargs.values()))
        written = mutated(about.func, args, kwargs) if about.writes else []
        addresses = [each.untyped_storage()._cdata for each in inputs]
        repeatable = None if self.backward else self._repeatable(facts, args, kwargs, inputs, written)
        out = self._fitted(facts, args, kwargs, bool(written))
        fresh: list[tuple[int, Tensor, int, int]] = []  # position, tensor, address, bytes
        for at, each in enumerate(tensors_in((out,))):
            storage = each.untyped_storage()
            if storage._cdata not in addresses:
                addresses.append(storage._cdata)
                fresh.append((at, each, storage._cdata, storage.nbytes()))
        made_bytes = sum([each[3] for each in fresh])
        # The largest seen so far: the same op may make more with other arguments, and room is made before it
        # runs.
        if made_bytes > facts.makes_bytes:
            facts.makes_bytes = made_bytes
        if repeatable is None or (repeatable.over is not None and fresh):
            if repeatable is not None:
                # It writes in place and returns new storages: a second run cannot reproduce both.
                self._pin_written(about.func, args, written)
            for _, each, _, size in fresh:
                self._enter_constant(each, size)
        elif fresh or repeatable.over is not None:
            self._enter(
                repeatable,
                self._facts.cost_s(facts, args, kwargs, out, inputs),
                addresses,
                fresh,
                self._elements(repeatable, args, kwargs, out),
            )
        return out

    def _fitted(self, facts: OpMetadata, args: Any, kwargs: Any, writes: bool) -> Any:
        """Run the op; if the device is out of memory although it should fit, evict more and try again."""
        about = facts.about
        needs_bytes = facts.makes_bytes + facts.scratch_bytes
        for attempt in range(_TRIES):
            # Twice as much at each attempt: free memory may lie in blocks that are too small for the request.
            self._make_room(needs_bytes << attempt, about.name)
            try:
                return about.func(*args, **kwargs)
            except RuntimeError as error:
                # An op that writes in place may have written a part already, so it is not tried again.
                last = writes or attempt == _TRIES - 1 or needs_bytes << (attempt + 1) > self.budget_bytes
                if last or not is_out_of_memory(error):
                    raise
        raise AssertionError

    def _repeatable(
        self, facts: OpMetadata, args: Any, kwargs: Any, inputs: list[Tensor], written: list[Tensor]
    ) -> RepeatableOp | None:
        """Return the op with its arguments, as needed to run it again; None if it must not."""
        # Collectives, ops that write into outside tensors, and ops of backward never run again.
        about, over = facts.about, None
        # The table rebuilds a tensor from storage, sizes and strides, which these layouts and lazy flags do
        # not fit.
        odd = any(each.layout is not torch.strided or each.is_conj() or each.is_neg() for each in inputs)
        if written or odd or about.once:
            owners = {
                address for each in written if (address := each.untyped_storage()._cdata) in self._values
            }
            outside = [each for each in written if each.untyped_storage()._cdata not in self._values]
            for each in outside:
                self._copy_given(each)
            over = None if outside or not written else self._values[written[0].untyped_storage()._cdata]
            # BatchNorm's statistics are the exception: a second run gets None for them and computes the same
            # output.
            spoils = odd or about.once or (outside and not about.norm) or len(owners) > 1
            if spoils or (over is not None and not over.again):
                self._pin_written(about.func, args, written)
                return None
        random = (
            RandomState.capture(self._module, filter(None, (generator_of(kwargs),))) if facts.random else None
        )
        read = [self._read(each) for each in args]
        named = {name: self._read(value) for name, value in kwargs.items()} if kwargs else {}
        return RepeatableOp(
            facts, read, named, len(self.ran) - 1, [], None if over is None else (over, over), random
        )

    def _read(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            address = value.untyped_storage()._cdata
            mine = self._values.get(address)
            if mine is not None:
                return Read(mine, view_of(value), mine.writes)
            given = self._given.get(address)
            if given is None:
                # Parameters and inputs are referenced, not copied; their version shows a later write.
                given = self._given[address] = OutsideTensor(value, value._version)
            return Read(given, view_of(value), 0)
        if isinstance(value, list | tuple):
            return type(value)(self._read(each) for each in value)
        return value

    def _copy_given(self, tensor: Tensor) -> None:
        """Copy an outside tensor that ops have read and that is about to be written."""
        # Parameters are too large for that.
        given = self._given.pop(tensor.untyped_storage()._cdata, None)
        if given is not None and not isinstance(tensor, nn.Parameter) and not self.backward:
            # Ops that have read the old values may have to run again after this write.
            self._make_room(given.tensor.untyped_storage().nbytes(), "a copy of a buffer")
            whole = whole_of(given.tensor).clone()
            given.tensor, given.version = whole, whole._version
            self.track_constant(whole)

    def _pin_written(self, func: Any, args: Any, written: list[Tensor]) -> None:
        """Hold values that an unrepeatable op wrote into, as earlier readers cannot run again."""
        for each in written:
            value = self._values.get(each.untyped_storage()._cdata)
            if value is not None:
                value.writes += 1
                value.undeclared_writes += is_uncounted(func, args, each)
                # Evicted, it could not be restored: the op that wrote into it must not run again.
                if value.again:
                    value.again = False
                    self._remat.hold(value.number)

    # -- outputs of an op ------------------------------------------------------------------------------------

    def _elements(self, repeatable: RepeatableOp, args: Any, kwargs: Any, out: Any) -> int:
        """Return the number of elements of an elementwise op's output; 0 for other ops."""
        # Only elementwise ops give the same bits when they run part by part.
        if self._parts < 2 or not repeatable.facts.about.by_element or repeatable.over is not None:
            return 0
        return (
            out.numel()
            if 0 < element_bytes(repeatable.facts.about.func, args, kwargs, out) < ON_GPU_ONLY
            else 0
        )

    def _enter(
        self,
        repeatable: RepeatableOp,
        cost_s: float,
        addresses: list[int],
        fresh: list[tuple[int, Tensor, int, int]],
        elements: int,
    ) -> None:
        """Account the op's outputs."""
        values = self._values
        numbers = [values[each].number for each in addresses if each in values]
        if repeatable.over is not None:
            self._overwrite(repeatable, cost_s, numbers)
            return
        made = self._called(
            repeatable.facts, cost_s, numbers, [size for _, _, _, size in fresh], -1, elements
        )
        self._ops.append(repeatable)
        for number, (at, each, address, size) in zip(made, fresh, strict=True):
            # A detached alias: the table must not hold the graph, and autograd must not count it as a view.
            value = Value(number, size, True, each.detach(), address)
            repeatable.made.append((at, value))
            values[address] = self._by_number[number] = self._held[number] = value

    def _enter_constant(self, tensor: Tensor, size: int) -> None:
        if self.backward:
            self.track_constant(tensor)
            return
        value = Value(self._constant(size), size, again=False)
        self._remat.hold(value.number)
        self._adopt(value, tensor.detach())

    def track_constant(self, tensor: Tensor) -> None:
        """Account `tensor` as a constant while it has holders, unless it is a value."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._values:
            return
        number = self._constant(storage.nbytes())
        watch = self._watches[number] = StorageWatch(storage, self._dead.append)
        watch.number = number

    def _constant(self, n_bytes: int) -> int:
        try:
            number: int = self._remat.constant(n_bytes)
        except RuntimeError as error:
            raise self._nothing_left("the model") from error
        self._apply_journal()
        return number

    def _called(
        self,
        facts: OpMetadata,
        cost_s: float,
        numbers: list[int],
        n_bytes: list[int],
        takes_over: int,
        elements: int = 0,
    ) -> list[int]:
        try:
            made: list[int] = self._remat.call(
                cost_s, numbers, n_bytes, takes_over, facts.scratch_bytes, elements
            )
        except RuntimeError as error:
            raise self._nothing_left(facts.about.name) from error
        self._apply_journal()
        return made

    def _overwrite(self, repeatable: RepeatableOp, cost_s: float, numbers: list[int]) -> None:
        """Replace the old value by a new version of it in the same storage."""
        assert repeatable.over is not None
        old = repeatable.over[0]
        alias, old.alias, old.writes = old.alias, None, old.writes + 1
        assert alias is not None
        # The op's own reference is the new version's; otherwise the old one could never be evicted.
        self._remat.let_go(old.number)
        (number,) = self._called(repeatable.facts, cost_s, numbers, [old.bytes], old.number)
        self._ops.append(repeatable)
        self._remat.release(old.number)
        old.outside = False
        del self._held[old.number]
        value = Value(number, old.bytes, again=True)
        repeatable.over = (old, value)
        self._adopt(value, alias)

    def _adopt(self, value: Value, alias: Tensor) -> None:
        """Note that `value` is resident for the first time, and held by the op's caller."""
        self._by_number[value.number] = self._held[value.number] = value
        self._place(value, alias)

    def _place(self, value: Value, alias: Tensor) -> None:
        value.alias, value.address = alias, alias.untyped_storage()._cdata
        self._values[value.address] = value

    def _remove(self, value: Value) -> None:
        """Drop the table's reference to its storage, which frees it."""
        if value.alias is not None:
            value.alias = value.version = None
            if self._values.get(value.address) is value:
                del self._values[value.address]

    # -- outside references ----------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Release the references that Python and autograd have dropped since the last op."""
        remat = self._remat
        while self._dead:
            number = self._dead.popleft().number
            del self._watches[number]
            remat.release(number)
        # No callback reports the end of a reference while the table has an alias, so counts are read at each
        # op.
        gone = [value for value in self._held.values() if _count(value.address) <= _ALONE]
        for value in gone:
            value.outside = False
            del self._held[value.number]
            remat.give_back(value.number)
        while self._unkept:
            remat.release(self._unkept.popleft().number)
        self._apply_journal()

    # -- autograd --------------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Any:
        """Return the object that autograd saves instead of `tensor`."""
        value = self._values.get(tensor.untyped_storage()._cdata)
        if (
            # Autograd keeps these itself; the version shows a later write, which its own check would not see
            # below the mode.
            value is None
            or self.paused
            or tensor.layout is not torch.strided
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return tensor, tensor._version
        self._remat.retain(value.number)
        return PackedValue(value, view_of(tensor), self._unkept.append)

    def unpack(self, kept: Any) -> Tensor:
        """Return the tensor that autograd saved, after replaying ops if it was evicted.

        Raises:
            ApplyError: It, or a tensor that it was computed from, was written since.
        """
        if type(kept) is not PackedValue:
            tensor, version = kept
            if tensor._version != version:
                raise written_since("a tensor that backward needs")
            return tensor  # type: ignore[no-any-return]
        value = kept.value
        # As autograd's version check, for writes that the mode has seen.
        if value.writes - value.undeclared_writes != kept.writes:
            raise written_since("a tensor that backward needs")
        if value.is_written:
            raise written_since("a tensor that backward needs")
        self._rematerialize(value)
        assert value.alias is not None
        if not value.outside:
            value.outside = True
            self._held[value.number] = value
            self._remat.take(value.number)
        self.paused = True
        try:
            # Views made here are not ops of the model.
            return kept.view.on(value.alias)
        finally:
            self.paused = False

    def _rematerialize(self, value: Value) -> None:
        self._settle()
        try:
            self._remat.bring(value.number)
        except RuntimeError as error:
            raise self._nothing_left("the model") from error
        self._apply_journal()

    # -- decisions of the rematerializer ---------------------------------------------------------------------

    def leave_room(self, n_bytes: int) -> None:
        """Evict until `n_bytes` are free, for the ops between forward and backward."""
        self._settle()
        self._make_room(n_bytes, "the loss")

    def note_outputs(self, outputs: list[Tensor]) -> None:
        """Note forward's outputs. The mode does not see later writes into them, but version counters do."""
        for each in outputs:
            value = self._values.get(each.untyped_storage()._cdata)
            if value is not None and value.alias is not None:
                # An alias of the returned tensor: the table's own was made below ADInplaceOrView and has
                # another version counter.
                value.alias = whole_of(each.detach()).detach()
                value.version = value.alias._version

    def counted(self) -> dict[str, Any]:
        """Return the rematerializer's counters."""
        found: dict[str, Any] = self._remat.counted()
        return found

    def _make_room(self, n_bytes: int, requester: str) -> None:
        try:
            self._remat.make_room(n_bytes)
        except RuntimeError as error:
            raise self._nothing_left(requester) from error
        self._apply_journal()

    def _nothing_left(self, requester: str) -> ApplyError:
        self._apply_journal()
        counted = self._remat.counted()
        return too_small(
            requester, counted["wanted_bytes"], counted["held_bytes"], self.background_bytes, waits=self.waits
        )

    def _apply_journal(self) -> None:
        if not self._remat.pending():
            return
        over, along = False, []
        for act, number in self._remat.drain():
            if act == EVICT:
                value = self._by_number.get(number)
                if value is not None:
                    self._remove(value)
            elif act == ALONG:
                along.append(self._ops[number])
            elif act == REPLAY:
                if along:
                    self._again_in_parts(self._ops[number], along)
                else:
                    self._replay_op(self._ops[number], over)
                along = []
            over = act == OVERWRITE

    def _again_in_parts(self, ran: RepeatableOp, along: list[RepeatableOp]) -> None:
        """Replay an elementwise op in parts, with the producers of its missing arguments."""
        self.replays.append(
            ReplayRecord(len(self.ran), ran.at, tuple(each.at for each in along), self._parts)
        )
        self.paused = True
        try:
            with torch.no_grad(), no_autocast():
                out = run_in_parts(ran, along, self._parts)
        finally:
            self.paused = False
        self._place(ran.made[0][1], out)

    def _replay_op(self, ran: RepeatableOp, over: bool) -> None:
        """Replay an op on its recorded arguments."""
        self.replays.append(ReplayRecord(len(self.ran), ran.at))
        self.paused = True
        try:
            with torch.no_grad(), no_autocast():
                out, whole = run_again(ran, over)
        finally:
            self.paused = False
        if ran.over is not None:
            assert whole is not None
            # The old version's storage is now the new version's.
            if over:
                self._remove(ran.over[0])
            self._place(ran.over[1], whole.detach())  # a view would hold its base and always look referenced
        made = tensors_in((out,))
        for at, value in ran.made:
            if value.alias is None:
                self._place(value, made[at])


_count: Callable[[int], int] = torch._C._storage_Use_Count


def _alone() -> int:
    tensor = torch.zeros(1)
    # Measured, not assumed: the storage's Python object may count as well.
    return _count(tensor.untyped_storage()._cdata)


_ALONE = _alone()
"""Use count of a storage that one tensor holds."""
