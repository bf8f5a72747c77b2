"""The dispatch mode that shows the ops of a run to visitors: those who note, keep, replace or refuse ops.

One mode serves all visitors of a run, because each mode on the stack costs microseconds at every op.
"""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class OpVisitor:
    """Sees each op that runs under an `OpRecorder`; a subclass overrides one of the methods or both."""

    def before(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Look at an op that is about to run; return its output to skip it, `NotImplemented` to run it."""
        return NotImplemented

    def after(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Look at an op that has run, and at its output; never called for a skipped op."""


class WatchingMode(TorchDispatchMode):  # torch's __init_subclass__
    """Mode under which compiled graphs are made and run; under any other active mode Dynamo runs eagerly."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: graphs that run op by op are observed, their making is not."""
        return True


def _run(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Run an op, unless a visitor has its output."""
    kwargs = kwargs or {}
    for visitor in self.visitors:
        out = visitor.before(func, args, kwargs)
        if out is not NotImplemented:
            return out
    out = func(*args, **kwargs)
    for visitor in self.visitors:
        visitor.after(func, args, kwargs, out)
    return out


class OpRecorder(WatchingMode):
    """Shows every op to `visitors`, in order; compiled graphs remain compiled."""

    __torch_dispatch__ = _run

    def __init__(self, *visitors: OpVisitor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.visitors = visitors


class EagerRecorder(TorchDispatchMode):
    """Shows every op to `visitors`, in order, around code that is never compiled."""

    # A class of its own: torch wraps `__torch_dispatch__` when a class is made, to keep Dynamo out at
    # each op, and a subclass of `OpRecorder` would inherit the wrapped one.
    __torch_dispatch__ = _run

    def __init__(self, *visitors: OpVisitor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.visitors = visitors

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
