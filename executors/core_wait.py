"""Time that processes waited for a core, so that a limit counts the work of a process and not other load."""

from __future__ import annotations

import contextlib

from memtune.executors.supervisor import descendants


def core_wait_s(root: int) -> float:
    """Return the longest time for which `root` or a descendant was ready to run without a core, in seconds.

    The kernel counts it for the main thread of each process. 0 if it does not tell.
    """
    waits_s = [0.0]
    for pid in (root, *descendants(root)):
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/schedstat") as stat:
            # schedstat: time on a core, time waiting for one, number of turns.
            waits_s.append(int(stat.read().split()[1]) / 1e9)
    return max(waits_s)
