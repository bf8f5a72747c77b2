"""Generator of two Python functions from a tape and a schedule: one line per op, one `del` per value to free.

The functions call ATen's ops on tensors below autograd, without a dispatch mode. Names: v a value, p a
parameter or buffer, x an input, g the gradient of an output, k a constant of the model's code, s a random
state, h a value on the host, q a part of a value, c any other argument.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune.activations.capture import Call, Outside, Slot, Tape
from memtune.errors import ApplyError
from memtune.program import BATCH_NORMS, EMPTY, Action, Schedule, ScheduleStep, parts_of
from memtune.runtime import (
    READS_GRAD_MODE,
    RandomState,
    grad_mode_on,
    is_dense,
    may_be_by_element,
    part_of,
    transfer,
)

_LETTER = {"parameter": "p", "buffer": "p", "input": "x", "gradient": "g", "constant": "k"}


class CallText:
    """Writer of a tape's calls; `namespace` defines the names in them, and a subclass names values.

    Args:
        tape: The captured region.
    """

    def __init__(self, tape: Tape) -> None:
        self.namespace: dict[str, Any] = {"part_of": part_of}
        self._tape, self._base = tape, bases_of(tape)
        self._constants: dict[int, str] = {}
        self._part: tuple[int, int, frozenset[int]] | None = None
        """For an op that runs in parts: first element, end, and the values that exist only as parts."""

    def _value(self, value: int) -> str:
        """Return the name of a value."""
        return f"v{value}"

    def _outside(self, outside: Outside) -> str:
        """Return the name of an outside tensor."""
        return outside_name(outside)

    def _target(self, call: Call, made: Sequence[int]) -> str:
        """Return the assignment of the call's result; outputs without a new storage are not bound."""
        if not made:
            return ""
        if isinstance(call.out, Slot):
            return f"{self._value(made[0])} = "
        names, left = [], set(made)
        for out in call.out:
            is_new = isinstance(out, Slot) and out.value in left
            names.append(self._value(out.value) if is_new else "_")
            left -= {out.value} if is_new else set()
        return f"{', '.join(names)}{',' * (len(names) == 1)} = "

    def _call(self, call: Call, again: bool) -> str:
        if str(call.func) in EMPTY:
            return self._allocate(call.out)
        args = [self._text(each) for each in call.args]
        if again and str(call.func) in BATCH_NORMS and call.args[5]:  # args[5]: training
            args[3:5] = ["None", "None"]  # the first run has already updated the running statistics
        args += [f"{name}={self._text(each)}" for name, each in call.kwargs.items()]
        return f"{self._constant(call.func)}({', '.join(args)})"

    def _allocate(self, like: Slot) -> str:
        empty, dtype = self._constant(torch.ops.aten.empty_strided.default), self._constant(like.dtype)
        return f"{empty}({like.size}, {like.stride}, dtype={dtype}, device=device)"

    def _text(self, value: Any) -> str:
        if isinstance(value, Slot):
            return self._view(value)
        if isinstance(value, list | tuple):
            inner = [self._text(each) for each in value]
            return f"[{', '.join(inner)}]" if isinstance(value, list) else tuple_text(inner)
        if (
            value is None
            or isinstance(value, bool | int | str)
            or (isinstance(value, float) and math.isfinite(value))
        ):
            return repr(value)
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        name = self._constants.setdefault(id(value), f"c{len(self._constants)}")
        self.namespace[name] = value  # also holds it, so that no other object gets its id
        return name

    def _view(self, slot: Slot) -> str:
        """Return the tensor of `slot`, or its current part."""
        if self._part is None:
            return self._slot_view(slot)
        start, end, parts = self._part
        return (
            f"q{slot.value}" if slot.value in parts else f"part_of({self._slot_view(slot)}, {start}, {end})"
        )

    def _slot_view(self, slot: Slot) -> str:
        if isinstance(slot.value, Outside):
            name, base = self._outside(slot.value), self._tape.given[slot.value]
            if slot.value.kind == "constant":
                self.namespace[outside_name(slot.value)] = self._tape.constants[slot.value.number]
            offset = f"{name}.storage_offset() + {slot.offset}"  # inputs may start anywhere in their storage
        else:
            name, base, offset = self._value(slot.value), self._base[slot.value], str(slot.offset)
        # Views are made where they are read: a name for one would keep the value's memory after its `del`.
        if slot[1:] == base[1:]:
            return name
        if slot.dtype != base.dtype:
            name = f"{name}.view({self._constant(slot.dtype)})"
        return f"{name}.as_strided({slot.size}, {slot.stride}, {offset})"


