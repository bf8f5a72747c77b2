"""Forward and backward along a logged path: runs the ops, replays the rematerializer calls and applies its
decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext, suppress
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from memtune import _native
from memtune.activations.capture import Outside, Slot, Tape
from memtune.activations.eviction.decision_log import LoggedRun, script_of
from memtune.activations.eviction.evictable_tensor import (
    OutsideTensor,
    Read,
    RepeatableOp,
    ReplayRecord,
    Value,
    View,
    run_in_parts,
    too_small,
    whole_of,
    written_since,
)
from memtune.activations.eviction.eviction_table import TRIES, is_shared_storage
from memtune.activations.eviction.op_metadata import OpMetadata
from memtune.activations.eviction.policy import ALONG, EVICT, OVERWRITE, REPLAY
from memtune.activations.eviction.replay_path import OpPath, Path
from memtune.activations.schedules import CallText, bases_of, outside_name, slots_in
from memtune.device import is_out_of_memory
from memtune.errors import ApplyError
from memtune.program import BATCH_NORMS
from memtune.runtime import READS_GRAD_MODE, RandomState, grad_mode_on, tensors_in

Acts = list[tuple[int, int]]
Views = Callable[[list[Any], Sequence[Any], Sequence[Any]], list[Tensor]]


class Route:
    """A path with generated code.

    Args:
        tape: The captured region.
        path: The rematerializer calls and the numbers of values.
        noted: The run that the path was found with.
        parts: Number of parts of an op that runs in parts.
        random_state: Returns the current state of the generators.
        device: Device of the module.
    """

    def __init__(
        self,
        tape: Tape,
        path: Path,
        logged: LoggedRun,
        parts: int,
        random_state: Callable[[], RandomState],
        device: torch.device,
    ) -> None:
        self.tape, self.path, self.parts = tape, path, parts
        self.script = script_of(logged.log, logged.ran)
        self.code = ReplayCode(tape, path, random_state, device)
        self.facts: list[OpMetadata] = [logged.ran[each.ran] for each in path.ops]
        self.op_of = {each.again: op for op, each in enumerate(path.ops) if each.again >= 0}
        self.bases = bases_of(tape)
        self.output_numbers = frozenset(path.outputs.values())
        self.due: dict[int, list[tuple[int, Slot]]] = {}
        """By op: parameters and their gradients that are ready before it."""
        for parameter, after, gradient in tape.ready_gradients:
            # Yielded before the next op: hooks may read the gradient, and the memory may be needed at once.
            self.due.setdefault(after + 1, []).append((parameter, gradient))
        self.fresh: Callable[[int], list[tuple[int, int]]] = cache(
            lambda op: fresh_outputs(tape, path.ops[op], op)
        )
        """Position among the tensors that an op returns, and number, of each new value."""
        self._last_read = _last_reads(tape)

    @cached_property
    def forward(self) -> list[Run]:
        """Ops of forward."""
        return self.code.runs(0, self.tape.graph.n_forward)

    @cached_property
    def backward(self) -> list[Run]:
        """Ops of backward."""
        return self.code.runs(self.tape.graph.n_forward, self.tape.graph.n_ops)

    @cached_property
    def ready_order(self) -> tuple[int, ...]:
        """Parameters in the order in which backward completes their gradients."""
        return tuple(parameter for _, each in sorted(self.due.items()) for parameter, _ in each)

    @cached_property
    def calls(self) -> list[tuple[tuple[int, int], ...]]:
        """Ranges of rematerializer calls before each op; two ranges if gradients are ready in between."""
        ops = enumerate(self.path.ops)
        return [
            ((op.first, op.asks), (op.asks, op.end)) if at in self.due else ((op.first, op.end),)
            for at, op in ops
        ]

    @cached_property
    def until(self) -> list[int]:
        """For each op the next one before which the caller's references to outputs must be checked."""
        found, end = [], len(self.path.ops)
        for at in reversed(range(len(self.path.ops))):
            found.append(end)
            end = at if self.path.ops[at].outputs else end
        return found[::-1]

    @cached_property
    def outputs(self) -> Views:
        """Function that makes forward's outputs."""
        slots = [leaf for leaf in self.tape.outputs if isinstance(leaf, Slot)]
        return self.code.views(slots, self._numbers_at(self.tape.graph.n_forward - 1))

    @cached_property
    def input_gradients(self) -> Views:
        """Function that makes the gradients of the inputs."""
        return self.code.views(
            [slot for _, slot in self.tape.input_gradients], self._numbers_at(self.tape.graph.n_ops - 1)
        )

    @cached_property
    def gradient_views(self) -> dict[int, tuple[Views, list[int]]]:
        """By op: a function that makes the gradients ready before it, and the numbers that have no later
        reader.
        """
        found = {}
        for op, due in self.due.items():
            numbers = self._numbers_at(op - 1)
            done = {
                slot.of
                for _, slot in due
                if isinstance(slot.of, int) and self._last_read.get(slot.of, -1) < op
            }
            found[op] = (
                self.code.views([slot for _, slot in due], numbers),
                [numbers[each] for each in done],
            )
        return found

    @cached_property
    def inputs_of_backward(self) -> list[int]:
        """Arguments that backward reads."""
        calls = self.tape.calls[self.tape.graph.n_forward :]
        return sorted({each.number for call in calls for each in _outside(call) if each.kind == "input"})

    @cached_property
    def outside_of(self) -> dict[int, list[Outside]]:
        """Outside tensors that repeatable ops of the tape read: parameters, buffers, arguments."""
        found = {}
        for op in self.op_of.values():
            call = self.tape.calls[op]
            # In training the statistics are updated, not read, and a second run gets None for them.
            statistics = str(call.func) in BATCH_NORMS and call.args[5]
            read = [*call.args[:3], *call.args[5:]] if statistics else call.args
            found[op] = [
                each
                for each in _outside((read, call.kwargs))
                if each.kind in ("parameter", "buffer", "input")
            ]
        return found

    @cached_property
    def all_outside(self) -> frozenset[Outside]:
        """All outside tensors that repeatable ops read."""
        return frozenset(each for read in self.outside_of.values() for each in read)

    @cached_property
    def returned_and_read(self) -> frozenset[int]:
        """Numbers of forward's outputs that backward reads."""
        backward = self.path.ops[self.tape.graph.n_forward :]
        return self.output_numbers.intersection(
            number for each in backward for number in each.numbers.values()
        )

    def _numbers_at(self, op: int) -> dict[int, int]:
        found: dict[int, int] = {}
        for each in self.path.ops[: op + 1]:
            found |= each.numbers
        return found


