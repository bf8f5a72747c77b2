"""Python expressions for the ops of a tape: their arguments, and the views that they read.

Names: p a parameter or buffer, x an input, g the gradient of an output, k a constant of the model's code, q a
part of a value, c any other argument; a subclass names values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune.activations.capture import Call, Outside, Slot, Tape
from memtune.program import BATCH_NORMS, EMPTY
from memtune.runtime import part_of

_LETTER = {"parameter": "p", "buffer": "p", "input": "x", "gradient": "g", "constant": "k"}


class CallText:
    """Writer of a tape's calls; `namespace` defines the names in them.

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
