"""The link's token between real processes: one copy at a time, first come first served, dead waiters are
removed.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import resource
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memtune.errors import ApplyError
from memtune.offload.parameters.link_token import _ROW, LinkToken, _at

FORK = multiprocessing.get_context("fork")
"""Forked: a child only holds the token."""
PIECE_BYTES = 256 * 1024


@pytest.fixture
def path() -> Iterator[Path]:
    made = LinkToken.create(3)
    yield made
    made.unlink()


def acquires_repeatedly(path: Path, place: int, count: int, results: Any, lease_s: float = 5.0) -> None:
    """Hold the token `count` times; report the begin, end and drawn number of each time."""
    token, found = LinkToken(path, place, 3, lease_s), []
    for _ in range(count):
        with token.exclusive() as number:
            began = time.monotonic()
            time.sleep(0.002)
            found.append((began, time.monotonic(), number, place))
    results.put(found)


def holds_forever(path: Path, place: int, ready: Any, lease_s: float = 5.0) -> None:
    """Hold the token without end."""
    with LinkToken(path, place, 3, lease_s).exclusive():
        ready.set()
        time.sleep(600)


def test_token_is_exclusive_and_first_come_first_served(path: Path) -> None:
    """The token's holder is alone, and holds follow the numbers drawn (`orchestrated: {mode: token}`)."""
    results = FORK.Queue()
    children = [
        FORK.Process(target=acquires_repeatedly, args=(path, place, 12, results)) for place in range(3)
    ]
    for child in children:
        child.start()
    turns = sorted(turn for _ in children for turn in results.get(timeout=30))
    for child in children:
        child.join()
    assert len(turns) == 36
    assert all(end <= began for (_, end, _, _), (began, _, _, _) in itertools.pairwise(turns))
    assert [number for _, _, number, _ in turns] == list(range(1, 37))


def reports_place(path: Path, place: int, order: Any) -> None:
    """Report this place while holding the token."""
    with LinkToken(path, place, 3).exclusive():
        order.put(place)


def wait_for_request(token: LinkToken, place: int) -> None:
    """Wait until `place` has drawn a number."""
    while not _ROW.unpack_from(token._map, _at(place))[0]:
        time.sleep(0.001)


@pytest.mark.parametrize("requests", [(1, 2), (2, 1)])
def test_waiters_get_the_token_in_the_order_of_their_requests(path: Path, requests: tuple[int, int]) -> None:
    """A rank that asks again is served after those that waited before it."""
    order, token = FORK.SimpleQueue(), LinkToken(path, 0, 3)
    children = [FORK.Process(target=reports_place, args=(path, place, order)) for place in requests]
    with token.exclusive():
        for child, place in zip(children, requests, strict=True):
            child.start()
            wait_for_request(token, place)
    with token.exclusive():
        assert not order.empty()
        assert (order.get(), order.get()) == requests
    for child in children:
        child.join()


def sends_pieces(path: Path, place: int, link: int, start: Any, with_token: bool) -> None:
    """Send 12 pieces of 256 KiB over the pipe `link`; their bytes are the drawn number, else the place."""
    token = LinkToken(path, place, 3)
    start.wait()
    for _ in range(12):
        with token.exclusive() if with_token else contextlib.nullcontext(place) as value:
            rest = memoryview(bytes([value]) * PIECE_BYTES)
            while rest:
                rest = rest[os.write(link, rest) :]


def sent_over_one_link(path: Path, *, with_token: bool) -> list[tuple[int, int]]:
    """Return the (value, bytes) of each run of equal bytes that three processes send over one pipe."""
    reading, writing = os.pipe()
    start = FORK.Barrier(3)
    children = [
        FORK.Process(target=sends_pieces, args=(path, place, writing, start, with_token))
        for place in range(3)
    ]
    for child in children:
        child.start()
    os.close(writing)
    received = bytearray()
    while part := os.read(reading, 4096):
        received += part
    os.close(reading)
    for child in children:
        child.join()
    return [(value, len(list(run))) for value, run in itertools.groupby(received)]


def test_transfers_over_one_link_are_whole_and_in_the_order_of_requests_under_the_token(path: Path) -> None:
    """Real transfers of three processes: without the token they cut one another."""
    contended, sent = (sent_over_one_link(path, with_token=with_token) for with_token in (False, True))
    assert any(n_bytes % PIECE_BYTES for _, n_bytes in contended)
    assert sent == [(number, PIECE_BYTES) for number in range(1, 37)]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_token_passes_over_a_killed_or_stopped_holder(path: Path, how: signal.Signals) -> None:
    """A killed holder loses the token at once, a stopped one after its lease."""
    ready = FORK.Event()
    lease_s = 600.0 if how == signal.SIGKILL else 0.3
    holder = FORK.Process(target=holds_forever, args=(path, 0, ready, lease_s))
    began = time.monotonic()
    holder.start()
    assert ready.wait(30)
    assert holder.pid is not None
    os.kill(holder.pid, how)
    if how == signal.SIGKILL:
        holder.join()
    token = LinkToken(path, 1, 3)
    with token.exclusive():
        ended = time.monotonic()
    os.kill(holder.pid, signal.SIGKILL) if how == signal.SIGSTOP else None
    holder.join()
    assert ended - began < 60
    if how == signal.SIGSTOP:
        assert ended - began > lease_s
    with token.exclusive():
        pass


def test_token_removes_a_killed_waiter(path: Path) -> None:
    results, token = FORK.Queue(), LinkToken(path, 1, 3)
    with token.exclusive():
        waiter = FORK.Process(target=acquires_repeatedly, args=(path, 0, 1, results))
        waiter.start()
        wait_for_request(token, 0)
        waiter.kill()
        waiter.join()
    with token.exclusive():  # otherwise this waits forever
        pass
    assert token.times_held == 2


def test_token_is_released_after_an_error(path: Path) -> None:
    one, other = LinkToken(path, 0, 3), LinkToken(path, 1, 3)
    with pytest.raises(KeyError), one.exclusive():
        raise KeyError
    with other.exclusive():
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
