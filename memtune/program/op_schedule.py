"""A frozen schedule: in which order the ops of a region run, which run again, and when each value is let go.

A *region* is a module's forward and its backward. Its ops are numbered in the order in which the plain model
runs them, forward first; views are no ops. A *value* is a storage that an op makes, numbered in the order of
making. What comes from outside (parameters, buffers, inputs, gradients of the outputs) is there whenever it
is read and is no value.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple


class Action(IntEnum):
    """What a step of a schedule does."""

    COMPUTE = 0
    """Run an op."""
    FREE = 1
    """The region lets go of a value; who else holds it (the caller an output, the optimizer a gradient) keeps
    it.
    """
    TO_HOST = 2
    """Start to copy a value to the host; the FREE that lets go of it waits for the copy."""
    FROM_HOST = 3
    """Bring it back; the host's copy is gone then."""


class Do(NamedTuple):
    """One step of a schedule."""

    action: Action
    of: int
    """An op for COMPUTE, else a value."""
    along: tuple[int, ...] = ()
    """Ops by elements, ascending, that run again in `parts` parts of this one; what they make never exists
    whole.
    """
    parts: int = 1

    def reads(self, graph: OpGraph) -> tuple[int, ...]:
        """Values that a COMPUTE finds there, ascending."""
        if not self.along:
            return graph.reads[self.of]
        made = {value for op in self.along for value in graph.makes[op]}
        return tuple(sorted({value for op in (*self.along, self.of) for value in graph.reads[op]} - made))


@dataclass(frozen=True)
class OpGraph:
    """The ops of one region and the values between them: what a schedule is for, and what it is checked
    against.
    """

    names: tuple[str, ...]
    """(n,) ops, `aten.addmm.default`."""
    n_forward: int
    """The first so many ops are the forward."""
    makes: tuple[tuple[int, ...], ...]
    """(n,) values that each op makes; ascending over all ops."""
    reads: tuple[tuple[int, ...], ...]
    """(n,) values that each op reads or changes, ascending."""
    writes: tuple[tuple[int, ...], ...]
    """(n,) values that each op changes in place, ascending."""
    random: frozenset[int] = frozenset()
    """Ops that draw random numbers; run again, they draw the same ones."""
    once: frozenset[int] = frozenset()
    """Ops that must not run twice: collectives, and those that write into what comes from outside."""

    @property
    def n_ops(self) -> int:
        """Number of ops, n."""
        return len(self.names)

    @cached_property
    def maker(self) -> tuple[int, ...]:
        """(m,) the op that makes each value."""
        return tuple(op for op, made in enumerate(self.makes) for _ in made)

    @cached_property
    def sha256(self) -> str:
        """Of the ops and what they read from one another; sizes do not enter, so it is the same for every
        batch.
        """
        plain = [self.names, self.n_forward, [len(made) for made in self.makes], self.reads, self.writes]
        return hashlib.sha256(json.dumps(plain).encode()).hexdigest()

    @cached_property
    def writers(self) -> Mapping[int, tuple[int, ...]]:
        """Value → ops that change it in place, ascending; values that nobody changes are not in it."""
        found: dict[int, tuple[int, ...]] = {}
        for op, written in enumerate(self.writes):
            for value in written:
                found[value] = (*found.get(value, ()), op)
        return found


@dataclass(frozen=True)
class Schedule:
    """What the executor of `memtune.activations.schedules.scheduled_region` does in place of a region's
    forward and backward.
    """

    graph: str
    """`OpGraph.sha256` of the region that it is for; another one runs as it is."""
    forward: tuple[Do, ...]
    backward: tuple[Do, ...]
    made_by: str = field(default="", compare=False)
    """Who decided it, for messages."""

    @property
    def steps(self) -> tuple[Do, ...]:
        """Forward, then backward."""
        return self.forward + self.backward

    def computes(self) -> list[int]:
        """Ops in the order in which they run, again and again."""
        return [op for step in self.steps if step.action == Action.COMPUTE for op in (*step.along, step.of)]

    def to_plain(self) -> dict[str, Any]:
        """As plain data for a plan: an op n to compute is n, a value v to free -1 - v, all else [action,
        numbers …].
        """
        return {
            "graph": self.graph,
            "forward": [_plain(s) for s in self.forward],
            "backward": [_plain(s) for s in self.backward],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], *, made_by: str = "") -> Schedule:
        """What `to_plain` gave.

        Raises:
            IndexError, KeyError, TypeError, ValueError: It is not what `to_plain` gives.
        """
        forward, backward = (tuple(_step(each) for each in plain[key]) for key in ("forward", "backward"))
        return cls(str(plain["graph"]), forward, backward, made_by)


def _plain(step: Do) -> int | list[int]:
    if step.action == Action.COMPUTE:
        return [int(step.action), step.of, step.parts, *step.along] if step.along else step.of
    return -1 - step.of if step.action == Action.FREE else [int(step.action), step.of]


def _step(plain: int | Sequence[int]) -> Do:
    if isinstance(plain, int):
        return Do(Action.COMPUTE, plain) if plain >= 0 else Do(Action.FREE, -1 - plain)
    if plain[0] == Action.COMPUTE:
        _, op, parts, *along = map(int, plain)
        return Do(Action.COMPUTE, op, tuple(along), parts)
    action, index = plain
    return Do(Action(action), int(index))


