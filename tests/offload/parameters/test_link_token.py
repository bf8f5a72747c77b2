"""The link's token between real processes: one copy at a time, first come first served, dead waiters are
removed.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import resource
import signal
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import pytest

from memtune.errors import ApplyError
from memtune.offload.parameters.link_token import LinkToken

SPAWN: BaseContext = multiprocessing.get_context("fork")
"""Forked: a child only holds the token."""


@pytest.fixture
def path() -> Iterator[Path]:
    made = LinkToken.create(3)
    yield made
    made.unlink()


def acquires_repeatedly(path: Path, place: int, count: int, results: Any, lease_s: float = 5.0) -> None:
    """Hold the token `count` times; report the begin, end and drawn number of each time."""
    token, found = LinkToken(path, place, 3, lease_s), []
    for _ in range(count):
        with token.hold() as number:
            began = time.monotonic()
            time.sleep(0.002)
            found.append((began, time.monotonic(), number, place))
    results.put(found)


def holds_forever(path: Path, place: int, ready: Any, lease_s: float = 5.0) -> None:
    """Hold the token without end."""
    with LinkToken(path, place, 3, lease_s).hold():
        ready.set()
        time.sleep(600)


def test_token_is_exclusive_and_first_come_first_served(path: Path) -> None:
    """The token's holder is alone, and ranks get the token first come, first served (`orchestrated: {mode:
    token}`).
    """
    results = SPAWN.Queue()  # type: ignore[attr-defined]
    children = [
        SPAWN.Process(target=acquires_repeatedly, args=(path, place, 12, results)) for place in range(3)
    ]  # type: ignore[attr-defined]
    for child in children:
        child.start()
    turns = sorted(turn for _ in children for turn in results.get(timeout=30))
    for child in children:
        child.join()
    assert len(turns) == 36
    assert all(end <= began for (_, end, _, _), (began, _, _, _) in itertools.pairwise(turns))
    assert [number for _, _, number, _ in turns] == list(range(1, 37))
    order = [place for *_, place in turns]
    # From here to the end of the first process, all want the token at all times.
    first = max(order.index(place) for place in range(3))
    last = min(len(order) - order[::-1].index(place) for place in range(3))
    for start in range(first, last - 3):
        assert len(set(order[start : start + 3])) == 3 or len(set(order[start : start + 4])) == 3


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_token_passes_over_a_killed_or_stopped_holder(path: Path, how: signal.Signals) -> None:
    """A killed holder loses the token at once, a stopped one after its lease."""
    ready = SPAWN.Event()
    lease_s = 600.0 if how == signal.SIGKILL else 0.3
    holder = SPAWN.Process(target=holds_forever, args=(path, 0, ready, lease_s))  # type: ignore[attr-defined]
    began = time.monotonic()
    holder.start()
    assert ready.wait(30)
    assert holder.pid is not None
    os.kill(holder.pid, how)
    if how == signal.SIGKILL:
        holder.join()
    token = LinkToken(path, 1, 3)
    with token.hold():
        ended = time.monotonic()
    os.kill(holder.pid, signal.SIGKILL) if how == signal.SIGSTOP else None
    holder.join()
    assert ended - began < 60
    if how == signal.SIGSTOP:
        assert ended - began > lease_s
    with token.hold():
        pass


def test_token_removes_a_killed_waiter(path: Path) -> None:
    results, token = SPAWN.Queue(), LinkToken(path, 1, 3)  # type: ignore[attr-defined]
    with token.hold():
        waiter = SPAWN.Process(target=acquires_repeatedly, args=(path, 0, 1, results))  # type: ignore[attr-defined]
        waiter.start()
        time.sleep(0.2)  # it has drawn its number
        waiter.kill()
        waiter.join()
    with token.hold():  # otherwise this waits forever
        pass
    assert token.times_held == 2


def test_token_is_released_after_an_error(path: Path) -> None:
    one, other = LinkToken(path, 0, 3), LinkToken(path, 1, 3)
    with pytest.raises(KeyError), one.hold():
        raise KeyError
    with other.hold():
        pass


def test_token_on_full_shared_memory_is_refused_without_a_rest() -> None:
    """A limit on the size of files makes the write fail as a full file system does."""
    folder = Path("/dev/shm") if os.path.isdir("/dev/shm") else Path(tempfile.gettempdir())
    before, limits = set(folder.glob("memtune-link-*")), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(ApplyError, match="MT363") as caught:
            LinkToken.create(3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "/dev/shm" in caught.value.fix
    assert set(folder.glob("memtune-link-*")) == before
