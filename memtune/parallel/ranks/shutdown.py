"""Process exit that waits until gloo's threads have freed the tensors of the last collectives.

gloo's thread wakes the rank that waits for a collective before it frees the collective's tensors. If the
interpreter ends in between, the thread waits for the GIL to free a tensor that Python has seen, is terminated
for that, and the process dies of "terminate called without an active exception" after all its work is done
(pytorch issue 190489, pull request 179291). `destroy_process_group` joins the threads only if it holds the
last reference to the group; FSDP2's and DDP's own caches hold others.
"""

from __future__ import annotations

import atexit
import time
from pathlib import Path

_THREAD = "(pt_gloo_runloop"
_LONGEST_S, _BETWEEN_S, _QUIET = 2.0, 0.001, 3


def drain_at_exit() -> None:
    """Register `wait` to run when this process ends, before the interpreter is finalized."""
    atexit.unregister(wait)  # once, however often a process calls `memtune.apply`
    atexit.register(wait)


def wait() -> None:
    """Return when gloo's threads have been seen asleep several times in a row, after at most two seconds."""
    # Between two polls this thread releases the GIL, so a sleeping thread has no tensor left to free.
    stop_s, quiet = time.monotonic() + _LONGEST_S, 0
    while (states := _states()) and quiet < _QUIET and time.monotonic() < stop_s:
        quiet = quiet + 1 if set(states) == {"S"} else 0
        time.sleep(_BETWEEN_S)


def _states() -> list[str]:
    """Return the Linux state of each of gloo's threads: `S` asleep, `R` running; empty on other systems."""
    found = []
    for task in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = task.read_text().rpartition(") ")
        except OSError:  # a thread that has ended meanwhile
            continue
        if name.endswith(_THREAD):
            found.append(rest[0])
    return found