def bases_of(tape: Tape) -> dict[int, Slot]:
    """Return by value the output that made it, the first one if several share a storage."""
    found: dict[int, Slot] = {}
    for call, made in zip(tape.calls, tape.graph.makes, strict=True):
        for out in slots_in(call.out):
            if out.value in made:
                found.setdefault(out.value, out)
    return found


def viewed(tape: Tape, bases: dict[int, Slot]) -> frozenset[int]:
    """Return the values that are read through another view than the full storage."""
    slots = slots_in(
        (
            *((call.args, call.kwargs) for call in tape.calls),
            tape.outputs,
            tape.ready_gradients,
            tape.input_gradients,
        )
    )
    return frozenset(
        slot.value for slot in slots if isinstance(slot.value, int) and slot[1:] != bases[slot.value][1:]
    )


def slots_in(values: Any) -> list[Any]:
    """Return every slot among `values`."""
    return [
        each
        for each in tree_leaves(values, is_leaf=lambda each: isinstance(each, Slot))
        if isinstance(each, Slot)
    ]


def outside_name(outside: Outside) -> str:
    """Return the letter of its kind, and its number."""
    return f"{_LETTER[outside.kind]}{outside.number}"


def tuple_text(names: Sequence[str]) -> str:
    """Return the text of a tuple of `names`."""
    return f"({', '.join(names)}{',' * (len(names) == 1)})"


@dataclass(frozen=True)
class Code:
    """Generated forward and backward of a region."""

    forward: Callable[..., tuple[tuple[Tensor, ...], tuple[Any, ...]]]
    """(parameters and buffers, arguments) → (output tensors in order, values that backward needs).

    `claimed` code also takes the pack function for each value kept for backward, called after its last read
    in forward.
    """
    backward: Callable[..., Generator[int, None, list[Tensor]]]
    """(parameters and buffers, [values from forward], gradients of the outputs, ready gradients) → gradients
    of the inputs, at the end.

    `claimed` code also takes the unpack function, called just before the first read of a value in backward.

    Both lists are emptied. As soon as a parameter's gradient is ready, it is appended to the last list, which
    alone holds it, and the parameter's number is yielded.
    """
    ready_order: tuple[int, ...]
    """Parameters in the order in which backward completes their gradients."""
    read_later: tuple[int, ...]
    """Parameters that backward reads, in repeated ops, after it has yielded their gradients."""
    source: str
    """Both functions, as text."""


class LayoutError(Exception):
    """Error when a real op returns another layout than its fake implementation."""


def generate(
    tape: Tape,
    schedule: Schedule,
    random_state: Callable[[], RandomState],
    device: torch.device,
    *,
    checked: bool = False,
    claimed: bool = False,
) -> Code:
    """Return the code of `schedule`, which must be valid for the tape's graph (`find_schedule_error`).

    Args:
        tape: The captured region.
        schedule: The ops to run, in order.
        random_state: Returns the current state of the generators.
        device: Device to which offloaded values are reloaded.
        checked: Compare the layouts of real outputs that views are made of with the tape; for the first run.
        claimed: Pass values kept for backward through the claims of an activation table.
    """
    # Python text, not an interpreter loop: a line costs no more than the op's own call.
    writer = _Writer(tape, schedule, checked, claimed)
    text = writer.text()
    namespace = {**writer.namespace, "random_state": random_state, "device": device, "check": _check_layout}
    # The text is made from op names, shapes and numbers of the tape, never from the content of a file.
    exec(compile(text, "<schedule>", "exec"), namespace)
    return Code(
        namespace["forward"], namespace["backward"], tuple(writer.ready_order), writer.read_later(), text
    )


