"""The ops of a followed run as functions, one for each: what they read and make is in a list, by number on the books.

Names in them: V what is there by number, p parameters and buffers, x inputs, R random states by op; else as in `call_text`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from memtune.runtime.below_autograd import ASK_GRAD_MODE, as_recorded
from memtune.runtime.call_text import CallText, outside_name, slots_in
from memtune.runtime.followed_path import OpPath, Path
from memtune.runtime.random_state import RandomState
from memtune.runtime.tape import Outside, Slot, Tape

Run = Callable[[list[Any], Sequence[Any], Sequence[Any], dict[int, RandomState]], None]
"""(V, p, x, R): runs an op and puts what it makes into V."""
Again = Callable[[list[Any], Sequence[Any], Sequence[Any]], Any]
"""(V, p, x): what the op returns."""


class FollowedCode(CallText):
    """Functions of one tape and path.

    Args:
        tape: The captured region.
        path: What is where on the books.
        random_state: The state of the generators now.
        device: Where the module computes.
    """

    def __init__(self, tape: Tape, path: Path, random_state: Callable[[], RandomState], device: torch.device) -> None:
        super().__init__(tape)
        self._path, self._numbers = path, dict[int, int]()
        self._flowed_in = {at: number for number, at in path.flowed_in}
        self.namespace |= {"as_recorded": as_recorded, "random_state": random_state, "device": device}
        self._known: dict[int, Again] = {}

    def runs(self, first: int, end: int) -> list[Run]:
        """The ops of the tape from `first` to before `end`."""
        text = "\n".join(line for op in range(first, end) for line in self._lines(op))
        exec(compile(text, "<followed run>", "exec"), self.namespace)  # the text holds nothing that came from a file
        return [self.namespace[f"run{op}"] for op in range(first, end)]

    def views(self, slots: Sequence[Slot], numbers: dict[int, int]) -> Callable[[list[Any], Sequence[Any], Sequence[Any]], Any]:
        """(V, p, x) → tensors that look at what these slots do, below autograd's view."""
        self._numbers = numbers
        found: Callable[..., Any] = self._evaluated(f"[{', '.join(f'{self._view(slot)}.detach()' for slot in slots)}]")
        return found

    def again(self, op: int) -> Again:
        """A second run of an op of the tape; made when it is first asked for."""
        if op not in self._known:
            self._numbers = self._path.ops[op].numbers
            self._known[op] = self._evaluated(self._call(self._tape.calls[op], again=True))
        return self._known[op]

    def _evaluated(self, text: str) -> Any:
        return eval(compile(f"lambda V, p, x: {text}", "<followed run>", "eval"), self.namespace)

    def _lines(self, op: int) -> list[str]:
        path, call, graph = self._path.ops[op], self._tape.calls[op], self._tape.graph
        self._numbers = path.numbers
        lines = [f"def run{op}(V, p, x, R):"]
        if path.over is not None:
            old, new = path.over
            lines.append(f"    V[{new}] = V[{old}]; V[{old}] = None")
        if op in graph.random and path.again >= 0:
            lines.append(f"    R[{op}] = random_state()")
        around = "with as_recorded(): " if str(call.func) in ASK_GRAD_MODE else ""
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
    """Position among the tensors that an op of the tape returns, and number on the books, of what it makes."""
    left = set(tape.graph.makes[op])
    found: list[tuple[int, int]] = []
    for at, slot in enumerate(slots_in(tape.calls[op].out)):
        if slot.of in left:
            left.discard(slot.of)
            found.append((at, path.numbers[slot.of]))
    return found
