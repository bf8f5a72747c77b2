"""Calls of a model's blocks, by the user's code or by others, that whoever orders them may answer otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from memtune.errors import ApplyError
from memtune.runtime.replaced_forward import ReplacedForward

Called = Callable[[int, Callable[..., Any], Any, Any], Any]
"""Takes the place of a block: its number, its own forward, what it is called with."""


class _Block(ReplacedForward):
    """A block that runs, is skipped or stops the user's code, as the order wants."""

    def __init__(self, module: nn.Module, index: int, calls: BlockCalls) -> None:
        super().__init__(module)
        self._index, self._calls = index, calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The block's own forward, or what takes its place."""
        return self._calls.called(self._index, self._original, args, kwargs)


class BlockCalls:
    """The blocks `names` of `model`, whose forwards are replaced.

    Args:
        model: Holds the blocks.
        names: Of the blocks.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._names, self.blocks = names, [model.get_submodule(name) for name in names]
        self._called: Called | None = None
        for index, block in enumerate(self.blocks):
            _Block(block, index, self).install()

    def called(self, index: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A block is called by the user's code, or by a pack."""
        if self._called is None:
            return forward(*args, **kwargs)
        return self._called(index, forward, args, kwargs)

    @contextmanager
    def answered_by(self, called: Called) -> Iterator[None]:
        """Inside, `called` takes the place of the blocks."""
        self._called = called
        try:
            yield
        finally:
            self._called = None

    def check(self) -> None:
        """Look whether all is as it was put there.

        Raises:
            ApplyError: A block's forward is another one.
        """
        for name, block in zip(self._names, self.blocks, strict=True):
            if not isinstance(getattr(vars(block).get("forward"), "__self__", None), _Block):
                raise ApplyError(f"the forward of {name} was replaced after memtune.apply.", code="MT309")


def as_it_is(block: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The block itself."""
    return forward(*args, **kwargs)