class _Writer(CallText):
    """Writer of a line for each step of the schedule, forward then backward."""

    def __init__(self, tape: Tape, schedule: Schedule, checked: bool, claimed: bool) -> None:
        super().__init__(tape)
        self.namespace |= {
            "to_host": torch.ops.memtune.to_host.default,
            "to_device": torch.ops.memtune.to_device.default,
            "wait": transfer.wait,
            "prefetching": transfer.prefetching_separately,
            "arrive": transfer.wait_tensor,
            "as_recorded": grad_mode_on,
        }
        self._schedule = schedule
        self._lines: list[str] = []
        self._checked = viewed(tape, self._base) if checked else frozenset()
        self._times = Counter(schedule.computes())
        self._left = Counter({op: times - 1 for op, times in self._times.items()})
        """By op that draws: number of remaining runs that need the state it first drew from."""
        self._ran: set[int] = set()
        self._there: dict[str, None] = {}
        """Names that are bound, in the order of their creation."""
        self._outputs = _by_value(tape.outputs)
        self.ready_order: list[int] = []
        self._yielded: dict[int, int] = {}
        """Parameter → step of backward before which its gradient is yielded."""
        self._at = 0
        self._gradients_after: dict[int, list[tuple[int, Slot]]] = {}
        for parameter, after, gradient in tape.ready_gradients:
            self._gradients_after.setdefault(after, []).append((parameter, gradient))
        gradients = [
            *(slot for _, _, slot in tape.ready_gradients),
            *(slot for _, slot in tape.input_gradients),
        ]
        self._owed = Counter(slot.value for slot in gradients if isinstance(slot.value, int))
        """Value → number of gradients that are still to be made from it."""
        self._held_back: set[int] = set()
        self._coming: set[int] = set()
        """Values whose reload has begun."""
        self._due: list[tuple[int, Slot]] = []
        self._claimed = Claimed.of(tape, schedule) if claimed else NOTHING_CLAIMED

    def text(self) -> str:
        """Return the text of both functions."""
        forward, backward = self._forward(), self._backward()
        indent = "\n    "
        return (
            f"def forward(p, x, keep=None):\n    {indent.join(forward)}\n\n"
            f"def backward(p, saved, g, ready, back=None):\n    {indent.join(backward)}\n"
        )

    def read_later(self) -> tuple[int, ...]:
        """Return `Code.read_later`; call it after `text`."""
        last = {
            each.number: at
            for at, step in enumerate(self._schedule.backward)
            if step.action == Action.COMPUTE
            for each in self._given_to(step)
            if each.kind == "parameter"
        }
        return tuple(number for number, at in self._yielded.items() if last.get(number, -1) >= at)

    def _forward(self) -> list[str]:
        steps = self._schedule.forward
        # A value may be freed and made again; only its last free matters to the caller.
        last = {step.target: at for at, step in enumerate(steps) if step.action == Action.FREE}
        for at, step in enumerate(steps):
            # Before the last free, or the name would be gone; a value that is made again is handed out then.
            if step.action == Action.FREE and last[step.target] == at:
                self._hand_out(step.target)
            self._step(step, at, steps)
            self._keep(self._claimed.after.get(at, ()))
        numbers = [number for number, leaf in enumerate(self._tape.outputs) if isinstance(leaf, Slot)]
        self._keep(self._claimed.after.get(len(steps), ()))
        views = [
            f"o{n}" if f"o{n}" in self._there else f"{self._view(self._slot(n))}.detach()" for n in numbers
        ]
        lines, self._lines = self._lines, []
        read = self._read_outside(steps) | {self._slot(n).value for n in numbers}
        # Names that are bound when forward returns are those that the schedule keeps for backward. By their
        # first letter: values, random states, host copies.
        saved = [*(name for name in self._there if name[0] in "vsh"), *self._inputs_of_backward()]
        self._saved = saved
        return [*_fetched(read), *lines, f"return {tuple_text(views)}, {tuple_text(saved)}"]

    def _hand_out(self, value: int) -> None:
        """Write the outputs that are views of `value`, which the caller holds when the region frees it."""
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
            dict.fromkeys(
                _kept(
                    [
                        # At -1, which is no step: they are handed out, so no line deletes them.
                        *(g for _, _, g in self._tape.ready_gradients),
                        *(g for _, g in self._tape.input_gradients),
                    ]
                ),
                -1,
            )
        )
        for at, step in enumerate(steps):
            names = map(self._name, self._claimed.before.get(at, ()))
            self._lines += [f"{name} = back({name})" for name in names]
            self._at = at
            self._step(step, at, steps)
            self._lines += [
                f"del {outside_name(each)}"
                for each, when in last.items()
                if when == at and each.kind in ("input", "gradient")
            ]
        self._at = len(steps)
        self._yield_ready()
        gradients = [self._view(slot) for _, slot in self._tape.input_gradients]
        read = {each for each in self._read_outside(steps) | set(last) if each.kind != "input"}
        given = [f"{outside_name(each)} = g[{each.number}]" for each in read if each.kind == "gradient"]
        saved = f"{tuple_text(self._saved)} = saved.pop()" if self._saved else "saved.pop()"
        # Without any `yield` the text would be a plain function, not a generator.
        no_gradient = [] if self._tape.ready_gradients else ["yield from ()"]
        end = f"return [{', '.join(gradients)}]"
        # The lists are emptied, so that the local names are the only references and `del` frees.
        return [saved, *_fetched(read), *given, "g.clear()", *self._lines, *no_gradient, end]

    def _inputs_of_backward(self) -> list[str]:
        read = self._read_outside(self._schedule.backward) | set(
            _kept(slot for _, slot in self._tape.input_gradients)
        )
        return [outside_name(each) for each in sorted(read) if each.kind == "input"]

    def _read_outside(self, steps: Iterable[ScheduleStep]) -> set[Any]:
        return {each for step in steps if step.action == Action.COMPUTE for each in self._given_to(step)}

    def _given_to(self, step: ScheduleStep) -> list[Outside]:
        return [each for op in (*step.along, step.target) for each in _outside(self._tape.calls[op])]

    def _slot(self, number: int) -> Slot:
        leaf = self._tape.outputs[number]
        assert isinstance(leaf, Slot)
        return leaf

    # -- steps -----------------------------------------------------------------------------------------------

    def _step(self, step: ScheduleStep, at: int, steps: Sequence[ScheduleStep]) -> None:
        """Append the lines of one step of the schedule."""
        value = f"v{step.target}"
        if step.action == Action.COMPUTE:
            self._compute(step)
        elif step.action == Action.FREE:
            # The copy to the host reads the value until it is complete.
            if f"h{step.target}" in self._there:
                self._lines.append(f"wait(h{step.target})")
            # A view of it is a gradient: freed here, the text below could not name it any more.
            if self._owed[step.target]:
                self._held_back.add(step.target)  # a gradient that is not yielded yet: freed after that
            else:
                self._drop(value)
        elif step.action == Action.TO_HOST:
            self._lines.append(f"h{step.target} = to_host({value})")
            self._there[f"h{step.target}"] = None
        else:
            following = next((each for each in steps[at:] if each.action == Action.COMPUTE), None)
            self._reload(
                step.target,
                is_read=following is not None and step.target in following.reads(self._tape.graph),
            )

    def _reload(self, value: int, *, is_read: bool) -> None:
        """Write the reload of a value, `is_read` by the next op that runs."""
        # Read at once: on the compute stream, since there is nothing to overlap with.
        line = f"v{value} = to_device(h{value}, device)"
        self._there[f"v{value}"] = None
        if is_read:
            self._lines.append(line)
            self._drop(f"h{value}")
            return
        # Ops run before it is read: a copy stream works meanwhile, and the host copy is held until then.
        self._lines.append(f"with prefetching(device): {line}")
        self._coming.add(value)

    def _compute(self, step: ScheduleStep) -> None:
        # After the frees of the last op, before the next op's allocation: the peak that the schedule
        # predicts.
        self._yield_ready()
        for value in sorted(self._coming.intersection(step.reads(self._tape.graph))):
            self._lines.append(f"arrive(v{value})")
            self._drop(f"h{value}")
            self._coming.discard(value)
        again, made = step.target in self._ran, self._tape.graph.makes[step.target]
        if step.along:
            self._run_in_parts(step)
        else:
            self._run_whole(step.target, again)
        self._there.update(dict.fromkeys(f"v{value}" for value in made))
        # A value that is made again has a later free of its own.
        self._held_back.difference_update(made)
        if not again:
            self._ran.add(step.target)
            self._due = self._gradients_after.get(step.target, [])

    def _run_whole(self, op: int, again: bool) -> None:
        call, made = self._tape.calls[op], self._tape.graph.makes[op]
        line = f"{self._target(call, made)}{self._call(call, again)}"
        around = ["as_recorded()"] if str(call.func) in READS_GRAD_MODE else []
        # Only an op that runs again needs its state, which costs host memory.
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
            self._lines.append(
                f"check(v{value}, {base.size}, {base.stride}, {base.offset}, {str(call.func)!r})"
            )

    def _run_in_parts(self, step: ScheduleStep) -> None:
        """Write the lines of an op in parts, as `activations.schedules.schedule_pass` counts them."""
        makes, calls = self._tape.graph.makes, self._tape.calls
        (value,) = makes[step.target]
        base, ops, copy = self._base[value], (*step.along, step.target), torch.ops.aten.copy_.default
        self._lines.append(f"v{value} = {self._allocate(base)}")
        # A part lives until its last reader within the chain of ops, as the pass counts it.
        last = {read: at for at, op in enumerate(ops) for read in self._tape.graph.reads[op]}
        for start, end in parts_of(math.prod(base.size), step.parts):
            self._part = (start, end, frozenset(made for op in step.along for made in makes[op]))
            for at, op in enumerate(ops):
                self._lines.append(f"q{makes[op][0]} = {self._call(calls[op], again=True)}")
                self._lines += [f"del q{read}" for read in sorted(self._part[2]) if last[read] == at]
            self._part = None
            self._lines.append(f"{self._constant(copy)}(part_of(v{value}, {start}, {end}), q{value})")
            self._lines.append(f"del q{value}")

    def _yield_ready(self) -> None:
        """Write the yield of gradients that the last op completed, after the frees that follow that op."""
        due, self._due = self._due, []
        for parameter, gradient in due:
            # The caller takes the gradient from the list, which is then empty: no second reference.
            self.ready_order.append(parameter)
            self._yielded[parameter] = self._at
            self._lines.append(f"ready.append({self._view(gradient)}.detach())")
            if isinstance(gradient.value, int):
                self._owed[gradient.value] -= 1
                if gradient.value in self._held_back and not self._owed[gradient.value]:
                    self._held_back.discard(gradient.value)
                    self._drop(f"v{gradient.value}")
            self._lines.append(f"yield {parameter}")

    def _drop(self, name: str) -> None:
        self._lines.append(f"del {name}")
        del self._there[name]


