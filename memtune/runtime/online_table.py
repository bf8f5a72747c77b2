"""The tensors of a running model under a byte budget: who made what, who still wants it, what was evicted and runs again.

Rule 1. The native machine (`csrc/remat`) keeps the books and decides; this table does what its journal says to real tensors.
Rule 2. What Python or autograd's engine hold cannot be evicted: it is held on the books until only the table's own alias of
        its storage is left. What autograd would save, the table keeps in its place (`pack`), or brings back (`unpack`).
Rule 3. An op runs again on what it read then: a tensor from outside that has been written into since is an error, a buffer or
        input is copied before it is written into, a value changed in place is a version of its own.
Rule 4. Collectives, ops that write into what comes from outside, and ops of backward never run again.
Rule 5. All that is made while the region runs is on the books, whoever holds it: gradients that flow in, copies, what a
        kernel takes beside its output. So the books' peak is the device's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memtune import _native
from memtune.errors import ApplyError
from memtune.out_of_memory import is_out_of_memory
from memtune.program import ON_GPU_ONLY
from memtune.remat import ALONG, EVICT, OVERWRITE, REPLAY, Policy
from memtune.runtime.by_element import element_bytes
from memtune.runtime.capture import no_autocast
from memtune.runtime.online_notes import NotedBooks, Notes, OpNote
from memtune.runtime.online_values import (
    Again,
    Given,
    Kept,
    Ran,
    Read,
    Value,
    Watch,
    run_again,
    run_in_parts,
    too_small,
    view_of,
    whole_of,
    written_since,
)
from memtune.runtime.op_arguments import is_uncounted, mutated, tensors_in
from memtune.runtime.op_facts import About, Facts, OpFacts
from memtune.runtime.random_state import RandomState, generator_of

TRIES = 4
"""Runs of an op that the device refuses, each after more was evicted."""


class OnlineTable:
    """Values and books of the forwards that wait for their backward.

    Args:
        module: Whose forward runs.
        policy: Who is evicted.
        budget_bytes: For the values alone.
        background_bytes: What else there is, for messages.
        facts: Of ops; kept over many steps.
        notes: Where to write down what happens, if anywhere.
    """

    def __init__(
        self, module: nn.Module, policy: Policy, budget_bytes: int, background_bytes: int, facts: OpFacts,
        notes: Notes | None = None,
    ) -> None:  # fmt: skip
        self.budget_bytes, self.background_bytes, self.notes = budget_bytes, background_bytes, notes
        self.backward, self.paused, self.waits = False, False, False
        self.ran: list[Facts] = []
        """Every op that ran, once for each first run."""
        self.replays: list[Again] = []
        """What ran again, in order."""
        self._module, self._facts = module, facts
        self._values: dict[int, Value] = {}  # by address of the storage
        self._by_number: dict[int, Value] = {}
        self._held: dict[int, Value] = {}  # those outside, by number
        self._given: dict[int, Given] = {}
        self._ops: list[Ran] = []
        self._watches: dict[int, Watch] = {}  # what the engine or others hold and the table does not
        self._dead: deque[Watch] = deque()
        self._unkept: deque[Value] = deque()
        if budget_bytes <= 0:
            raise too_small("the model", 0, 0, background_bytes)
        self._parts = policy.parts
        books = _native.Rematerializer(policy.settings(budget_bytes))
        self._books: Any = books if notes is None else NotedBooks(books, notes)

    # -- an op runs ----------------------------------------------------------------------------------------------------

    def run(self, about: About, args: Any, kwargs: Any) -> Any:
        """Run an op of the model's forward or backward, with room made for what it makes."""
        self._settle()
        facts = self._facts.of(about, args, kwargs)
        self.ran.append(facts)
        inputs = tensors_in(args)
        if kwargs:
            inputs += tensors_in(list(kwargs.values()))
        written = mutated(about.func, args, kwargs) if about.writes else []
        addresses = [each.untyped_storage()._cdata for each in inputs]
        noted = None if self.backward else self._noted(facts, args, kwargs, inputs, written)
        out = self._fitted(facts, args, kwargs, bool(written))
        fresh: list[tuple[int, Tensor, int, int]] = []  # position, tensor, address, bytes
        for at, each in enumerate(tensors_in((out,))):
            storage = each.untyped_storage()
            if storage._cdata not in addresses:
                addresses.append(storage._cdata)
                fresh.append((at, each, storage._cdata, storage.nbytes()))
        made_bytes = sum([each[3] for each in fresh])
        if made_bytes > facts.makes_bytes:
            facts.makes_bytes = made_bytes
        if noted is None or (noted.over is not None and fresh):
            if noted is not None:
                self._spoil(about.func, args, written)  # no op makes both again: without it the value would be as before
            for _, each, _, size in fresh:
                self._enter_constant(each, size)
        elif fresh or noted.over is not None:
            self._enter(
                noted,
                self._facts.cost_s(facts, args, kwargs, out, inputs),
                addresses,
                fresh,
                self._elements(noted, args, kwargs, out),
            )
        return out

    def _fitted(self, facts: Facts, args: Any, kwargs: Any, writes: bool) -> Any:
        """Run it; where the device has no room although the books have, evict more and try again."""
        about = facts.about
        needs_bytes = facts.makes_bytes + facts.scratch_bytes
        for attempt in range(TRIES):
            self._make_room(needs_bytes << attempt, about.name)
            if self.notes is not None:
                self._note(attempt)
            try:
                return about.func(*args, **kwargs)
            except RuntimeError as error:
                last = writes or attempt == TRIES - 1 or needs_bytes << (attempt + 1) > self.budget_bytes
                if last or not is_out_of_memory(error):
                    raise
        raise AssertionError

    def _note(self, attempt: int) -> None:
        assert self.notes is not None
        if attempt:
            self.notes.why_not = "the device had less room than the books"
        else:
            self.notes.ops.append(OpNote(len(self.notes.told)))

    def _noted(self, facts: Facts, args: Any, kwargs: Any, inputs: list[Tensor], written: list[Tensor]) -> Ran | None:
        """The op as it could run again; None where it must not."""
        about, over = facts.about, None
        odd = any(each.layout is not torch.strided or each.is_conj() or each.is_neg() for each in inputs)
        if written or odd or about.once:
            owners = {address for each in written if (address := each.untyped_storage()._cdata) in self._values}
            abroad = [each for each in written if each.untyped_storage()._cdata not in self._values]
            for each in abroad:
                self._copy_given(each)
            over = None if abroad or not written else self._values[written[0].untyped_storage()._cdata]
            spoils = odd or about.once or (abroad and not about.norm) or len(owners) > 1
            if spoils or (over is not None and not over.again):
                self._spoil(about.func, args, written)
                return None
        random = RandomState.capture(self._module, filter(None, (generator_of(kwargs),))) if facts.random else None
        read = [self._read(each) for each in args]
        named = {name: self._read(value) for name, value in kwargs.items()} if kwargs else {}
        return Ran(facts, read, named, len(self.ran) - 1, [], None if over is None else (over, over), random)

    def _read(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            address = value.untyped_storage()._cdata
            mine = self._values.get(address)
            if mine is not None:
                return Read(mine, view_of(value), mine.writes)
            given = self._given.get(address)
            if given is None:
                given = self._given[address] = Given(value, value._version)
            return Read(given, view_of(value), 0)
        if isinstance(value, list | tuple):
            return type(value)(self._read(each) for each in value)
        return value

    def _copy_given(self, tensor: Tensor) -> None:
        """What ops have read and is about to change stays as a copy for them; parameters are too large for that."""
        given = self._given.pop(tensor.untyped_storage()._cdata, None)
        if given is not None and not isinstance(tensor, nn.Parameter) and not self.backward:
            self._cannot_follow("a tensor from outside is changed that was read before")
            self._make_room(given.tensor.untyped_storage().nbytes(), "a copy of a buffer")
            whole = whole_of(given.tensor).clone()
            given.tensor, given.version = whole, whole._version
            self.watch(whole)

    def _spoil(self, func: Any, args: Any, written: list[Tensor]) -> None:
        """Values that an op wrote into which cannot be repeated: they stay, and who read them before cannot run again."""
        for each in written:
            value = self._values.get(each.untyped_storage()._cdata)
            if value is not None:
                self._cannot_follow("a value is changed by what must not run again")
                value.writes += 1
                value.unsaid += is_uncounted(func, args, each)
                if value.again:
                    value.again = False
                    self._books.hold(value.number)

    def _cannot_follow(self, why: str) -> None:
        if self.notes is not None:
            self.notes.why_not = why

    # -- what it made --------------------------------------------------------------------------------------------------

    def _elements(self, noted: Ran, args: Any, kwargs: Any, out: Any) -> int:
        """How many of one value the op has made, each of the same element of what it read; 0 where it works in another way."""
        if self._parts < 2 or not noted.facts.about.by_element or noted.over is not None:
            return 0
        return out.numel() if 0 < element_bytes(noted.facts.about.func, args, kwargs, out) < ON_GPU_ONLY else 0

    def _enter(
        self, noted: Ran, cost_s: float, addresses: list[int], fresh: list[tuple[int, Tensor, int, int]], elements: int
    ) -> None:
        """Put what the op made on the books."""
        values = self._values
        numbers = [values[each].number for each in addresses if each in values]
        if noted.over is not None:
            self._overwrite(noted, cost_s, numbers)
            return
        made = self._called(noted.facts, cost_s, numbers, [size for _, _, _, size in fresh], -1, elements)
        if self.notes is not None:
            self.notes.ops[-1].again = len(self._ops)
        self._ops.append(noted)
        for number, (at, each, address, size) in zip(made, fresh, strict=True):
            if self.notes is not None:
                self.notes.made(each, number, size)
            value = Value(number, size, True, each.detach(), address)
            noted.made.append((at, value))
            values[address] = self._by_number[number] = self._held[number] = value

    def _enter_constant(self, tensor: Tensor, size: int) -> None:
        number = self.watch(tensor) if self.backward else self._constant(size)
        if self.notes is not None and number is not None:
            self.notes.made(tensor, number, size)
        if self.backward or number is None:
            return
        value = Value(number, size, again=False)
        self._books.hold(value.number)
        self._adopt(value, tensor.detach())

    def flow_in(self, at: int, gradient: Tensor) -> None:
        """A gradient of what forward returned, by its place among that, is there."""
        number = self.watch(gradient)
        if number is None:
            self._cannot_follow("a gradient flows in that is a value of the model")
        elif self.notes is not None:
            self.notes.flowed_in.append((number, at))

    def watch(self, tensor: Tensor) -> int | None:
        """`tensor` takes room as long as somebody holds it, which is not the table's to end; its number, if it is no value."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._values:
            return None
        number = self._constant(storage.nbytes())
        watch = self._watches[number] = Watch(storage, self._dead.append)
        watch.number = number
        return number

    def _constant(self, n_bytes: int) -> int:
        try:
            number: int = self._books.constant(n_bytes)
        except RuntimeError as error:
            raise self._nothing_left("the model") from error
        self._obey()
        return number

    def _called(
        self, facts: Facts, cost_s: float, numbers: list[int], n_bytes: list[int], takes_over: int, elements: int = 0
    ) -> list[int]:
        try:
            made: list[int] = self._books.call(cost_s, numbers, n_bytes, takes_over, facts.scratch_bytes, elements)
        except RuntimeError as error:
            raise self._nothing_left(facts.about.name) from error
        self._obey()
        return made

    def _overwrite(self, noted: Ran, cost_s: float, numbers: list[int]) -> None:
        """The value as it was ends, a new version of it lives in the same storage."""
        assert noted.over is not None
        old = noted.over[0]
        alias, old.alias, old.writes = old.alias, None, old.writes + 1
        assert alias is not None
        self._books.let_go(old.number)
        (number,) = self._called(noted.facts, cost_s, numbers, [old.bytes], old.number)
        if self.notes is not None:
            self.notes.ops[-1].again, self.notes.ops[-1].over = len(self._ops), (old.number, number)
        self._ops.append(noted)
        self._books.release(old.number)
        old.outside = False
        del self._held[old.number]
        value = Value(number, old.bytes, again=True)
        noted.over = (old, value)
        self._adopt(value, alias)

    def _adopt(self, value: Value, alias: Tensor) -> None:
        """`value` is there for the first time, and the op's caller holds it."""
        self._by_number[value.number] = self._held[value.number] = value
        self._place(value, alias)

    def _place(self, value: Value, alias: Tensor) -> None:
        value.alias, value.address = alias, alias.untyped_storage()._cdata
        self._values[value.address] = value

    def _remove(self, value: Value) -> None:
        """Let its storage go, if it was there."""
        if value.alias is not None:
            value.alias = value.version = None
            if self._values.get(value.address) is value:
                del self._values[value.address]

    # -- who still wants it --------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Tell the books what Python and autograd have let go of since the last op."""
        books = self._books
        while self._dead:
            number = self._dead.popleft().number
            del self._watches[number]
            books.release(number)
        gone = [value for value in self._held.values() if _count(value.address) <= _ALONE]
        for value in gone:
            value.outside = False
            del self._held[value.number]
            books.give_back(value.number)
        while self._unkept:
            books.release(self._unkept.popleft().number)
        self._obey()

    # -- autograd ------------------------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Any:
        """What autograd holds in place of `tensor`, which it saves for backward."""
        value = self._values.get(tensor.untyped_storage()._cdata)
        if value is None or self.paused or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return tensor, tensor._version
        self._books.retain(value.number)
        return Kept(value, view_of(tensor), self._unkept.append)

    def unpack(self, kept: Any) -> Tensor:
        """The tensor that autograd had saved; runs again what it takes.

        Raises:
            ApplyError: It, or what it was made of, was written since.
        """
        if type(kept) is not Kept:
            tensor, version = kept
            if tensor._version != version:
                raise written_since("a tensor that backward needs")
            return tensor  # type: ignore[no-any-return]
        value = kept.value
        if value.writes - value.unsaid != kept.writes:
            raise written_since("a tensor that backward needs")
        if value.is_written:
            raise written_since("a tensor that backward needs")
        self._bring(value)
        assert value.alias is not None
        if not value.outside:
            value.outside = True
            self._held[value.number] = value
            self._books.take(value.number)
        self.paused = True
        try:
            return kept.view.on(value.alias)
        finally:
            self.paused = False

    def _bring(self, value: Value) -> None:
        self._settle()
        try:
            self._books.bring(value.number)
        except RuntimeError as error:
            raise self._nothing_left("the model") from error
        self._obey()

    # -- what the books decide -----------------------------------------------------------------------------------------

    def leave_room(self, n_bytes: int) -> None:
        """Evict until so many bytes are free: for what runs between forward and backward."""
        self._settle()
        self._make_room(n_bytes, "the loss")
        if self.notes is not None:
            self.notes.forward_end = len(self.notes.told)

    def note_outputs(self, outputs: list[Tensor]) -> None:
        """Forward returns these: who writes into them from here on is not seen, but their versions tell."""
        for each in outputs:
            value = self._values.get(each.untyped_storage()._cdata)
            if value is not None and value.alias is not None:
                value.alias = whole_of(each.detach()).detach()  # what ops made below autograd's view counts other versions
                value.version = value.alias._version

    def counted(self) -> dict[str, Any]:
        """Counters of the books."""
        found: dict[str, Any] = self._books.counted()
        return found

    def _make_room(self, n_bytes: int, who: str) -> None:
        try:
            self._books.make_room(n_bytes)
        except RuntimeError as error:
            raise self._nothing_left(who) from error
        self._obey()

    def _nothing_left(self, who: str) -> ApplyError:
        self._obey()
        counted = self._books.counted()
        return too_small(who, counted["wanted_bytes"], counted["held_bytes"], self.background_bytes, waits=self.waits)

    def _obey(self) -> None:
        if not self._books.pending():
            return
        over, along = False, []
        for act, number in self._books.drain():
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
                    self._again(self._ops[number], over)
                along = []
            over = act == OVERWRITE

    def _again_in_parts(self, ran: Ran, along: list[Ran]) -> None:
        """Run an op once more and others along with it, whose values never exist whole."""
        self.replays.append(Again(len(self.ran), ran.at, tuple(each.at for each in along), self._parts))
        self.paused = True
        try:
            with torch.no_grad(), no_autocast():
                out = run_in_parts(ran, along, self._parts)
        finally:
            self.paused = False
        self._place(ran.made[0][1], out)

    def _again(self, ran: Ran, over: bool) -> None:
        """Run an op once more (Rule 3)."""
        self.replays.append(Again(len(self.ran), ran.at))
        self.paused = True
        try:
            with torch.no_grad(), no_autocast():
                out, whole = run_again(ran, over)
        finally:
            self.paused = False
        if ran.over is not None:
            assert whole is not None
            if over:
                self._remove(ran.over[0])
            self._place(ran.over[1], whole.detach())  # a view would keep its base, and look held for ever
        made = tensors_in((out,))
        for at, value in ran.made:
            if value.alias is None:
                self._place(value, made[at])


_count: Callable[[int], int] = torch._C._storage_Use_Count


def _alone() -> int:
    tensor = torch.zeros(1)
    return _count(tensor.untyped_storage()._cdata)


_ALONE = _alone()
"""Use count of a storage that one tensor holds."""


def held_elsewhere(address: int) -> bool:
    """Whether more than one tensor holds the storage at `address`."""
    return _count(address) > _ALONE
