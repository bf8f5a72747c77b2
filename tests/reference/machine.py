"""Reference simulator of the machine: slow and simple, with exact fractions.

At each moment it checks each rule by scanning all tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise

from memtune.program.step import Phase, Resource, Step, Tier

ONCE_AFTER = (Phase.BOUNDARY, Phase.OPTIMIZER)
BODY = (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD)
COPIES = (Resource.HOST_TO_DEVICE, Resource.DEVICE_TO_HOST)
LINKS = (Resource.INTRA_LINK, Resource.INTER_LINK)
CORES = (Resource.COMPUTE, Resource.HOST_THREADS, *COPIES)


@dataclass(eq=False)
class Task:
    """One run of one op."""

    rank_class: int
    op: int
    repetition: int
    seconds: Fraction
    issue_s: Fraction
    came: Fraction | None = None
    issued: Fraction | None = None
    holds: bool = False
    start: Fraction | None = None
    stop: Fraction | None = None
    left: Fraction = Fraction(0)


@dataclass
class Ranks:
    """One rank class: its step, the times of its ops, and its PCIe root."""

    step: Step
    op_s: list[int]
    issue_s: list[int]
    root: int = 0
    ranks_on_root: int = 1
    tasks: list[Task] = field(default_factory=list)


class Deadlock(Exception):
    """Raised if ops wait for each other."""


class Machine:
    """Runs all classes together; afterwards `tasks` have their times, and `log` has the events in order."""

    def __init__(
        self,
        classes: list[Ranks],
        times: int,
        host_computes: bool,
        slowdown: Fraction,
        shares_cores: bool = False,
    ) -> None:
        self.classes, self.times, self.host_computes, self.slowdown = classes, times, host_computes, slowdown
        self.shares_cores = shares_cores
        self.now = Fraction(0)
        self.log: list[tuple[str, Task]] = []
        self._uses = [
            set(zip(r.step.uses.op.tolist(), r.step.uses.storage.tolist(), strict=True)) for r in classes
        ]
        self._mutations = [
            {
                (op, s)
                for op, s, m in zip(
                    r.step.uses.op.tolist(), r.step.uses.storage.tolist(), r.step.uses.mode, strict=True
                )
                if m
            }
            for r in classes
        ]
        for number, ranks in enumerate(classes):
            ranks.tasks = [
                Task(number, op, r, Fraction(ranks.op_s[op]), Fraction(ranks.issue_s[op]))
                for r in range(times)
                for op in range(ranks.step.ops.n)
                if self._runs(ranks.step, op, r)
            ]

    def run(self) -> Fraction:
        """Simulate the step; return its seconds."""
        while True:
            self._finish()
            self._issue()
            self._begin()
            following = self._next()
            if following is None:
                break
            for task, rate in self._running():
                task.left -= (following - self.now) * rate
            self.now = following
        if any(task.stop is None for ranks in self.classes for task in ranks.tasks):
            raise Deadlock
        return max((self.finish_s(ranks) for ranks in self.classes), default=Fraction(0))

    def finish_s(self, ranks: Ranks) -> Fraction:
        """Return when the class has finished: its host, and all its ops but allocations."""
        ends = [task.issued for task in ranks.tasks] + [
            t.stop for t in ranks.tasks if self._resource(t) != Resource.NOTHING
        ]
        return max((end for end in ends if end is not None), default=Fraction(0))

    # -- meaning of the columns ------------------------------------------------------------------------------

    def _runs(self, step: Step, op: int, repetition: int) -> bool:
        if step.ops.phase[op] == Phase.PROLOGUE:
            return repetition == 0
        return step.ops.phase[op] not in ONCE_AFTER or repetition == self.times - 1

    def _step(self, task: Task) -> Step:
        return self.classes[task.rank_class].step

    def _resource(self, task: Task) -> int:
        return int(self._step(task).ops.resource[task.op])

    def _stream(self, task: Task) -> int:
        """Return the stream's number: own streams by resource, then side streams; larger ones go first."""
        stream = int(self._step(task).ops.stream[task.op])
        return self._resource(task) if stream == 0 else 0 if stream == 1 else 100 + stream

    def _computes(self, task: Task) -> bool:
        return self._resource(task) != Resource.NOTHING and self._stream(task) == 0

    def _moves(self, task: Task) -> bool:
        return self._resource(task) != Resource.NOTHING and not self._computes(task)

    def _reads(self, task: Task, storage: int) -> bool:
        return (task.op, storage) in self._uses[task.rank_class]

    def _writes(self, task: Task, storage: int) -> bool:
        return (
            bool(self._step(task).storages.producer[storage] == task.op)
            or (task.op, storage) in self._mutations[task.rank_class]
        )

    def _kept(self, ranks: Ranks, storage: int) -> bool:
        """Return whether the last holder of `storage` is an op outside the compute stream that uses it."""
        last = [task for task in ranks.tasks if task.op == ranks.step.freed_after[storage]]
        return any(self._moves(t) and (self._reads(t, storage) or self._writes(t, storage)) for t in last)

    def _freed_by_host(self, ranks: Ranks, storage: int) -> bool:
        """Return whether a GPU's allocator has `storage` back as soon as the host drops it."""
        step = ranks.step
        if self.host_computes or step.storages.tier[storage] != Tier.DEVICE:
            return False
        if step.ops.resource[step.freed_after[storage]] in LINKS:
            return True
        used = (t for t in ranks.tasks if self._reads(t, storage) or self._writes(t, storage))
        streams = {self._stream(t) for t in used if self._resource(t) != Resource.NOTHING}
        return len(streams) == 1 and bool(step.storages.producer[storage] >= 0)

    def _born(self, before: list[Task], storage: int) -> int:
        """Return the index in `before` of the op that made the newest instance of `storage`."""
        made = [i for i, task in enumerate(before) if self._step(task).storages.producer[storage] == task.op]
        return max(made, default=0)

    def comes_before(self, task: Task) -> Iterator[Task]:
        """Yield the tasks of its class that must finish before `task` may start."""
        ranks = self.classes[task.rank_class]
        step, place = ranks.step, ranks.tasks.index(task)
        before = ranks.tasks[:place]
        if self._resource(task) != Resource.NOTHING:
            yield from (
                t
                for t in before
                if self._resource(t) != Resource.NOTHING and self._stream(t) == self._stream(task)
            )
        for storage in range(step.storages.n):
            touches = self._reads(task, storage) or self._writes(task, storage)
            if touches and step.storages.producer[storage] != task.op:
                for other in before[self._born(before, storage) :]:
                    if self._writes(other, storage) or (
                        self._writes(task, storage) and self._reads(other, storage)
                    ):
                        yield other
            if self._computes(task) and not self._kept(ranks, storage):
                for i, last in enumerate(before):
                    if last.op == step.freed_after[storage]:
                        since = before[self._born(before[: i + 1], storage) : i + 1]
                        touching = (t for t in since if self._reads(t, storage) or self._writes(t, storage))
                        yield from (t for t in touching if self._moves(t))
        yield from self._gate(task, before)

    def _gate(self, task: Task, before: list[Task]) -> Iterator[Task]:
        depth = int(self._step(task).ops.prefetch[task.op])
        if depth == 0:
            return

        def kind(each: Task) -> tuple[int, int]:
            stream = int(self._step(each).ops.stream[each.op])
            return stream, self._resource(each) if stream == 0 else -1

        fetches = [
            t for t in [*before, task] if self._step(t).ops.prefetch[t.op] > 0 and kind(t) == kind(task)
        ]
        if len(fetches) >= depth:
            at = [*before, task].index(fetches[-depth])
            yield from (t for t in before[:at] if self._computes(t))

    # -- events at a moment ----------------------------------------------------------------------------------

    def _each(self, wanted: Callable[[Task], bool]) -> list[Task]:
        return [task for ranks in self.classes for task in ranks.tasks if wanted(task)]

    def _finish(self) -> None:
        for task in sorted(
            self._each(lambda t: t.start is not None and t.stop is None and t.left == 0), key=self._resource
        ):
            task.stop = self.now
            self.log.append(("finished", task))
            if self.host_computes and self._computes(task):
                self.log.append(("passed", task))
        self._allocate()

    def _allocate(self) -> None:
        """Finish allocations, which take no time, once they are issued and all tasks before them have
        finished.
        """
        for task in self._each(lambda t: self._resource(t) == Resource.NOTHING and t.issued is not None):
            if task.stop is None and all(other.stop is not None for other in self.comes_before(task)):
                task.start = task.stop = self.now
                self.log.append(("finished", task))

    def _issue(self) -> None:
        for ranks in self.classes:
            for i, task in enumerate(ranks.tasks):
                if task.issued is not None:
                    continue
                came = self._came(ranks, i)
                if came is None or came + task.issue_s > self.now:
                    break
                task.came, task.issued = came, self.now
                self.log.append(("issued", task))
                if not (self.host_computes and self._computes(task)):
                    self.log.append(("passed", task))
                self._allocate()

    def _came(self, ranks: Ranks, i: int) -> Fraction | None:
        """Return when the host reaches task `i`, None while the task before it occupies the host."""
        if i == 0:
            return Fraction(0)
        previous = ranks.tasks[i - 1]
        return previous.stop if self.host_computes and self._computes(previous) else previous.issued

    def _begin(self) -> None:
        occupies = self._each(lambda t: t.issued is not None and t.stop is None and not t.holds)
        for task in sorted(occupies, key=lambda t: -self._stream(t)):
            rivals = [t for t in self.classes[task.rank_class].tasks if t.holds and t.stop is None]
            free = all(self._resource(t) != self._resource(task) for t in rivals)
            if self._resource(task) == Resource.NOTHING or not free:
                continue
            if all(other.stop is not None for other in self.comes_before(task)):
                task.holds = True
        for task in self._each(lambda t: t.holds and t.start is None):
            partners = self._partners(task)
            if all(t.holds for t in partners):
                for t in partners:
                    t.start, t.left = self.now, max(p.seconds for p in partners)

    def _partners(self, task: Task) -> list[Task]:
        number = self._step(task).ops.match[task.op]
        if not number:
            return [task]
        same = self._each(
            lambda t: self._step(t).ops.match[t.op] == number and t.repetition == task.repetition
        )
        return [t for t in same if self._resource(t) != Resource.NOTHING]

    def _running(self) -> list[tuple[Task, Fraction]]:
        running = self._each(lambda t: t.start is not None and t.stop is None)
        return [(task, self._rate(task, running)) for task in running]

    def _rate(self, task: Task, running: list[Task]) -> Fraction:
        mine = [t for t in running if t.rank_class == task.rank_class]
        rate = Fraction(1)
        slowed = CORES if self.shares_cores else (Resource.COMPUTE,)
        if self._resource(task) in slowed and any(self._resource(t) in LINKS for t in mine):
            rate /= 1 + self.slowdown
        if self._resource(task) in COPIES:
            root = self.classes[task.rank_class].root
            users = [self.classes[t.rank_class] for t in running if self._resource(t) == self._resource(task)]
            rate /= sum(each.ranks_on_root for each in users if each.root == root)
        if self.shares_cores and self._resource(task) in CORES:
            rate /= sum(self._resource(t) in CORES for t in mine)
        return rate

    def _next(self) -> Fraction | None:
        moments = [self.now + task.left / rate for task, rate in self._running()]
        for ranks in self.classes:
            for i, task in enumerate(ranks.tasks):
                if task.issued is None:
                    came = self._came(ranks, i)
                    moments += [] if came is None else [came + task.issue_s]
                    break
        return min(moments, default=None)

    # -- results ---------------------------------------------------------------------------------------------

    def intervals(self, ranks: Ranks, resource: int) -> list[tuple[Fraction, Fraction]]:
        """Return the intervals in which a resource was busy; 9 is the host issuing ops."""
        if resource == 9:
            return [(t.came, t.issued) for t in ranks.tasks if t.came is not None and t.issued is not None]
        mine = [t for t in ranks.tasks if self._resource(t) == resource]
        return [(t.start, t.stop) for t in mine if t.start is not None and t.stop is not None]

    def bytes_at_issues(self, number: int, tier: Tier) -> list[tuple[int, int]]:
        """Return (op, live bytes of `tier`) for each op that the host of a class issues."""
        ranks = self.classes[number]
        found, past = [], []
        for what, task in self.log:
            if task.rank_class != number:
                continue
            past.append((what, task))
            if what == "issued":
                alive = [
                    s
                    for s in range(ranks.step.storages.n)
                    if ranks.step.storages.tier[s] == tier
                    for _ in self._alive(ranks, s, past)
                ]
                found.append((task.op, sum(int(ranks.step.storages.bytes[s]) for s in alive)))
        return found

    def _alive(self, ranks: Ranks, storage: int, past: list[tuple[str, Task]]) -> Iterator[int]:
        """Yield the repetitions whose instance of `storage` is live after the events in `past`."""
        step, repetition = ranks.step, past[-1][1].repetition
        made_by, end = int(step.storages.producer[storage]), int(step.freed_after[storage])
        if end < 0:
            return
        ends_in_body = end < step.ops.n and step.ops.phase[end] in BODY
        # A storage from before the step that ends in the body is a batch, new in each repetition.
        made_in_body = step.ops.phase[made_by] in BODY if made_by >= 0 else ends_in_body
        if made_by >= 0:
            born = [t.repetition for what, t in past if what == "issued" and t.op == made_by]
        else:
            born = list(range(repetition + 1)) if ends_in_body else [0]
        for r in born:
            ends_in = r if made_in_body else self.times - 1
            if end < step.ops.n and step.ops.phase[end] == Phase.PROLOGUE:
                ends_in = 0
            made_again = made_in_body and not ends_in_body and r < repetition
            if not made_again and not self._gone(ranks, storage, end, ends_in, past):
                yield r

    def _gone(
        self, ranks: Ranks, storage: int, end: int, repetition: int, past: list[tuple[str, Task]]
    ) -> bool:
        if not any(what == "passed" and (t.op, t.repetition) == (end, repetition) for what, t in past):
            return False
        if not self._kept(ranks, storage) or self._freed_by_host(ranks, storage):
            return True
        finished = [t for what, t in past if what == "finished"]
        movers = [t for t in ranks.tasks if t.repetition == repetition and self._moves(t)]
        return all(t in finished for t in movers if self._reads(t, storage) or self._writes(t, storage))


def uncovered(
    intervals: list[tuple[Fraction, Fraction]], others: list[tuple[Fraction, Fraction]]
) -> Fraction:
    """Return the seconds of `intervals` that no interval of `others` covers."""
    total = Fraction(0)
    for left, right in pairwise(sorted({t for pair in intervals + others for t in pair})):
        middle = (left + right) / 2
        if any(a < middle < b for a, b in intervals) and not any(a < middle < b for a, b in others):
            total += right - left
    return total