@dataclass(frozen=True)
class Claimed:
    """Values and arguments that forward keeps for backward through an activation table."""

    after: Mapping[int, Sequence[int | Outside]]
    """Step of forward → values that it reads last; the number of steps → values that no step reads."""
    before: Mapping[int, Sequence[int | Outside]]
    """Step of backward → values that it reads first."""

    @classmethod
    def of(cls, tape: Tape, schedule: Schedule) -> Claimed:
        """Return the values that `schedule` keeps: arguments first, then values in order."""
        last, made, first = dict[int | Outside, int](), set[int](), dict[int | Outside, int]()
        for at, step in enumerate(schedule.forward):
            if step.action == Action.COMPUTE:
                last.update(
                    dict.fromkeys(
                        (*_arguments(tape, step), *step.reads(tape.graph), *tape.graph.makes[step.target]), at
                    )
                )
                made.update(tape.graph.makes[step.target])
            elif step.action == Action.FREE:
                made.discard(step.target)
        for at, step in enumerate(schedule.backward):
            if step.action == Action.COMPUTE:
                found: list[int | Outside] = [
                    *_arguments(tape, step),
                    *(each for each in step.reads(tape.graph) if each in made),
                ]
                for each in found:
                    first.setdefault(each, at)
                # A value that backward makes itself is not kept from forward.
                made.difference_update(tape.graph.makes[step.target])
        ends = _ends_of_computes(schedule.forward)
        after, before = dict[int, list[int | Outside]](), dict[int, list[int | Outside]]()
        for each in sorted(first, key=lambda of: (isinstance(of, int), of)):
            after.setdefault(ends[last[each]] if each in last else len(schedule.forward), []).append(each)
            before.setdefault(first[each], []).append(each)
        return cls(after, before)