def parts_of(n_elements: int, parts: int) -> Iterator[tuple[int, int]]:
    """First element and end of each part: as large as the first one, but for the last, which may be
    smaller.
    """
    size = -(-n_elements // parts)
    for start in range(0, n_elements, size):
        yield start, min(start + size, n_elements)


def scheduled(
    graph: OpGraph, forward: Iterable[int | Do], backward: Iterable[int | Do], *, made_by: str = ""
) -> Schedule:
    """The schedule that runs these ops in this order and lets go of every value as early as that allows.

    A value that is made again is let go after its last reader before that; one whose ops write into it in
    place is a new value each time its maker runs.
    """
    forward, backward = (
        [each if isinstance(each, Do) else Do(Action.COMPUTE, each) for each in part]
        for part in (forward, backward)
    )
    order = [*forward, *backward]
    last: dict[int, int] = {}  # the value as it is now → position of its last use
    free_after: list[list[int]] = [[] for _ in order]
    for position, compute in enumerate(order):
        for value in graph.makes[compute.of]:
            if value in last:
                free_after[last[value]].append(value)
            last[value] = position
        for value in compute.reads(graph):
            last[value] = position
    for value, position in last.items():
        free_after[position].append(value)
    steps = [
        (compute, *(Do(Action.FREE, value) for value in sorted(free)))
        for compute, free in zip(order, free_after, strict=True)
    ]
    first, second = (
        tuple(chain.from_iterable(part)) for part in (steps[: len(forward)], steps[len(forward) :])
    )
    return Schedule(graph.sha256, first, second, made_by)


def forward_alone(graph: OpGraph, schedule: Schedule) -> Schedule:
    """The forward of `schedule` without what backward would need: every value is let go after its last reader
    in forward.
    """
    return scheduled(
        graph,
        [step for step in schedule.forward if step.action == Action.COMPUTE],
        (),
        made_by=schedule.made_by,
    )


def plain_schedule(graph: OpGraph) -> Schedule:
    """Every op once, in the order of the plain model."""
    return scheduled(graph, range(graph.n_forward), range(graph.n_forward, graph.n_ops), made_by="plain")


def wrong_with(graph: OpGraph, schedule: Schedule) -> str:
    """Why `schedule` would not compute what the plain order computes, '' if it does; runs it on version
    numbers.

    Every op must find each value it reads as it was when the plain order ran it: after the same writes, no
    more and no less.
    """
    if schedule.graph != graph.sha256:
        return "it is for another region"
    wanted = _versions(graph)
    version: dict[int, int] = {}  # values that are there → how many writes they have seen
    on_host: dict[int, int] = {}
    ran = [0] * graph.n_ops
    for number, step in enumerate(schedule.steps):
        action, index = step[:2]
        if action == Action.COMPUTE:
            if not all(0 <= op < graph.n_ops for op in (*step.along, index)):
                return f"step {number} runs op {max((*step.along, index))} of {graph.n_ops}"
            if number < len(schedule.forward) and index >= graph.n_forward:
                return f"step {number} runs {graph.names[index]} of backward in forward"
            found = _wrong_along(graph, step, ran) or _wrong_read(graph, step, version, wanted)
            if found:
                return f"step {number} runs {graph.names[index]} (op {index}), but {found}"
            version.update({value: version[value] + 1 for value in graph.writes[index]})
            version.update(dict.fromkeys(graph.makes[index], 0))
            for op in (*step.along, index):
                ran[op] += 1
        elif action == Action.FROM_HOST:
            if index not in on_host:
                return f"step {number} brings back value {index}, which is not on the host"
            version[index] = on_host.pop(index)
        elif index not in version:
            return f"step {number} lets go of value {index}, which is not there"
        else:
            if action == Action.TO_HOST:
                on_host[index] = version[index]
            else:
                del version[index]
    for op, times in enumerate(ran):
        if times == 0 or (times > 1 and op in graph.once):
            return f"{graph.names[op]} (op {op}) runs {times} times"
    return ""


def _wrong_along(graph: OpGraph, step: Do, ran: Sequence[int]) -> str:
    """Why ops cannot run along with another one: they have not run before, do more than make one value, or in
    another order.
    """
    if not step.along:
        return ""
    if step.parts < 2 or list(step.along) != sorted(set(step.along)) or step.of <= step.along[-1]:
        return "what runs along with it is out of order"
    odd = [
        op
        for op in (*step.along, step.of)
        if len(graph.makes[op]) != 1 or graph.writes[op] or op in graph.random
    ]
    odd += [op for op in step.along if not ran[op] or graph.makes[op][0] in graph.writers]
    return f"{graph.names[odd[0]]} (op {odd[0]}) cannot run in parts of it" if odd else ""


def _wrong_read(
    graph: OpGraph, step: Do, version: Mapping[int, int], wanted: Mapping[tuple[int, int], int]
) -> str:
    """Which value a step would not find as it was in the plain order."""
    made = {value for op in step.along for value in graph.makes[op]}
    for op in (*step.along, step.of):
        for value in graph.reads[op]:
            if value not in made and version.get(value) != wanted[op, value]:
                return (
                    f"value {value}"
                    f" {'is not there' if value not in version else 'was written to in between, or not yet'}"
                )
    return ""


def _versions(graph: OpGraph) -> dict[tuple[int, int], int]:
    """(op, value it reads) → how many writes the value has seen when the plain order runs the op."""
    seen: dict[int, int] = {}
    found = {}
    for op in range(graph.n_ops):
        for value in graph.reads[op]:
            found[op, value] = seen.get(value, 0)
        for value in graph.writes[op]:
            seen[value] = seen.get(value, 0) + 1
    return found
