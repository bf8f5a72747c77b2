"""Log of one run of the evicting region: every call on the rematerializer, and the outputs of each op.

A program that does the same again makes the same calls, whatever the budget: evictions and replays are
results of the rematerializer, not inputs. So a later run can replay the calls from the log
(`activations.eviction.replayer`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from memtune import _native
from memtune.activations.capture import GradientLike
from memtune.activations.eviction.op_metadata import OpMetadata

MUTATING_CALLS = (
    "constant",
    "call",
    "retain",
    "release",
    "hold",
    "let_go",
    "take",
    "give_back",
    "bring",
    "make_room",
)
"""Methods that change the rematerializer's state; all others query it."""
LoggedCall = tuple[str, tuple[Any, ...]]


class OpOutput(NamedTuple):
    """A storage that an op made, with the view of its first tensor."""

    number: int
    """Number in the rematerializer."""
    n_bytes: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class OpLog:
    """Log entry of one op."""

    before: int
    """Number of calls logged before it ran."""
    made: list[OpOutput] = field(default_factory=list)
    again: int = -1
    """Its number among the ops that may run again; -1 if it must not."""
    over: tuple[int, int] | None = None
    """The value that it wrote into, and the new version."""


@dataclass
class DecisionLog:
    """Log of one forward and its backward."""

    calls: list[LoggedCall] = field(default_factory=list)
    ops: list[OpLog] = field(default_factory=list)
    forward_end: int = 0
    """Number of calls logged at the end of forward."""
    flowed_in: list[tuple[int, int]] = field(default_factory=list)
    """Number of each incoming gradient, and the output of forward that it belongs to."""
    why_not: str = ""
    """Reason why the log cannot be replayed, '' if it can."""

    def made(self, tensor: Tensor, number: int, n_bytes: int) -> None:
        """Record a storage made by the latest op."""
        self.ops[-1].made.append(
            OpOutput(number, n_bytes, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        )


class LoggingRematerializer:
    """Rematerializer that logs its mutating calls.

    Args:
        remat: The rematerializer to call.
        log: The log to append to.
    """

    def __init__(self, remat: _native.Rematerializer, log: DecisionLog) -> None:
        self.pending, self.drain, self.counted = remat.pending, remat.drain, remat.counted
        for name in MUTATING_CALLS:
            setattr(self, name, _logged(name, getattr(remat, name), log.calls))


def _logged(name: str, tell: Callable[..., Any], calls: list[LoggedCall]) -> Callable[..., Any]:
    def noted(*args: Any) -> Any:
        calls.append((name, args))
        return tell(*args)

    return noted


@dataclass(frozen=True, eq=False)
class LoggedRun:
    """Log of one forward and its backward, with the metadata of its ops."""

    log: DecisionLog
    ran: list[OpMetadata]
    """Every op, in the order of first runs."""
    n_forward: int
    gradients: dict[int, GradientLike]
    """Incoming gradients, by output of forward."""


def script_of(log: DecisionLog, ran: list[OpMetadata]) -> _native.RematScript:
    """Return the logged calls as a native script for a later run, with the sizes of outputs that are known
    now.
    """
    calls = list(log.calls)
    for note, facts in zip(log.ops, ran, strict=True):
        # The last call before an op requested room for it; op sizes that depend on data are exact only now.
        calls[note.before - 1] = ("make_room", (facts.makes_bytes + facts.scratch_bytes,))
    script = _native.RematScript()
    for name, args in calls:
        getattr(script, name)(*args)
    return script