NOTHING_CLAIMED = Claimed({}, {})


def _arguments(tape: Tape, step: ScheduleStep) -> list[Outside]:
    return [
        each for op in (*step.along, step.target) for each in _outside(tape.calls[op]) if each.kind == "input"
    ]


def _ends_of_computes(steps: Sequence[ScheduleStep]) -> list[int]:
    """Return for each step the last one before the next op runs; by then its frees are done."""
    end, found = len(steps) - 1, [0] * len(steps)
    for at in range(len(steps) - 1, -1, -1):
        found[at] = end
        if steps[at].action == Action.COMPUTE:
            # Frees right behind an op belong to it: a claim may only take the value after them.
            end = at - 1
    return found


def _check_layout(
    tensor: Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int, op: str
) -> None:
    # The stride of a dimension of one element is never used.
    is_same = all(n < 2 or of == wanted for n, of, wanted in zip(size, tensor.stride(), stride, strict=True))
    if tensor.shape != size or not is_same or tensor.storage_offset() != offset:
        raise LayoutError(f"{op} returns another layout than on fake tensors")


def not_by_element(tape: Tape, schedule: Schedule, device: torch.device) -> str:
    """Return the op that the schedule runs in parts although it is not elementwise, '' if there is none."""
    bases = bases_of(tape)
    for op in {op for step in schedule.steps if step.along for op in (*step.along, step.target)}:
        call = tape.calls[op]
        slots = slots_in((call.args, call.kwargs, call.out))
        if not may_be_by_element(call.func, call.kwargs, on_gpu=device.type != "cpu") or not _are_filled(
            slots, bases
        ):
            return f"{call.func} (op {op}) is not elementwise"
    return ""