def _outside(values: Any) -> list[Outside]:
    values = (values.args, values.kwargs) if hasattr(values, "kwargs") else values
    return [slot.of for slot in slots_in(values) if isinstance(slot.of, Outside)]


def _last_reads(tape: Tape) -> dict[int, int]:
    """Return the last op that reads each value, or passes it on as a gradient."""
    last = {value: op for op, read in enumerate(tape.graph.reads) for value in read}
    for _, after, slot in tape.ready_gradients:
        if isinstance(slot.of, int):
            last[slot.of] = max(last.get(slot.of, -1), after)
    for _, slot in tape.input_gradients:
        if isinstance(slot.of, int):
            last[slot.of] = len(tape.calls)
    return last


class ReplayRun:
    """One forward and the backward that follows it.

    Args:
        route: The path to run.
        opened: Function that makes a rematerializer.
        budget_bytes: Budget of the values alone.
        background_bytes: Other resident bytes, for messages.
        state: Parameters and buffers.
        inputs: Arguments of the module.
    """

    def __init__(
        self,
        route: Route,
        opened: Callable[[], _native.Rematerializer],
        budget_bytes: int,
        background_bytes: int,
        state: Sequence[Tensor],
        inputs: Sequence[Any],
    ) -> None:
        self.remat, self.background_bytes, self.replays = opened(), background_bytes, list[ReplayRecord]()
        self._opened, self._one_by_one = opened, False
        self._decided: list[list[Acts]] = []
        """Actions before the next ops, one list per op, as far as decided; the next op is last."""
        self._flowed_in_bytes: list[int] = []
        self._route, self._budget_bytes = route, budget_bytes
        self._state, self._inputs = state, inputs
        # The only references to the values, so that setting an entry to None frees the memory.
        self._there: list[Tensor | None] = [None] * route.path.n_numbers
        self._random: dict[int, RandomState] = {}
        self._versions: dict[Outside, int] = {}
        self._output_versions: dict[int, int] = {}
        self._longer: list[int] = []
        """Numbers of outputs that the caller holds longer than in the logged run."""

    # -- forward and backward --------------------------------------------------------------------------------

    def forward(self) -> tuple[Tensor, ...]:
        """Run forward; return its outputs."""
        route, path = self._route, self._route.path
        there, state, inputs, random = self._there, self._state, self._inputs, self._random
        for at, run in enumerate(route.forward):
            if not self._decided:
                self._decide(at, len(route.forward))
            # Reversed by `_decide`, so that `pop` takes the next op's from the end.
            for done in self._decided.pop():
                self._apply_journal(done, at)
            try:
                run(there, state, inputs, random)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self._with_more_room(at, run)
        self._tell(path.ops[len(route.forward) - 1].end, path.forward_end, "the loss", len(route.forward))
        self._note_versions()
        return tuple(route.outputs(there, state, inputs))

    def backward(
        self, route: Route, gradients: list[Any], ready: list[Tensor]
    ) -> Generator[int, None, list[Tensor]]:
        """Run backward along `route`, which has the same path.

        Arguments and results as of `codegen.Code.backward`.
        """
        self._route, first = route, len(route.forward)
        self._check_outputs()
        self._flow_in(gradients)
        # `route` may be another than forward's: its gradients have other strides, the path is the same.
        path, last, due = route.path, len(route.path.ops), route.due
        there, state, inputs, random = self._there, self._state, self._inputs, self._random
        for at, run in enumerate(route.backward, first):
            if not self._decided:
                self._hold_longer(path.ops[at])
                self._decide(at, route.until[at])
            decided = self._decided.pop()
            if at in due:
                # Take the gradients out of the list of values before the calls that release them are applied.
                found = self._take_ready(at)
                self._apply_journal(decided.pop(0), at)
                for parameter, _ in due[at]:
                    ready.append(found.pop())
                    yield parameter
            for done in decided:
                self._apply_journal(done, at)
            try:
                run(there, state, inputs, random)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self._with_more_room(at, run)
        found = self._take_ready(last) if last in due else []
        self._tell(path.ops[-1].end, len(route.script), "the model", last)
        results = route.input_gradients(there, state, inputs)
        # Before the last gradients are yielded: the engine may run a long hook while values are held.
        there.clear()
        for parameter, _ in due.get(last, ()):
            ready.append(found.pop())
            yield parameter
        return results

    def _flow_in(self, gradients: list[Any]) -> None:
        for number, output in self._route.path.flowed_in:
            self._there[number] = gradients[output]
            self._flowed_in_bytes.append(gradients[output].untyped_storage().nbytes())
            try:
                self.remat.constant(self._flowed_in_bytes[-1])
            except RuntimeError as error:
                raise self._nothing_left("the model", len(self._route.forward)) from error
            self._apply_journal(self.remat.drain(), len(self._route.forward))
        # The engine's list would hold the incoming gradients until backward returns.
        gradients.clear()

    def _take_ready(self, at: int) -> list[Tensor]:
        """Return the gradients that are ready before an op, the first one last; this run holds them no
        longer.
        """
        views, done = self._route.gradient_views[at]
        found = views(self._there, self._state, self._inputs)
        for number in done:
            self._there[number] = None
        found.reverse()
        return found

    def used_bytes(self) -> int:
        """Return the accounted bytes."""
        return int(self.remat.counted()["used_bytes"])

    def preempt(self) -> None:
        """Evict down to half of the budget, or as far as possible; call it between forward and backward."""
        # These evictions are in no script, so `_back_to` could not rebuild the rematerializer from one.
        self._one_by_one = True
        with suppress(RuntimeError):
            self.remat.make_room(self._budget_bytes // 2)
        self._apply_journal(self.remat.drain(), len(self._route.forward))

    # -- decisions of the rematerializer ---------------------------------------------------------------------

    def _decide(self, at: int, end: int) -> None:
        """Get the rematerializer's actions before the ops from `at` to before `end`.

        They do not depend on the outputs of ops, so all are decided at once while the CPU caches are warm; if
        a request fails, only those up to the op that makes it.
        """
        remat, play = self.remat, self._route.script.play
        # A request may now differ from the logged run's, and must be made at its own op.
        if self._one_by_one or self._longer:
            end = at + 1
        try:
            decided = [
                [play(remat, first, last) for first, last in each] for each in self._route.calls[at:end]
            ]
        except RuntimeError as error:
            if end == at + 1:
                raise self._nothing_left(self._route.facts[at].about.name, at) from error
            # Calls behind the failing one have been played already; a rematerializer cannot be rolled back.
            self._back_to(self._route.path.ops[at].first, at)
            self._decide(at, at + 1)
            return
        decided.reverse()
        self._decided = decided

    def _back_to(self, event: int, at: int) -> None:
        """Rebuild the rematerializer as it was before this call; decide op by op from here on."""
        path, play = self._route.path, self._route.script.play
        self.remat, self._decided, self._one_by_one = self._opened(), [], True
        play(self.remat, 0, min(event, path.forward_end))
        if at >= len(self._route.forward):
            for n_bytes in self._flowed_in_bytes:
                self.remat.constant(n_bytes)
            play(self.remat, path.backward_begin, event)

    def _tell(self, first: int, end: int, requester: str, at: int) -> None:
        try:
            done = self._route.script.play(self.remat, first, end)
        except RuntimeError as error:
            raise self._nothing_left(requester, at) from error
        self._apply_journal(done, at)

    def _nothing_left(self, requester: str, at: int) -> ApplyError:
        self._apply_journal(self.remat.drain(), at)
        counted = self.remat.counted()
        return too_small(requester, counted["wanted_bytes"], counted["held_bytes"], self.background_bytes)

    def _with_more_room(self, at: int, run: Run) -> None:
        """Retry an op that ran out of memory, after more evictions; call it while the error is handled."""
        facts = self._route.facts[at]
        if self._decided:
            self._back_to(self._route.path.ops[at].end, at)
        # Doubled at each attempt: the allocator's fragmentation is unknown to the rematerializer.
        needs_bytes = facts.makes_bytes + facts.scratch_bytes
        for attempt in range(1, TRIES):
            # An op that writes in place may have written a part already, so it is not tried again.
            if facts.about.writes or needs_bytes << attempt > self._budget_bytes:
                raise
            try:
                self.remat.make_room(needs_bytes << attempt)
            except RuntimeError as error:
                raise self._nothing_left(facts.about.name, at) from error
            self._apply_journal(self.remat.drain(), at)
            try:
                run(self._there, self._state, self._inputs, self._random)
            except RuntimeError as error:
                if attempt == TRIES - 1 or not is_out_of_memory(error):
                    raise
            else:
                return

    def _apply_journal(self, done: Sequence[tuple[int, int]], at: int) -> None:
        over, along = False, list[int]()
        for act, number in done:
            if act == EVICT:
                self._there[number] = None
            elif act == ALONG:
                along.append(self._route.op_of[number])
            elif act == REPLAY:
                if along:
                    self._again_in_parts(self._route.op_of[number], along, at)
                else:
                    self._again(self._route.op_of[number], over, at)
                along = []
            over = act == OVERWRITE

    def _again(self, op: int, over: bool, at: int) -> None:
        """Replay an op, as `evictable_tensor.run_again` does."""
        route, path, there = self._route, self._route.path.ops[op], self._there
        self._note_again(op, (), 1, at)
        if path.over is not None:
            old, new = path.over
            before = there[old]
            assert before is not None
            whole = before if over else whole_of(before).clone()
            there[new] = (
                whole
                if over
                else whole.as_strided(before.size(), before.stride(), before.storage_offset()).detach()
            )
            # The old version is gone if its storage was overwritten, and resident if the op wrote into a
            # clone.
            there[old] = None if over else before
        random = self._random.get(op)
        asks = route.facts[op].about.name in READS_GRAD_MODE
        with grad_mode_on() if asks else nullcontext() if random is None else random.restored():
            made = tensors_in((route.code.again(op)(there, self._state, self._inputs),))
        for position, number in route.fresh(op):
            # Another output of the op may still be resident; readers of it must go on seeing the same
            # storage.
            if there[number] is None:
                there[number] = made[position]
                self._output_versions.pop(number, None)

    def _again_in_parts(self, op: int, along: list[int], at: int) -> None:
        self._note_again(op, along, self._route.parts, at)
        values: dict[int, Value] = {}
        given = [self._as_ran(each, values) for each in (*along, op)]
        made = run_in_parts(given[-1], given[:-1], self._route.parts)
        self._there[given[-1].made[0][1].number] = made

    def _as_ran(self, op: int, values: dict[int, Value]) -> RepeatableOp:
        """Return the op in the form that the mode's table has."""
        path, call = self._route.path.ops[op], self._route.tape.calls[op]

        def value(number: int) -> Value:
            return values.setdefault(number, Value(number, 0, again=True, alias=self._there[number]))

        def read(slot: Any) -> Any:
            if not isinstance(slot, Slot):
                return slot
            if isinstance(slot.of, Outside):
                tensor = self._outside(slot.of)
                return Read(
                    OutsideTensor(tensor, tensor._version),
                    View(slot.size, slot.stride, self._offset(slot), slot.dtype),
                    0,
                )
            return Read(value(path.numbers[slot.of]), View(*slot[1:]), 0)

        args, kwargs = tree_map(read, (call.args, call.kwargs), is_leaf=lambda each: isinstance(each, Slot))
        made = [(position, value(number)) for position, number in self._route.fresh(op)]
        return RepeatableOp(self._route.facts[op], args, kwargs, path.ran, made, None, None)

    def _offset(self, slot: Slot) -> int:
        assert isinstance(slot.of, Outside)
        return int(self._outside(slot.of).storage_offset()) + slot.offset

    def _note_again(self, op: int, along: Sequence[int], parts: int, at: int) -> None:
        ops = self._route.path.ops
        before = ops[at].ran if at < len(ops) else ops[-1].ran + 1
        self.replays.append(ReplayRecord(before, ops[op].ran, tuple(ops[each].ran for each in along), parts))
        # Within forward nothing outside can have changed: versions are compared from its end on.
        if self._versions:
            for each in (*along, op):
                self._check(each)

    # -- changes between forward and backward ----------------------------------------------------------------

    def _outside(self, outside: Outside) -> Tensor:
        found: Tensor = (self._inputs if outside.kind == "input" else self._state)[outside.number]
        return found

    def _note_versions(self) -> None:
        """Note the versions of all tensors that may be read again, at the end of forward."""
        self._versions = {each: self._outside(each)._version for each in self._route.all_outside}
        for number in self._route.output_numbers:
            there = self._there[number]
            assert there is not None
            self._output_versions[number] = there._version

    def _check(self, op: int) -> None:
        """Raise if an argument of the op has been written into since."""
        changed = any(
            self._outside(each)._version != self._versions[each] for each in self._route.outside_of[op]
        )
        if changed or any(self._is_changed(number) for number in self._route.path.ops[op].numbers.values()):
            raise written_since(
                f"a tensor that {self._route.facts[op].about.name} has read and must read again"
            )

    def _check_outputs(self) -> None:
        if any(map(self._is_changed, self._route.returned_and_read)):
            raise written_since("a tensor that backward needs")

    def _is_changed(self, number: int) -> bool:
        there, version = self._there[number], self._output_versions.get(number)
        return there is not None and version is not None and there._version != version

    def _hold_longer(self, op: OpPath) -> None:
        """Hold outputs that the caller still holds, although it had dropped them here in the logged run.

        Only the list of values references each value, so that an eviction frees it; an output that the caller
        holds could not be freed.
        """
        for number in [number for number in self._longer if not self._is_held(number)]:
            self._longer.remove(number)
            self.remat.give_back(number)
        for number in op.outputs:
            if number not in self._longer and self._is_held(number):
                self._longer.append(number)
                self.remat.take(number)

    def _is_held(self, number: int) -> bool:
        there = self._there[number]
        return there is not None and is_shared_storage(there.untyped_storage()._cdata)


# Generated code: one function per op, whose arguments and outputs are in a list, by number in the
# rematerializer.
Run = Callable[[list[Any], Sequence[Any], Sequence[Any], dict[int, RandomState]], None]
"""(V, p, x, R): runs an op and stores its outputs in V."""
RunAgain = Callable[[list[Any], Sequence[Any], Sequence[Any]], Any]
"""(V, p, x): returns the op's result."""


class ReplayCode(CallText):
    """Generator of the functions of one tape and path.

    Args:
        tape: The captured region.
        path: The numbers of values.
        random_state: Returns the current state of the generators.
        device: Device of the module.
    """

    def __init__(
        self, tape: Tape, path: Path, random_state: Callable[[], RandomState], device: torch.device
    ) -> None:
        super().__init__(tape)
        self._path, self._numbers = path, dict[int, int]()
        self._flowed_in = {at: number for number, at in path.flowed_in}
        self.namespace |= {"as_recorded": grad_mode_on, "random_state": random_state, "device": device}
        self._known: dict[int, RunAgain] = {}

    def runs(self, first: int, end: int) -> list[Run]:
        """Return the ops of the tape from `first` to before `end` as functions."""
        # One function per op, not one for all: evictions and replays happen between them.
        text = "\n".join(line for op in range(first, end) for line in self._lines(op))
        exec(
            compile(text, "<replayed run>", "exec"), self.namespace
        )  # the text is made from op names and numbers alone
        return [self.namespace[f"run{op}"] for op in range(first, end)]

    def views(
        self, slots: Sequence[Slot], numbers: dict[int, int]
    ) -> Callable[[list[Any], Sequence[Any], Sequence[Any]], Any]:
        """Return a function (V, p, x) → tensors with these slots' views, detached."""
        self._numbers = numbers
        found: Callable[..., Any] = self._evaluated(
            f"[{', '.join(f'{self._view(slot)}.detach()' for slot in slots)}]"
        )
        return found

    def again(self, op: int) -> RunAgain:
        """Return the function that runs an op of the tape again; it is compiled at first use."""
        if op not in self._known:
            self._numbers = self._path.ops[op].numbers
            self._known[op] = self._evaluated(self._call(self._tape.calls[op], again=True))
        return self._known[op]

    def _evaluated(self, text: str) -> Any:
        return eval(compile(f"lambda V, p, x: {text}", "<replayed run>", "eval"), self.namespace)

    def _lines(self, op: int) -> list[str]:
        path, call, graph = self._path.ops[op], self._tape.calls[op], self._tape.graph
        self._numbers = path.numbers
        lines = [f"def run{op}(V, p, x, R):"]
        if path.over is not None:
            old, new = path.over
            lines.append(f"    V[{new}] = V[{old}]; V[{old}] = None")
        if op in graph.random and path.again >= 0:
            lines.append(f"    R[{op}] = random_state()")
        around = "with as_recorded(): " if str(call.func) in READS_GRAD_MODE else ""
        lines.append(f"    {around}{self._target(call, graph.makes[op])}{self._call(call, again=False)}")
        return lines

    def _value(self, value: int) -> str:
        return f"V[{self._numbers[value]}]"

    def _outside(self, outside: Outside) -> str:
        if outside.kind == "constant":
            return outside_name(outside)
        if outside.kind == "gradient":
            return f"V[{self._flowed_in[outside.number]}]"
        return f"{'x' if outside.kind == 'input' else 'p'}[{outside.number}]"


def fresh_outputs(tape: Tape, path: OpPath, op: int) -> list[tuple[int, int]]:
    """Return position among the tensors that an op of the tape returns, and number, of each new value."""
    left = set(tape.graph.makes[op])
    found: list[tuple[int, int]] = []
    for at, slot in enumerate(slots_in(tape.calls[op].out)):
        if slot.of in left:
            left.discard(slot.of)
            found.append((at, path.numbers[slot.of]))
    return found
