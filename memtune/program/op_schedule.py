"""Schedules: the order in which a region's ops run, the ops that are recomputed, and when each value is
freed.

A *region* is a module's forward and its backward. Its ops are numbered in the order of the plain model,
forward first; views are no ops. A *value* is a storage that an op makes, numbered in that order. Tensors from
outside (parameters, buffers, inputs, gradients of the outputs) are always readable and are no values.
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
    """Kind of a schedule's step."""

    COMPUTE = 0
    """Run an op."""
    FREE = 1
    """Drop the region's reference to a value. The caller may hold an output, the optimizer a gradient."""
    TO_HOST = 2
    """Start the copy of a value to the host; the FREE of the value waits for it."""
    FROM_HOST = 3
    """Reload a value and free the host copy."""


class ScheduleStep(NamedTuple):
    """One step of a schedule."""

    action: Action
    target: int
    """An op for COMPUTE, else a value."""
    along: tuple[int, ...] = ()
    """Elementwise ops, ascending, recomputed with this op in `parts` tiles; outputs never exist whole."""
    parts: int = 1

    def reads(self, graph: OpGraph) -> tuple[int, ...]:
        """Return the values that a COMPUTE reads, ascending."""
        if not self.along:
            return graph.reads[self.target]
        made = {value for op in self.along for value in graph.makes[op]}
        return tuple(sorted({value for op in (*self.along, self.target) for value in graph.reads[op]} - made))

    def makes_and_reads(self, graph: OpGraph) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the values that are on the device because of this step, and those that must be before it."""
        if self.action == Action.COMPUTE:
            return graph.makes[self.target], self.reads(graph)
        return ((self.target,), ()) if self.action == Action.FROM_HOST else ((), (self.target,))


@dataclass(frozen=True)
class OpGraph:
    """Ops of one region and the values between them; schedules are made for it and checked against it."""

    names: tuple[str, ...]
    """(n,) ops, `aten.addmm.default`."""
    n_forward: int
    """Number of forward ops, which come first."""
    makes: tuple[tuple[int, ...], ...]
    """(n,) values that each op makes; ascending over all ops."""
    reads: tuple[tuple[int, ...], ...]
    """(n,) values that each op reads or writes to, ascending."""
    writes: tuple[tuple[int, ...], ...]
    """(n,) values that each op writes to in place, ascending."""
    random: frozenset[int] = frozenset()
    """Ops that draw random numbers; recomputed, they draw the same numbers."""
    once: frozenset[int] = frozenset()
    """Ops that must not run twice: collectives, and ops that write to tensors from outside."""

    @property
    def n_ops(self) -> int:
        """Number of ops, n."""
        return len(self.names)

    @cached_property
    def maker(self) -> tuple[int, ...]:
        """(m,) the op that makes each value."""
        return tuple(op for op, made in enumerate(self.makes) for _ in made)

    @cached_property
    def versions(self) -> Mapping[tuple[int, int], int]:
        """(op, value it reads) → number of writes to the value before the op in the plain order."""
        seen: dict[int, int] = {}
        found = {}
        for op in range(self.n_ops):
            for value in self.reads[op]:
                found[op, value] = seen.get(value, 0)
            for value in self.writes[op]:
                seen[value] = seen.get(value, 0) + 1
        return found

    @cached_property
    def runs(self) -> tuple[ScheduleStep, ...]:
        """(n,) the plain run of each op; planners build hundreds of schedules of the same steps."""
        return tuple(ScheduleStep(Action.COMPUTE, op) for op in range(self.n_ops))

    @cached_property
    def frees(self) -> tuple[ScheduleStep, ...]:
        """(m,) the free of each value."""
        return tuple(ScheduleStep(Action.FREE, value) for value in range(len(self.maker)))

    @cached_property
    def sha256(self) -> str:
        """Hash of the ops and their data dependences, without sizes, so that it is equal for all batches."""
        # Sizes are left out on purpose: the same schedule serves every micro-batch.
        plain = [self.names, self.n_forward, [len(made) for made in self.makes], self.reads, self.writes]
        return hashlib.sha256(json.dumps(plain).encode()).hexdigest()

    @cached_property
    def writers(self) -> Mapping[int, tuple[int, ...]]:
        """Value → ops that write to it in place, ascending; without values that no op writes to."""
        found: dict[int, tuple[int, ...]] = {}
        for op, written in enumerate(self.writes):
            for value in written:
                found[value] = (*found.get(value, ()), op)
        return found


@dataclass(frozen=True)
class Schedule:
    """Steps that `activations.schedules.scheduled_region` runs instead of a region's two passes."""

    graph: str
    """`OpGraph.sha256` of its region; a region with another hash runs without schedule."""
    forward: tuple[ScheduleStep, ...]
    backward: tuple[ScheduleStep, ...]
    made_by: str = field(default="", compare=False)
    """Name of the planner, for messages."""

    @property
    def steps(self) -> tuple[ScheduleStep, ...]:
        """Steps of forward, then of backward."""
        return self.forward + self.backward

    def computes(self) -> list[int]:
        """Return the ops in the order in which they run; recomputed ops occur several times."""
        return [
            op for step in self.steps if step.action == Action.COMPUTE for op in (*step.along, step.target)
        ]

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for a plan: n computes op n, -1 - v frees value v, else [action, …]."""
        return {
            "graph": self.graph,
            "forward": [_plain(s) for s in self.forward],
            "backward": [_plain(s) for s in self.backward],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], *, made_by: str = "") -> Schedule:
        """Return the schedule that `to_plain` serialized.

        Raises:
            IndexError, KeyError, TypeError, ValueError: `plain` has another form.
        """
        forward, backward = (tuple(_step(each) for each in plain[key]) for key in ("forward", "backward"))
        return cls(str(plain["graph"]), forward, backward, made_by)


def _plain(step: ScheduleStep) -> int | list[int]:
    if step.action == Action.COMPUTE:
        return [int(step.action), step.target, step.parts, *step.along] if step.along else step.target
    return -1 - step.target if step.action == Action.FREE else [int(step.action), step.target]


def _step(plain: int | Sequence[int]) -> ScheduleStep:
    if isinstance(plain, int):
        return ScheduleStep(Action.COMPUTE, plain) if plain >= 0 else ScheduleStep(Action.FREE, -1 - plain)
    if plain[0] == Action.COMPUTE:
        _, op, parts, *along = map(int, plain)
        return ScheduleStep(Action.COMPUTE, op, tuple(along), parts)
    action, index = plain
    return ScheduleStep(Action(action), int(index))


def parts_of(n_elements: int, parts: int) -> Iterator[tuple[int, int]]:
    """Yield first element and end of each part. Parts are of equal size; the last one may be smaller."""
    size = -(-n_elements // parts)
    for start in range(0, n_elements, size):
        yield start, min(start + size, n_elements)


def build_schedule(
    graph: OpGraph,
    forward: Iterable[int | ScheduleStep],
    backward: Iterable[int | ScheduleStep],
    *,
    made_by: str = "",
) -> Schedule:
    """Return the schedule that runs these steps in this order and frees every value after its last reader.

    A FREE among them is the moment until which a value is held at least.
    """
    # A value that is recomputed is freed after its last reader before the recomputation. Each run of
    # its maker starts a new version of the value, to which ops write in place.
    forward, backward = (
        [each if isinstance(each, ScheduleStep) else graph.runs[each] for each in part]
        for part in (forward, backward)
    )
    order = [*forward, *backward]
    last: dict[int, int] = {}  # value, in its current version → position of its last use
    free_after: list[list[int]] = [[] for _ in order]
    for position, step in enumerate(order):
        made, read = step.makes_and_reads(graph)
        for value in made:
            # A second run replaces the value: the old version is freed after its own last reader.
            if value in last:
                free_after[last[value]].append(value)
            last[value] = position
        for value in read:
            last[value] = position
    for value, position in last.items():
        free_after[position].append(value)
    steps = [
        (*((step,) if step.action != Action.FREE else ()), *(graph.frees[value] for value in sorted(free)))
        for step, free in zip(order, free_after, strict=True)
    ]
    first, second = (
        tuple(chain.from_iterable(part)) for part in (steps[: len(forward)], steps[len(forward) :])
    )
    return Schedule(graph.sha256, first, second, made_by)


def forward_only(graph: OpGraph, schedule: Schedule) -> Schedule:
    """Return the forward of `schedule`, with every value freed after its last reader in forward."""
    return build_schedule(
        graph,
        [step for step in schedule.forward if step.action == Action.COMPUTE],
        (),
        made_by=schedule.made_by,
    )


def plain_schedule(graph: OpGraph) -> Schedule:
    """Return the schedule that runs every op once, in the order of the plain model."""
    return build_schedule(graph, range(graph.n_forward), range(graph.n_forward, graph.n_ops), made_by="plain")


def find_schedule_error(graph: OpGraph, schedule: Schedule) -> str:
    """Return the reason why `schedule` computes other results than the plain order, '' if it does not."""
    # The check simulates the schedule on version numbers: every op must read each value after the same
    # number of in-place writes as in the plain order.
    if schedule.graph != graph.sha256:
        return "it is for another region"
    wanted = graph.versions
    version: dict[int, int] = {}  # live value → number of writes to it
    on_host: dict[int, int] = {}
    ran = [0] * graph.n_ops
    for number, step in enumerate(schedule.steps):
        action, index = step[:2]
        if action == Action.COMPUTE:
            if not all(0 <= op < graph.n_ops for op in (*step.along, index)):
                return f"step {number} runs op {max((*step.along, index))} of {graph.n_ops}"
            if number < len(schedule.forward) and index >= graph.n_forward:
                return f"step {number} runs {graph.names[index]} of backward in forward"
            found = _tiling_error(graph, step, ran) or _read_error(graph, step, version, wanted)
            if found:
                return f"step {number} runs {graph.names[index]} (op {index}), but {found}"
            # Writes before outputs: an in-place op reads the version that it then changes.
            version.update({value: version[value] + 1 for value in graph.writes[index]})
            # A repeated op makes the value again, without the writes that followed its first run.
            version.update(dict.fromkeys(graph.makes[index], 0))
            for op in (*step.along, index):
                ran[op] += 1
        elif action == Action.FROM_HOST:
            if index not in on_host:
                return f"step {number} reloads value {index}, which is not on the host"
            # The host copy has the version that the value had when it was copied.
            version[index] = on_host.pop(index)
        elif index not in version:
            return f"step {number} frees or offloads value {index}, which is not live"
        else:
            if action == Action.TO_HOST:
                on_host[index] = version[index]
            else:
                del version[index]
    for op, times in enumerate(ran):
        # Every op of the plain order must run, since its outputs or effects are part of the result.
        if times == 0 or (times > 1 and op in graph.once):
            return f"{graph.names[op]} (op {op}) runs {times} times"
    return ""


def _tiling_error(graph: OpGraph, step: ScheduleStep, ran: Sequence[int]) -> str:
    """Return the reason why the ops `step.along` cannot run tile by tile, '' if they can."""
    # Each must have run before and must make one value without writes or random numbers; rows must ascend.
    if not step.along:
        return ""
    if step.parts < 2 or list(step.along) != sorted(set(step.along)) or step.target <= step.along[-1]:
        return "the ops that run in tiles with it are out of order"
    odd = [
        op
        for op in (*step.along, step.target)
        if len(graph.makes[op]) != 1 or graph.writes[op] or op in graph.random
    ]
    odd += [op for op in step.along if not ran[op] or graph.makes[op][0] in graph.writers]
    return f"{graph.names[odd[0]]} (op {odd[0]}) cannot run in its tiles" if odd else ""


def _read_error(
    graph: OpGraph, step: ScheduleStep, version: Mapping[int, int], wanted: Mapping[tuple[int, int], int]
) -> str:
    """Return the first value that a step reads in another version than the plain order, '' for none."""
    made = {value for op in step.along for value in graph.makes[op]}
    for op in (*step.along, step.target):
        for value in graph.reads[op]:
            if value not in made and version.get(value) != wanted[op, value]:
                return (
                    f"value {value}"
                    f" {'is not live' if value not in version else 'has more or fewer writes than it should'}"
                )
    return ""
