"""The link's token between real processes: one copy at a time, first come first served, dead waiters are
removed.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import pytest

from memtune.offload.parameters.link_token import LinkToken

SPAWN: BaseContext = multiprocessing.get_context("fork")
"""Forked: a child only holds the token."""


@pytest.fixture
def path() -> Iterator[Path]:
    made = LinkToken.create(3)
    yield made
    made.unlink()


def takes_turns(path: Path, place: int, count: int, results: Any, lease_s: float = 5.0) -> None:
    """`count` turns; when each began and ended, and the number that was drawn for it."""
    token, found = LinkToken(path, place, 3, lease_s), []
    for _ in range(count):
        with token.turn() as number:
            began = time.monotonic()
            time.sleep(0.002)
            found.append((began, time.monotonic(), number, place))
    results.put(found)


def holds_on(path: Path, place: int, ready: Any, lease_s: float = 5.0) -> None:
    """Hold the token without end."""
    with LinkToken(path, place, 3, lease_s).turn():
        ready.set()
        time.sleep(600)


def test_one_copy_at_a_time_and_in_turn(path: Path) -> None:
    """The mechanism of `orchestrated: {mode: token}`: who holds the token is alone, and turns are first come,
    first served.
    """
    results = SPAWN.Queue()  # type: ignore[attr-defined]
    children = [SPAWN.Process(target=takes_turns, args=(path, place, 12, results)) for place in range(3)]  # type: ignore[attr-defined]
    for child in children:
        child.start()
    turns = sorted(turn for _ in children for turn in results.get(timeout=30))
    for child in children:
        child.join()
    assert len(turns) == 36
    assert all(end <= began for (_, end, _, _), (began, _, _, _) in itertools.pairwise(turns))
    assert [number for _, _, number, _ in turns] == list(range(1, 37))
    order = [place for *_, place in turns]
    first = max(
        order.index(place) for place in range(3)
    )  # from here to the end of the first, all want a turn at all times
    last = min(len(order) - order[::-1].index(place) for place in range(3))
    for start in range(first, last - 3):
        assert len(set(order[start : start + 3])) == 3 or len(set(order[start : start + 4])) == 3


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_holder_that_is_killed_or_stopped_is_passed_over(path: Path, how: signal.Signals) -> None:
    """A killed one at once, not after its lease; a stopped one after its lease, not when it goes on."""
    ready = SPAWN.Event()
    lease_s = 600.0 if how == signal.SIGKILL else 0.3
    holder = SPAWN.Process(target=holds_on, args=(path, 0, ready, lease_s))  # type: ignore[attr-defined]
    began = time.monotonic()
    holder.start()
    assert ready.wait(30)
    assert holder.pid is not None
    os.kill(holder.pid, how)
    if how == signal.SIGKILL:
        holder.join()
    token = LinkToken(path, 1, 3)
    with token.turn():
        ended = time.monotonic()
    os.kill(holder.pid, signal.SIGKILL) if how == signal.SIGSTOP else None
    holder.join()
    assert ended - began < 60
    if how == signal.SIGSTOP:
        assert ended - began > lease_s
    with token.turn():
        pass


def test_a_waiter_that_is_killed_is_struck_off(path: Path) -> None:
    results, token = SPAWN.Queue(), LinkToken(path, 1, 3)  # type: ignore[attr-defined]
    with token.turn():
        waiter = SPAWN.Process(target=takes_turns, args=(path, 0, 1, results))  # type: ignore[attr-defined]
        waiter.start()
        time.sleep(0.2)  # it has drawn its number
        waiter.kill()
        waiter.join()
    with token.turn():  # else it waits for good
        pass
    assert token.turns == 2


def test_a_turn_ends_with_an_error_inside_it(path: Path) -> None:
    one, other = LinkToken(path, 0, 3), LinkToken(path, 1, 3)
    with pytest.raises(KeyError), one.turn():
        raise KeyError
    with other.turn():
        pass
