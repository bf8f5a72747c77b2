"""Map a function over items on several cores: this process and forked copies of it.

Rules:

1. Items of one group are processed by one process, call after call if it is idle: its caches are used again.
2. A copy that dies, or takes far longer than this process takes for its own items, costs time only: its items
  are processed here. So a function that raises does so here.
3. A copy ends with this process, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import multiprocessing
import os
import pickle
import signal
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Final, Generic, TypeVar

WORTH_S: Final = 0.3
"""CPU seconds of work in this process after which copies are made by default: work that ends before is not
worth their forks, a few hundredths of a second each.
"""
PATIENCE: Final = 3.0
LEAST_S: Final = 20.0
"""A copy may take `PATIENCE` times as long as this process took for its own items, plus `LEAST_S`."""
_LOOK_S: Final = 0.01  # between looks at the copies
_HERE: Final = -1
_DIE_WITH_PARENT: Final = 1  # PR_SET_PDEATHSIG of prctl(2)


T = TypeVar("T")
R = TypeVar("R")


class ParallelMap(Generic[T, R]):
    """Maps `function` over items on several cores; use it as a context manager.

    Args:
        function: Called for each item, here or in a copy; items and results can be pickled.
        group: Key of items that profit from each other's caches; None for an item that must be processed
            here.
        processes: This one and its copies; 1 makes no copy.
        worth_s: CPU seconds that this process works, over all calls, before copies are made.
    """

    def __init__(
        self,
        function: Callable[[T], R],
        group: Callable[[T], Hashable | None],
        processes: int,
        *,
        worth_s: float = WORTH_S,
    ) -> None:
        self._function, self._group, self._processes, self._worth_s = function, group, processes, worth_s
        self._homes: dict[Hashable, int] = {}
        self._copies: list[_ForkedWorker[T, R]] = []
        self._worked_s = 0.0

    def __enter__(self) -> ParallelMap[T, R]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self._copies:
            each.end()

    def map(self, items: Sequence[T], on_done: Callable[[int], None] = lambda done: None) -> list[R]:
        """Return results in the order of `items`; calls `on_done` with their number as they come."""
        work: _Work[T, R] = _Work(items, self._group, self._homes)
        started, worked_s = time.monotonic(), self._worked_s - time.process_time()
        looked = -math.inf
        while (mine := work.next_group(_HERE)) is not None:
            for i in mine:
                # The clock of CPU time and polling are system calls, which cost as much as a small item.
                if time.monotonic() - looked >= _LOOK_S:
                    looked, self._worked_s = time.monotonic(), worked_s + time.process_time()
                    if not self._copies and self._worked_s >= self._worth_s and work.groups:
                        self._copy()
                    self._collect_and_refill(work)
                work.results[i] = self._function(items[i])
                on_done(len(work.results))
        self._worked_s = worked_s + time.process_time()
        until_s = time.monotonic() + max(LEAST_S, PATIENCE * (time.monotonic() - started))
        for number in list(work.assigned):
            copy = self._copies[number]
            positions, found = work.assigned.pop(number), copy.answer(until_s)
            work.results.update(
                zip(positions, found or [self._function(items[i]) for i in positions], strict=True)
            )
            on_done(len(work.results))
        return [work.results[i] for i in range(len(items))]

    def _copy(self) -> None:
        self._worth_s = math.inf  # once, even if the machine allows no process
        self._copies = [
            copy for _ in range(self._processes - 1) if (copy := _ForkedWorker.fork(self._function))
        ]

    def _collect_and_refill(self, work: _Work[T, R]) -> None:
        """Collect results of copies, and give idle ones their next group."""
        for number, copy in enumerate(self._copies):
            if number in work.assigned and copy.is_ready():
                found = copy.answer(0.0)
                if found is None:
                    work.groups.appendleft((None, work.assigned.pop(number)))
                else:
                    work.results.update(zip(work.assigned.pop(number), found, strict=True))
            if (
                number not in work.assigned
                and copy.is_alive
                and (group := work.next_group(number)) is not None
            ):
                work.assigned[number] = group
                copy.send([work.items[i] for i in group])


class _Work(Generic[T, R]):
    """The remaining work of one call: groups of positions in `items`, large ones first."""

    def __init__(
        self, items: Sequence[T], group: Callable[[T], Hashable | None], homes: dict[Hashable, int]
    ) -> None:
        self.items, self._homes = items, homes
        members: dict[Hashable | None, list[int]] = defaultdict(list)
        for i, item in enumerate(items):
            members[group(item)].append(i)
        self.groups = deque(sorted(members.items(), key=lambda each: -len(each[1])))
        self.results: dict[int, R] = {}
        self.assigned: dict[int, list[int]] = {}
        """By process: the positions that a copy is working on."""

    def next_group(self, process: int) -> list[int] | None:
        """Return the next group for `process`.

        Preferably one that it had before, then a new one, then another's (rule 1).
        """
        allowed = [each for each in self.groups if each[0] is not None or process == _HERE]
        if not allowed:
            return None
        chosen = min(allowed, key=lambda each: self._foreign(each[0], process))
        self.groups.remove(chosen)
        self._homes.setdefault(chosen[0], process)
        return chosen[1]

    def _foreign(self, group: Hashable | None, process: int) -> int:
        home = _HERE if group is None else self._homes.get(group)
        return 1 if home is None else 2 * (home != process)


class _ForkedWorker(Generic[T, R]):
    """A fork of this process that returns the function's results."""

    def __init__(self, process: BaseProcess, ends: Connection) -> None:
        self._process, self._ends = process, ends

    @classmethod
    def fork(cls, function: Callable[[T], R]) -> _ForkedWorker[T, R] | None:
        """Return a copy of this process in its current state; None if it cannot fork."""
        ours, theirs = multiprocessing.Pipe()
        try:
            process = multiprocessing.get_context("fork").Process(
                target=_serve, args=(function, os.getpid(), ours, theirs), daemon=True
            )
            # Python 3.12 warns of any fork in a process with threads; rule 2 covers a copy that hangs.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
        except (OSError, ValueError):  # no memory, no processes left, a system without fork
            return None
        finally:
            theirs.close()
        return cls(process, ours)

    @property
    def is_alive(self) -> bool:
        """Return whether it accepts work."""
        return not self._ends.closed

    def is_ready(self) -> bool:
        """Return whether it has answered, or ended."""
        return not self.is_alive or self._ends.poll(0)

    def send(self, items: list[T]) -> None:
        """Start processing these items."""
        try:
            self._ends.send_bytes(pickle.dumps(items, pickle.HIGHEST_PROTOCOL))
        except OSError:
            self.end()  # `answer` will find it closed

    def answer(self, until_s: float) -> list[R] | None:
        """Return its results; end it and return None if it has none by `until_s`."""
        try:
            if self.is_alive and self._ends.poll(max(0.0, until_s - time.monotonic())):
                found: list[R] = pickle.loads(self._ends.recv_bytes())
                return found
        except (OSError, EOFError):
            pass
        self.end()
        return None

    def end(self) -> None:
        """End it at once; may be called twice."""
        self._ends.close()
        self._process.kill()
        self._process.join()


def _serve(function: Callable[[T], R], parent: int, theirs: Connection, ours: Connection) -> None:
    theirs.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(
        AttributeError
    ):  # Linux only; elsewhere the end of the pipe ends it, once it is done
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    with contextlib.suppress(
        Exception
    ):  # of the pipe: the parent is gone; of the function: it is raised there
        while os.getppid() == parent:
            items = pickle.loads(ours.recv_bytes())
            ours.send_bytes(pickle.dumps([function(item) for item in items], pickle.HIGHEST_PROTOCOL))
