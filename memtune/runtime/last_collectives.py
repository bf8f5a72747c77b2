"""At the end of a process gloo's threads are let finish with the tensors of the last collectives.

gloo's thread wakes who waits for a collective before it lets go of the collective's tensors. If the interpreter ends in between,
the thread asks for its lock to free a tensor that Python has seen, is ended for that, and the process dies of "terminate called
without an active exception" after all its work is done (pytorch issue 190489, pull request 179291). `destroy_process_group` joins
the threads only if nothing else holds the group; FSDP2's and DDP's own caches do.
"""

from __future__ import annotations

import atexit
import time
from pathlib import Path

_THREAD = "(pt_gloo_runloop"
_LONGEST_S, _BETWEEN_S, _QUIET = 2.0, 0.001, 3


def let_go_at_exit() -> None:
    """Wait at the end of this process, before the interpreter is taken down, until gloo's threads sleep."""
    atexit.unregister(wait)  # once, however often a process calls `memtune.apply`
    atexit.register(wait)


def wait() -> None:
    """Return when gloo's threads have been seen asleep several times in a row, at most two seconds later.

    Between two looks the interpreter's lock is free, so a thread that sleeps has no tensor left to let go of.
    """
    stop_s, quiet = time.monotonic() + _LONGEST_S, 0
    while (states := _states()) and quiet < _QUIET and time.monotonic() < stop_s:
        quiet = quiet + 1 if set(states) == {"S"} else 0
        time.sleep(_BETWEEN_S)


def _states() -> list[str]:
    """What Linux says of each of gloo's threads: `S` asleep, `R` running; elsewhere nothing."""
    found = []
    for task in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = task.read_text().rpartition(") ")
        except OSError:  # a thread that has ended meanwhile
            continue
        if name.endswith(_THREAD):
            found.append(rest[0])
    return found
