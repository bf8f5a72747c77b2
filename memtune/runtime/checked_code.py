"""A region's generated code, held to what the ops were captured to return in its first run, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from memtune.errors import ApplyError
from memtune.runtime.frozen_code import Code, LayoutError
from memtune.runtime.tape import Tape


class CheckedCode:
    """Code for one tape; the first forward and the first backward are run with what ops return being checked."""

    def __init__(self, tape: Tape, generated: Callable[..., Code]) -> None:
        self.tape, self._generated = tape, generated
        self._checked: Code | None = generated(tape, checked=True)
        self._code = generated(tape)
        self._ran = [False, False]

    @property
    def lands(self) -> tuple[int, ...]:
        """`Code.lands`."""
        return self._code.lands

    def forward(self, *args: Any) -> Any:
        """`Code.forward`."""
        checked = self._checked
        if checked is None or self._ran[0]:
            return self._code.forward(*args)
        with _layouts_as_captured():
            out = checked.forward(*args)
        self._has_run(0)
        return out

    def backward(self, *args: Any) -> Generator[int, None, list[Tensor]]:
        """`Code.backward`."""
        checked = self._checked
        if checked is None or self._ran[1]:
            return self._code.backward(*args)
        return self._first_backward(checked.backward(*args))

    def _first_backward(self, running: Generator[int, None, list[Tensor]]) -> Generator[int, None, list[Tensor]]:
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
            "a frozen schedule cannot run this model.",
            evidence=f"{error}.", fix="choose recompute: {kind: full}", code="MT327",
        ) from error  # fmt: skip
