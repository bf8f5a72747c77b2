"""From a tape and a schedule to two Python functions that do exactly that: a line per op, a `del` per value let go.

The functions call ATen's ops on tensors below autograd; nothing looks at an op while it runs. Names in them: v a value, p a
parameter or buffer, x an input, g the gradient of an output, k a constant of the model's code, s a random state, h a value
on the host, q a part of a value, c whatever else an op is called with.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import memtune.ops  # noqa: F401  (defines torch.ops.memtune)
from memtune.calls import EMPTY
from memtune.runtime import transfer
from memtune.runtime.below_autograd import ASK_GRAD_MODE, as_recorded
from memtune.runtime.by_element import is_dense, may_be_by_element
from memtune.runtime.call_text import CallText, bases_of, outside_name, slots_in, tuple_text, viewed
from memtune.runtime.random_state import RandomState
from memtune.runtime.tape import Call, Outside, Slot, Tape
from memtune.schedule import Action, Do, Schedule, parts_of


@dataclass(frozen=True)
class Code:
    """What runs in place of a region."""

    forward: Callable[..., tuple[tuple[Tensor, ...], tuple[Any, ...]]]
    """(parameters and buffers, arguments) → (output tensors in their order, what backward needs).

    With `claimed` code also what becomes of each value that stays for backward, once forward has read it for the last time.
    """
    backward: Callable[..., Generator[int, None, list[Tensor]]]
    """(parameters and buffers, [what forward left], gradients of the outputs, landed) → gradients of the inputs, at the end.

    With `claimed` code also how such a value comes back, just before it is read.

    The two lists are emptied. As soon as a parameter's gradient is there it is put into `landed`, which alone holds it, and the
    parameter's number is yielded.
    """
    lands: tuple[int, ...]
    """Parameters in the order in which backward has their gradients."""
    source: str
    """Both functions, as text."""


class LayoutError(Exception):
    """A real op returned another layout than its fake implementation had said."""


def generate(
    tape: Tape, schedule: Schedule, random_state: Callable[[], RandomState], device: torch.device, *, checked: bool = False,
    claimed: bool = False,
) -> Code:  # fmt: skip
    """The code of `schedule`, which must be right for the tape's graph (`schedule.wrong_with`).

    Args:
        tape: The captured region.
        schedule: What to run, and in which order.
        random_state: The state of the generators now.
        device: Where values that were moved to the host come back to.
        checked: Compare what ops really return with the tape, where views are made of it: for the first run.
        claimed: Somebody else says where what forward keeps is until backward.
    """
    writer = _Writer(tape, schedule, checked, claimed)
    text = writer.text()
    namespace = {**writer.namespace, "random_state": random_state, "device": device, "check": _check_layout}
    exec(compile(text, "<frozen schedule>", "exec"), namespace)  # the text holds nothing that came from a file
    return Code(namespace["forward"], namespace["backward"], tuple(writer.lands), text)


class _Writer(CallText):
    """Goes through the schedule once, forward then backward, and writes a line for each step."""

    def __init__(self, tape: Tape, schedule: Schedule, checked: bool, claimed: bool) -> None:
        super().__init__(tape)
        self.namespace |= {
            "to_host": torch.ops.memtune.to_host.default, "to_device": torch.ops.memtune.to_device.default, "wait": transfer.wait,
            "as_recorded": as_recorded,
        }  # fmt: skip
        self._schedule = schedule
        self._lines: list[str] = []
        self._checked = viewed(tape, self._base) if checked else frozenset()
        self._times = Counter(schedule.computes())
        self._left = Counter({op: times - 1 for op, times in self._times.items()})
        """Runs that an op which draws has still to do with the state that it first drew from."""
        self._ran: set[int] = set()
        self._there: dict[str, None] = {}
        """Names that hold something, in the order of their making."""
        self._outputs = _by_value(tape.outputs)
        self.lands: list[int] = []
        self._landings: dict[int, list[tuple[int, Slot]]] = {}
        for parameter, after, gradient in tape.landed:
            self._landings.setdefault(after, []).append((parameter, gradient))
        gradients = [*(slot for _, _, slot in tape.landed), *(slot for _, slot in tape.input_gradients)]
        self._owed = Counter(slot.of for slot in gradients if isinstance(slot.of, int))
        """Value → how often it is still to be handed out as a gradient."""
        self._held_back: set[int] = set()
        self._due: list[tuple[int, Slot]] = []
        self._claimed = Claimed.of(tape, schedule) if claimed else NOTHING_CLAIMED

    def text(self) -> str:
        """Both functions."""
        forward, backward = self._forward(), self._backward()
        indent = "\n    "
        return (
            f"def forward(p, x, keep=None):\n    {indent.join(forward)}\n\n"
            f"def backward(p, saved, g, landed, back=None):\n    {indent.join(backward)}\n"
        )

    def _forward(self) -> list[str]:
        steps = self._schedule.forward
        last = {step.of: at for at, step in enumerate(steps) if step.action == Action.FREE}
        for at, step in enumerate(steps):
            if step.action == Action.FREE and last[step.of] == at:
                self._hand_out(step.of)
            self._step(step)
            self._keep(self._claimed.after.get(at, ()))
        numbers = [number for number, leaf in enumerate(self._tape.outputs) if isinstance(leaf, Slot)]
        self._keep(self._claimed.after.get(len(steps), ()))
        views = [f"o{n}" if f"o{n}" in self._there else f"{self._view(self._slot(n))}.detach()" for n in numbers]
        lines, self._lines = self._lines, []
        read = self._read_outside(steps) | {self._slot(n).of for n in numbers}
        saved = [*(name for name in self._there if name[0] in "vsh"), *self._inputs_of_backward()]
        self._saved = saved
        return [*_fetched(read), *lines, f"return {tuple_text(views)}, {tuple_text(saved)}"]

    def _hand_out(self, value: int) -> None:
        """The caller gets it, whatever the region does with it."""
        for number in self._outputs.get(value, ()):
            self._lines.append(f"o{number} = {self._view(self._slot(number))}.detach()")
            self._there[f"o{number}"] = None

    def _keep(self, due: Iterable[int | Outside]) -> None:
        for each in due:
            if isinstance(each, int):
                self._hand_out(each)
            name = self._name(each)
            self._lines.append(f"{name} = keep({name})")

    def _name(self, of: int | Outside) -> str:
        return outside_name(of) if isinstance(of, Outside) else f"v{of}"

    def _backward(self) -> list[str]:
        steps = self._schedule.backward
        last: dict[Outside, int] = {}
        for at, step in enumerate(steps):
            if step.action == Action.COMPUTE:
                last.update(dict.fromkeys(self._given_to(step), at))
        last.update(
            dict.fromkeys(_kept([*(g for _, _, g in self._tape.landed), *(g for _, g in self._tape.input_gradients)]), -1)
        )
        for at, step in enumerate(steps):
            names = map(self._name, self._claimed.before.get(at, ()))
            self._lines += [f"{name} = back({name})" for name in names]
            self._step(step)
            self._lines += [
                f"del {outside_name(each)}" for each, when in last.items() if when == at and each.kind in ("input", "gradient")
            ]
        self._land()
        gradients = [self._view(slot) for _, slot in self._tape.input_gradients]
        read = {each for each in self._read_outside(steps) | set(last) if each.kind != "input"}
        given = [f"{outside_name(each)} = g[{each.number}]" for each in read if each.kind == "gradient"]
        saved = f"{tuple_text(self._saved)} = saved.pop()" if self._saved else "saved.pop()"
        no_gradient = [] if self._tape.landed else ["yield from ()"]
        end = f"return [{', '.join(gradients)}]"
        return [saved, *_fetched(read), *given, "g.clear()", *self._lines, *no_gradient, end]

    def _inputs_of_backward(self) -> list[str]:
        read = self._read_outside(self._schedule.backward) | set(_kept(slot for _, slot in self._tape.input_gradients))
        return [outside_name(each) for each in sorted(read) if each.kind == "input"]

    def _read_outside(self, steps: Iterable[Do]) -> set[Any]:
        return {each for step in steps if step.action == Action.COMPUTE for each in self._given_to(step)}

    def _given_to(self, step: Do) -> list[Outside]:
        return [each for op in (*step.along, step.of) for each in _outside(self._tape.calls[op])]

    def _slot(self, number: int) -> Slot:
        leaf = self._tape.outputs[number]
        assert isinstance(leaf, Slot)
        return leaf

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _step(self, step: Do) -> None:
        value = f"v{step.of}"
        if step.action == Action.COMPUTE:
            self._compute(step)
        elif step.action == Action.FREE:
            if f"h{step.of}" in self._there:
                self._lines.append(f"wait(h{step.of})")
            if self._owed[step.of]:
                self._held_back.add(step.of)  # it is a gradient that is still to be put in place
            else:
                self._drop(value)
        elif step.action == Action.TO_HOST:
            self._lines.append(f"h{step.of} = to_host({value})")
            self._there[f"h{step.of}"] = None
        else:
            self._lines.append(f"{value} = to_device(h{step.of}, device)")
            self._there[value] = None
            self._drop(f"h{step.of}")

    def _compute(self, step: Do) -> None:
        self._land()
        again, made = step.of in self._ran, self._tape.graph.makes[step.of]
        if step.along:
            self._run_in_parts(step)
        else:
            self._run_whole(step.of, again)
        self._there.update(dict.fromkeys(f"v{value}" for value in made))
        self._held_back.difference_update(made)
        if not again:
            self._ran.add(step.of)
            self._due = self._landings.get(step.of, [])

    def _run_whole(self, op: int, again: bool) -> None:
        call, made = self._tape.calls[op], self._tape.graph.makes[op]
        line = f"{self._target(call, made)}{self._call(call, again)}"
        around = ["as_recorded()"] if str(call.func) in ASK_GRAD_MODE else []
        if op in self._tape.graph.random and self._times[op] > 1:
            if again:
                around.append(f"s{op}.restored()")
                self._left[op] -= 1
            else:
                self._lines.append(f"s{op} = random_state()")
                self._there[f"s{op}"] = None
        self._lines.append(f"with {', '.join(around)}: {line}" if around else line)
        if f"s{op}" in self._there and not self._left[op]:
            self._drop(f"s{op}")
        for value in sorted(self._checked.intersection(made)):
            base = self._base[value]
            self._lines.append(f"check(v{value}, {base.size}, {base.stride}, {base.offset}, {str(call.func)!r})")

    def _run_in_parts(self, step: Do) -> None:
        """What `passes.in_parts` says, line by line."""
        makes, calls = self._tape.graph.makes, self._tape.calls
        (value,) = makes[step.of]
        base, ops, copy = self._base[value], (*step.along, step.of), torch.ops.aten.copy_.default
        self._lines.append(f"v{value} = {self._allocate(base)}")
        last = {read: at for at, op in enumerate(ops) for read in self._tape.graph.reads[op]}
        for start, end in parts_of(math.prod(base.size), step.parts):
            self._part = (start, end, frozenset(made for op in step.along for made in makes[op]))
            for at, op in enumerate(ops):
                self._lines.append(f"q{makes[op][0]} = {self._call(calls[op], again=True)}")
                self._lines += [f"del q{read}" for read in sorted(self._part[2]) if last[read] == at]
            self._part = None
            self._lines.append(f"{self._constant(copy)}(part_of(v{value}, {start}, {end}), q{value})")
            self._lines.append(f"del q{value}")

    def _land(self) -> None:
        """Hand out the gradients that the last op completed, once what it alone had needed is let go."""
        due, self._due = self._due, []
        for parameter, gradient in due:
            self.lands.append(parameter)
            self._lines.append(f"landed.append({self._view(gradient)}.detach())")
            if isinstance(gradient.of, int):
                self._owed[gradient.of] -= 1
                if gradient.of in self._held_back and not self._owed[gradient.of]:
                    self._held_back.discard(gradient.of)
                    self._drop(f"v{gradient.of}")
            self._lines.append(f"yield {parameter}")

    def _drop(self, name: str) -> None:
        self._lines.append(f"del {name}")
        del self._there[name]


@dataclass(frozen=True)
class Claimed:
    """What forward keeps for backward, where somebody else says where it is: values, and arguments of the region."""

    after: Mapping[int, Sequence[int | Outside]]
    """Step of forward → what it was the last to read there; as many as there are steps: what no step reads."""
    before: Mapping[int, Sequence[int | Outside]]
    """Step of backward → what it is the first to read there."""

    @classmethod
    def of(cls, tape: Tape, schedule: Schedule) -> Claimed:
        """What `schedule` keeps; arguments first, then values in their order."""
        last, made, first = dict[int | Outside, int](), set[int](), dict[int | Outside, int]()
        for at, step in enumerate(schedule.forward):
            if step.action == Action.COMPUTE:
                last.update(dict.fromkeys((*_arguments(tape, step), *step.reads(tape.graph), *tape.graph.makes[step.of]), at))
                made.update(tape.graph.makes[step.of])
            elif step.action == Action.FREE:
                made.discard(step.of)
        for at, step in enumerate(schedule.backward):
            if step.action == Action.COMPUTE:
                found: list[int | Outside] = [*_arguments(tape, step), *(each for each in step.reads(tape.graph) if each in made)]
                for each in found:
                    first.setdefault(each, at)
                made.difference_update(tape.graph.makes[step.of])
        ends = _ends_of_computes(schedule.forward)
        after, before = dict[int, list[int | Outside]](), dict[int, list[int | Outside]]()
        for each in sorted(first, key=lambda of: (isinstance(of, int), of)):
            after.setdefault(ends[last[each]] if each in last else len(schedule.forward), []).append(each)
            before.setdefault(first[each], []).append(each)
        return cls(after, before)


NOTHING_CLAIMED = Claimed({}, {})


def _arguments(tape: Tape, step: Do) -> list[Outside]:
    return [each for op in (*step.along, step.of) for each in _outside(tape.calls[op]) if each.kind == "input"]


def _ends_of_computes(steps: Sequence[Do]) -> list[int]:
    """Of each step the last one before the next op runs: what it lets go is let go by then."""
    end, found = len(steps) - 1, [0] * len(steps)
    for at in range(len(steps) - 1, -1, -1):
        found[at] = end
        if steps[at].action == Action.COMPUTE:
            end = at - 1
    return found


def _check_layout(tensor: Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int, op: str) -> None:
    if tensor.shape != size or tensor.stride() != stride or tensor.storage_offset() != offset:
        raise LayoutError(f"{op} lays out what it returns in another way than on fake tensors")


def not_by_element(tape: Tape, schedule: Schedule, device: torch.device) -> str:
    """Which op the schedule runs in parts although it does not work by elements, '' if there is none."""
    bases = bases_of(tape)
    for op in {op for step in schedule.steps if step.along for op in (*step.along, step.of)}:
        call = tape.calls[op]
        slots = slots_in((call.args, call.kwargs, call.out))
        if not may_be_by_element(call.func, call.kwargs, on_gpu=device.type != "cpu") or not _are_filled(slots, bases):
            return f"{call.func} (op {op}) does not work by elements"
    return ""


def state_read(tape: Tape, schedule: Schedule) -> tuple[int, ...]:
    """Parameters and buffers that backward reads: its own ops do, or those of forward that the schedule runs in it."""
    again = {op for step in schedule.backward if step.action == Action.COMPUTE for op in (*step.along, step.of)}
    read = {each for op in again.union(range(tape.graph.n_forward, tape.graph.n_ops)) for each in _outside(tape.calls[op])}
    return tuple(sorted(each.number for each in read if each.kind in ("parameter", "buffer")))


def _are_filled(slots: Sequence[Slot], bases: dict[int, Slot]) -> bool:
    """Whether all look alike, at the whole of a value that has no gaps."""
    wholes = [slot if isinstance(slot.of, Outside) else bases[slot.of] for slot in slots]
    same = all(slot[1:3] == slots[0][1:3] for slot in slots) and is_dense(slots[0].size, slots[0].stride)
    pairs = [
        (one.dtype, math.prod(one.size)) == (other.dtype, math.prod(other.size)) for one, other in zip(slots, wholes, strict=True)
    ]
    return same and all(pairs)


def _fetched(outside: Iterable[Any]) -> list[str]:
    """Parameters, buffers and inputs by name."""
    lists = {"parameter": "p", "buffer": "p", "input": "x"}
    known = sorted(each for each in outside if isinstance(each, Outside) and each.kind in lists)
    return [f"{outside_name(each)} = {lists[each.kind]}[{each.number}]" for each in known]


def _outside(call: Call) -> list[Outside]:
    """What a call is given from outside."""
    if str(call.func) in EMPTY:
        return []
    return list(_kept(slots_in((call.args, call.kwargs))))


def _kept(slots: Iterable[Any]) -> Iterable[Outside]:
    return (slot.of for slot in slots if isinstance(slot, Slot) and isinstance(slot.of, Outside))


def _by_value(outputs: Sequence[Any]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for number, leaf in enumerate(outputs):
        if isinstance(leaf, Slot) and isinstance(leaf.of, int):
            found.setdefault(leaf.of, []).append(number)
    return found
