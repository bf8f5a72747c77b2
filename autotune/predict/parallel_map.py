"""Map a function over items on several cores: this process and forked copies of it.

Rules:

1. Items of one group are processed by one process, call after call if it is idle: its caches are used again.
  A copy that no group is left for takes half of what this process has left of a group, if that is long. So a
  result may depend on its item alone, never on the items before it.
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
import threading
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
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
_LOOK_S: Final = 0.005  # between looks at the copies
_SHARED_S: Final = 0.1
"""Expected seconds left of a group from which half is given away: a copy computes shared parts again."""
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
        with contextlib.ExitStack() as feeding:
            if self._copies:
                feeding.enter_context(self._feeding(work))
            while (i := work.next_here()) is not None:
                # The clock of CPU time is a system call, which costs as much as a small item.
                if not self._copies and time.monotonic() - looked >= _LOOK_S:
                    looked, self._worked_s = time.monotonic(), worked_s + time.process_time()
                    if self._worked_s >= self._worth_s and work.has_more:
                        self._copy()
                        feeding.enter_context(self._feeding(work))
                work.results[i] = self._function(items[i])
                on_done(len(work.results))
        self._worked_s = worked_s + time.process_time()
        until_s = time.monotonic() + max(LEAST_S, PATIENCE * (time.monotonic() - started))
        for number, positions in work.assigned.items():
            work.results.update(zip(positions, self._copies[number].answer(until_s) or (), strict=False))
            on_done(len(work.results))
        # A copy that ended has not answered: its items are processed here.
        return [work.results[i] if i in work.results else self._function(items[i]) for i in range(len(items))]

    def _copy(self) -> None:
        self._worth_s = math.inf  # once, even if the machine allows no process
        self._copies = [
            copy for _ in range(self._processes - 1) if (copy := _ForkedWorker.fork(self._function))
        ]

    @contextlib.contextmanager
    def _feeding(self, work: _Work[T, R]) -> Iterator[None]:
        """Give idle copies work from a thread: an item may keep this process busy for long."""
        self._collect_and_refill(work)
        done = threading.Event()

        def feed() -> None:
            while not done.wait(_LOOK_S):
                self._collect_and_refill(work)

        thread = threading.Thread(target=feed, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _collect_and_refill(self, work: _Work[T, R]) -> None:
        """Collect results of copies, and give idle ones their next group."""
        for number, copy in enumerate(self._copies):
            if number in work.assigned and copy.is_ready():
                found = copy.answer(0.0)
                positions = work.assigned.pop(number)
                if found is None:
                    work.give_back(positions)
                else:
                    work.results.update(zip(positions, found, strict=True))
            if number not in work.assigned and copy.is_alive and (group := work.next_for(number)):
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
        self._left: deque[int] = deque()
        """The positions that this process has left of its group."""
        self._may_share = False
        """True if copies may process them too."""
        self._taken, self._since_s = 0, 0.0
        self._lock = threading.Lock()  # of groups and `_left`, for the thread that feeds copies

    @property
    def has_more(self) -> bool:
        """Return whether there is work that a copy may do."""
        return any(key is not None for key, _ in self.groups) or (self._may_share and bool(self._left))

    def next_here(self) -> int | None:
        """Return the next position for this process; None if there is none."""
        with self._lock:
            if not self._left:
                self._left = deque(self._next_group(_HERE))
                self._taken, self._since_s = len(self._left), time.monotonic()
            return self._left.popleft() if self._left else None

    def next_for(self, copy: int) -> list[int]:
        """Return the next positions for `copy`; nothing if there are none."""
        with self._lock:
            return self._next_group(copy) or self._shared()

    def give_back(self, positions: list[int]) -> None:
        """Return positions that a copy has not processed: this process does."""
        with self._lock:
            self.groups.appendleft((None, positions))

    def _next_group(self, process: int) -> list[int]:
        """Return the next group for `process`, empty if there is none.

        Preferably one that it had before, then a new one, then another's (rule 1).
        """
        allowed = [each for each in self.groups if each[0] is not None or process == _HERE]
        if not allowed:
            return []
        chosen = min(allowed, key=lambda each: self._foreign(each[0], process))
        self.groups.remove(chosen)
        self._homes.setdefault(chosen[0], process)
        if process == _HERE:
            self._may_share = chosen[0] is not None
        return chosen[1]

    def _shared(self) -> list[int]:
        """Return the later half of `_left` for a copy; nothing if it takes little time or must stay here."""
        begun, took_s = self._taken - len(self._left), time.monotonic() - self._since_s
        if not self._may_share or took_s * len(self._left) < _SHARED_S * begun:
            return []
        given = [self._left.pop() for _ in range((len(self._left) + 1) // 2)]
        self._taken -= len(given)
        return given[::-1]

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
