"""A token in shared memory for ranks behind one link to the host; a rank holds it while it copies one piece.

States of a rank:

    idle --draw a number--> waiting --lowest number of all living ranks--> holding --release or lease--> idle

- First come, first served. The state is in a file that all ranks map; every access is under the file's lock,
  which the kernel releases with the process.
- A waiter whose process has ended (by id and start time, since ids are reused) is removed by the next access.
  A living holder that exceeds the lease loses the token as well: two copies at a time are slower, not wrong.
- The token is never held across a collective, which could wait for a rank that waits for the token: it covers
  one piece of a copy, which needs no other rank.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from memtune.errors import ApplyError

LEASE_S = 5.0
"""A piece takes milliseconds, so a holder that exceeds this is stopped, not slow."""
_ROW = struct.Struct("qqqd")
"""Fields of a place: number drawn (0: none), process, its start time, end of its lease (0: it waits)."""
_NEXT = struct.Struct("q")
_POLL_S = (2e-5, 1e-3)


class LinkToken:
    """This rank's view of the token of one link.

    Args:
        path: The file that all ranks behind the link map, made by `create`.
        place: This rank's index among them, from 0.
        places: Number of ranks.
        lease_s: Time after which the others continue without a living holder.
    """

    def __init__(self, path: Path, place: int, places: int, lease_s: float = LEASE_S) -> None:
        self._place, self._places, self._lease_s = place, places, lease_s
        self._file = path.open("r+b", buffering=0)
        self._map = mmap.mmap(self._file.fileno(), _size(places))
        # `flock` belongs to the process's open file, so it does not exclude other threads of the process.
        self._thread_lock = threading.Lock()
        self.times_held, self.waited_s = 0, 0.0

    @staticmethod
    def create(places: int) -> Path:
        """Create a file for the token of `places` ranks, in memory if possible."""
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        name = ""
        try:
            handle, name = tempfile.mkstemp(prefix="memtune-link-", dir=folder)
            with os.fdopen(handle, "wb") as file:
                file.write(bytes(_size(places)))
        except OSError as error:
            if name:
                Path(name).unlink(missing_ok=True)
            raise ApplyError(
                "The ranks behind one link cannot share a token.",
                evidence=str(error),
                fix="make room in /dev/shm, or offload: {states: {kind: orchestrated, mode: disjoint}}",
                code="MT363",
            ) from error
        return Path(name)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[int]:
        """Return a context in which this rank alone uses the link; it yields the drawn number."""
        began = time.monotonic()
        # The rank's own threads exclude each other here; the file lock is the process's.
        with self._thread_lock:
            number = self._draw()
            pause = _POLL_S[0]
            while not self._is_mine(number):
                time.sleep(pause)
                # Polled, not signalled: a futex in shared memory would not survive the death of its holder.
                pause = min(2 * pause, _POLL_S[1])
            self.times_held += 1
            self.waited_s += time.monotonic() - began
            try:
                yield number
            finally:
                self._release(number)

    def close(self) -> None:
        """Close the shared memory."""
        self._map.close()
        self._file.close()

    def _draw(self) -> int:
        with self._locked():
            (last,) = _NEXT.unpack_from(self._map, 0)
            _NEXT.pack_into(self._map, 0, last + 1)
            self._write(self._place, last + 1, 0.0)
            return int(last + 1)

    def _is_mine(self, number: int) -> bool:
        with self._locked():
            now = time.monotonic()
            waiting = []
            for place in range(self._places):
                drawn, process, started, until = _ROW.unpack_from(self._map, _at(place))
                if not drawn:
                    continue
                # A dead process, or a living one whose lease has run out, must not stop the others.
                if place != self._place and (_started(process) != started or 0 < until < now):
                    _ROW.pack_into(self._map, _at(place), 0, 0, 0, 0.0)
                    continue
                waiting.append(drawn)
            if min(waiting) != number:
                return False
            # The lease begins when the token is taken, not when it was asked for.
            self._write(self._place, number, now + self._lease_s)
            return True

    def _release(self, number: int) -> None:
        with self._locked():
            # Another rank may have removed this one after its lease, and this rank may have drawn again.
            if _ROW.unpack_from(self._map, _at(self._place))[0] == number:
                _ROW.pack_into(self._map, _at(self._place), 0, 0, 0, 0.0)

    def _write(self, place: int, number: int, until_s: float) -> None:
        _ROW.pack_into(self._map, _at(place), number, os.getpid(), _started(os.getpid()), until_s)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


def _size(places: int) -> int:
    return _at(places)


def _at(place: int) -> int:
    return _NEXT.size + place * _ROW.size


def _started(process: int) -> int:
    """Return a process's start in ticks since boot; -1 if it has ended, 0 if alive but not known."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        if os.path.isdir("/proc/self"):
            return -1
        return _alive(process)
    fields = text.rpartition(")")[2].split()
    # A zombie holds no link. Field 22 of /proc/PID/stat is the start time; the name before it may contain
    # spaces.
    return -1 if fields[0] in "ZX" else int(fields[19])


def _alive(process: int) -> int:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return -1
    except PermissionError:
        return 0
    return 0