def state_read(tape: Tape, schedule: Schedule) -> tuple[int, ...]:
    """Return the parameters and buffers that backward reads, in its own ops or in repeated ones."""
    again = {
        op for step in schedule.backward if step.action == Action.COMPUTE for op in (*step.along, step.target)
    }
    read = {
        each
        for op in again.union(range(tape.graph.n_forward, tape.graph.n_ops))
        for each in _outside(tape.calls[op])
    }
    return tuple(sorted(each.number for each in read if each.kind in ("parameter", "buffer")))


def _are_filled(slots: Sequence[Slot], bases: dict[int, Slot]) -> bool:
    """Return whether all slots have the same layout and cover whole values without gaps."""
    wholes = [slot if isinstance(slot.value, Outside) else bases[slot.value] for slot in slots]
    same = all(slot[1:3] == slots[0][1:3] for slot in slots) and is_dense(slots[0].size, slots[0].stride)
    pairs = [
        (one.dtype, math.prod(one.size)) == (other.dtype, math.prod(other.size))
        for one, other in zip(slots, wholes, strict=True)
    ]
    return same and all(pairs)


def _fetched(outside: Iterable[Any]) -> list[str]:
    """Return assignments of parameters, buffers and inputs to their names."""
    lists = {"parameter": "p", "buffer": "p", "input": "x"}
    known = sorted(each for each in outside if isinstance(each, Outside) and each.kind in lists)
    return [f"{outside_name(each)} = {lists[each.kind]}[{each.number}]" for each in known]


def _outside(call: Call) -> list[Outside]:
    """Return the outside tensors among a call's arguments."""
    if str(call.func) in EMPTY:
        return []
    return list(_kept(slots_in((call.args, call.kwargs))))


def _kept(slots: Iterable[Any]) -> Iterable[Outside]:
    return (slot.value for slot in slots if isinstance(slot, Slot) and isinstance(slot.value, Outside))


def _by_value(outputs: Sequence[Any]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for number, leaf in enumerate(outputs):
        if isinstance(leaf, Slot) and isinstance(leaf.value, int):
            found.setdefault(leaf.value, []).append(number)
    return found


class CheckedCode:
    """Code of one tape; its first forward and backward check layouts of outputs against the tape."""

    def __init__(self, tape: Tape, generated: Callable[..., Code]) -> None:
        self.tape, self._generated = tape, generated
        # Checks cost a line per value, and layouts of a kernel do not change from step to step.
        self._checked: Code | None = generated(tape, checked=True)
        self._code = generated(tape)
        self._ran = [False, False]

    @property
    def ready_order(self) -> tuple[int, ...]:
        """`Code.ready_order`."""
        return self._code.ready_order

    @property
    def read_later(self) -> tuple[int, ...]:
        """`Code.read_later`."""
        return self._code.read_later

    def forward(self, *args: Any) -> Any:
        """Run `Code.forward`."""
        checked = self._checked
        if checked is None or self._ran[0]:
            return self._code.forward(*args)
        with _layouts_as_captured():
            out = checked.forward(*args)
        self._has_run(0)
        return out

    def backward(self, *args: Any) -> Generator[int, None, list[Tensor]]:
        """Run `Code.backward`."""
        checked = self._checked
        if checked is None or self._ran[1]:
            return self._code.backward(*args)
        return self._first_backward(checked.backward(*args))

    def _first_backward(
        self, running: Generator[int, None, list[Tensor]]
    ) -> Generator[int, None, list[Tensor]]:
        with _layouts_as_captured():
            gradients = yield from running
        self._has_run(1)
        return gradients

    def _has_run(self, which: int) -> None:
        self._ran[which] = True
        if all(self._ran):
            self._checked = None


@contextmanager
def _layouts_as_captured() -> Iterator[None]:
    try:
        yield
    except LayoutError as error:
        raise ApplyError(
            "a schedule cannot run this model.",
            evidence=f"{error}.",
            fix="choose recompute: {kind: full}",
            code="MT327",
        ) from error
