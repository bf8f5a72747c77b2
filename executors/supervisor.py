"""The process above the ranks of one trial.

It imports only the standard library and leaves no process behind.

Run as `python -I -S supervisor.py`, it talks JSON lines. Standard input: first the spec, then orders.
Standard output: events.

    spec    {"ranks": [{"rank": 0, "argv": […], "env": {…}, "log": path}], "scratch": dir, "cores": [0, 1]}
    order   {"dump": bool, "grace_s": seconds}          stop: dump stacks if asked, TERM, KILL after the grace
    event   {"rank": 0, "line": text, "at": seconds since the epoch} · {"leftovers": [text]}
            · {"rank": 0, "exit": code, "tail": text, "host_oom": bool}

Rules:

1. End of file on standard input, or another parent, means that the driver is gone: all descendants are killed
  at once.
2. As child subreaper the supervisor adopts every orphan below it, however often it forked or changed its
  session. So "no child is left" means that no process of the trial is left, and only then does the supervisor
  end.
3. The exit of a rank is reported after all of its lines, and exits are polled before lines are read: a rank's
  death is known before the errors that it causes in others.
4. A rank dies with the supervisor (parent-death signal); processes that a rank started are then found by the
  marker in their environment, by the process that started the supervisor.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
HOUSEKEEPING_S = 0.5
DUMP_S = 1.0  # what a rank gets to write its stacks
LEFTOVER_S = 1.0  # what helpers of a rank that ended well get to end by themselves
LOG_LIMIT_BYTES, LOG_KEPT_BYTES, LINE_LIMIT_BYTES = 64 << 20, 1 << 20, 16 << 20
REPORT_FD = "MEMTUNE_REPORT_FD"
LOW_MEMORY = 0.03  # of the host's memory; less than this is left when user-space memory guards begin to kill
_libc = ctypes.CDLL(None)

Start = Callable[[dict[str, Any], int], None]
"""Runs a rank's program in a new process, from its entry of the spec and the descriptor for its reports."""


def tail(path: str, n_bytes: int = 8192) -> str:
    """Return the last `n_bytes` of a log as text, empty if there is none."""
    try:
        with open(path, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - n_bytes))
            return log.read().decode(errors="replace")
    except OSError:
        return ""


def trim(path: str) -> None:
    """Truncate a log over the limit to its end; its writers append, so they continue after it."""
    with contextlib.suppress(OSError):
        if os.path.getsize(path) > LOG_LIMIT_BYTES:
            kept = tail(path, LOG_KEPT_BYTES)
            os.truncate(path, 0)
            with open(path, "a", errors="replace") as log:
                log.write(f"[memtune: cut at {LOG_LIMIT_BYTES >> 20} MiB; what follows is the end]\n{kept}")


def _numbers(path: str) -> dict[str, int]:
    with contextlib.suppress(OSError), open(path) as lines:
        words = (line.split() for line in lines)
        return {word[0].rstrip(":"): int(word[1]) for word in words if len(word) > 1 and word[1].isdigit()}
    return {}


def oom_kills() -> int:
    """Return the number of out-of-memory kills of the kernel since boot, in all control groups."""
    return _numbers("/proc/vmstat").get("oom_kill", 0)


def free_memory() -> float:
    """Return the share of the host's memory that is available, 1 if unknown."""
    memory = _numbers("/proc/meminfo")
    return memory["MemAvailable"] / memory["MemTotal"] if "MemAvailable" in memory else 1.0


def processes() -> Iterator[tuple[int, int, str]]:
    """Yield (pid, parent's pid, name) of every process that is not a zombie."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", errors="replace") as stat:
                head, _, rest = stat.read().rpartition(")")
                state, parent = rest.split()[:2]
                if state not in "ZX":
                    yield int(entry), int(parent), head.partition("(")[2]


def descendants(root: int) -> dict[int, str]:
    """Return name by pid of all descendants of `root`."""
    children: dict[int, list[tuple[int, str]]] = {}
    for pid, parent, name in processes():
        children.setdefault(parent, []).append((pid, name))
    found: dict[int, str] = {}
    todo = [root]
    while todo:
        for pid, name in children.get(todo.pop(), []):
            found[pid] = name
            todo.append(pid)
    return found


def marked(marker: str) -> list[int]:
    """Return pids of other processes started with `marker` (`NAME=value`) in their environment."""
    found = []
    for pid, _, _ in processes():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environ:
            if pid != os.getpid() and marker.encode() in environ.read().split(b"\0"):
                found.append(pid)
    return found


def send(pids: list[int], number: int) -> None:
    """Signal each process that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_marked(marker: str) -> None:
    """Kill processes that carry `marker` until there are none, for at most 5 s."""
    # Again and again: a process may have been forked after its parent was listed.
    stop = time.monotonic() + 5.0
    while (pids := marked(marker)) and time.monotonic() < stop:
        send(pids, signal.SIGKILL)
        time.sleep(0.02)


@dataclass
class Rank:
    """One rank: its spec entry, and the pipe of its reports."""

    number: int
    log: str
    reports: int
    buffer: bytearray = field(default_factory=bytearray)


def execute(spec: dict[str, Any], report_end: int) -> None:
    """Execute the program of a rank in this process."""
    os.set_inheritable(report_end, True)
    os.execvpe(spec["argv"][0], spec["argv"], {**spec["env"], REPORT_FD: str(report_end)})


def spawn(spec: dict[str, Any], supervisor: int, start: Start) -> tuple[int, Rank]:
    """Start one rank with `start` in its own session; reports go to the descriptor in MEMTUNE_REPORT_FD."""
    reports, report_end = os.pipe()
    os.set_blocking(reports, False)
    log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    pid = os.fork()
    if pid:
        os.close(report_end)
        os.close(log)
        return pid, Rank(spec["rank"], spec["log"], reports)
    try:
        os.setsid()
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # Rule 4
        if os.getppid() != supervisor:
            os._exit(0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        # Asked for stacks, a rank ends by SIGABRT: no core file the size of its memory for that.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        # Should the host run out of memory, then a rank goes before the driver; Ray has set more than this
        # already.
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+") as score:
            if int(score.read()) < 500:
                score.write("500")
        start(spec, report_end)
    except BaseException as error:
        os.write(2, f"cannot start {spec['argv'][0]}: {error}\n".encode())
    os._exit(127)


class Supervisor:
    """Starts the ranks, relays their reports, and ends when it has no descendants."""

    def __init__(self, spec: dict[str, Any], driver: int, orders: bytearray, start: Start) -> None:
        self.driver = driver
        self.escalation: list[tuple[float, Callable[[], None]]] = []
        self.killing = False
        self.driver_gone = False
        self.orders = orders
        self.oom_kills, self.least_free = oom_kills(), 1.0
        self.next_housekeeping = 0.0
        self.poll = select.poll()
        self.wake, wake_end = os.pipe()
        for end in (self.wake, wake_end):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_end)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self.kill())
        self.poll.register(self.wake, select.POLLIN)
        self.poll.register(0, select.POLLIN)
        self.ranks: dict[int, Rank] = {}
        for each in spec["ranks"]:
            pid, rank = spawn(each, os.getpid(), start)
            self.ranks[pid] = rank
            self.poll.register(rank.reports, select.POLLIN)

    def run(self) -> None:
        """Serve until no descendant is left."""
        while self.reap():
            now = time.monotonic()
            if not self.ranks and not self.escalation and not self.killing:
                self.escalation = [(now + LEFTOVER_S, self.kill_leftovers)]
            while self.escalation and self.escalation[0][0] <= now:
                self.escalation.pop(0)[1]()
            if self.killing:
                send(list(descendants(os.getpid())), signal.SIGKILL)
            if now >= self.next_housekeeping:
                self.keep_house(now)
            due = self.escalation[0][0] - now if self.escalation else HOUSEKEEPING_S
            self.serve(0.02 if self.killing else min(max(due, 0.0), HOUSEKEEPING_S))

    def serve(self, timeout_s: float) -> None:
        """Wait for input, reap (rule 3), then read."""
        ready = {fd for fd, _ in self.poll.poll(timeout_s * 1000 + 1)}
        if self.wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self.wake, 4096)
            self.reap()
        if 0 in ready:
            self.obey()
        for rank in list(self.ranks.values()):
            if rank.reports in ready:
                self.relay(rank)

    def reap(self) -> bool:
        """Reap ended children; return False when none is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if rank := self.ranks.pop(pid, None):
                self.tell_exit(rank, os.waitstatus_to_exitcode(status))

    def tell_exit(self, rank: Rank, code: int) -> None:
        """Report the exit of a rank, after the rest of its lines."""
        while self.relay(rank):
            pass
        with contextlib.suppress(KeyError):
            self.poll.unregister(rank.reports)
        os.close(rank.reports)
        starved = oom_kills() > self.oom_kills or self.least_free < LOW_MEMORY
        host_oom = code == -signal.SIGKILL and not self.killing and starved
        self.tell({"rank": rank.number, "exit": code, "tail": tail(rank.log), "host_oom": host_oom})

    def relay(self, rank: Rank) -> bool:
        """Relay the complete lines that a rank has reported; return False if there was nothing to read."""
        try:
            data = os.read(rank.reports, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            with contextlib.suppress(KeyError):
                self.poll.unregister(rank.reports)
            return False
        rank.buffer += data
        *lines, rest = rank.buffer.split(b"\n")
        rank.buffer = rest if len(rest) < LINE_LIMIT_BYTES else bytearray()
        for line in lines:
            self.tell({"rank": rank.number, "line": line.decode(errors="replace"), "at": time.time()})
        return True

    def obey(self) -> None:
        """Execute an order of the driver; end of file is the last one (rule 1)."""
        data = os.read(0, 1 << 16)
        if not data:
            self.lose_driver()
        self.orders += data
        *lines, self.orders = self.orders.split(b"\n")
        for line in lines:
            self.stop(**json.loads(line))

    def stop(self, dump: bool, grace_s: float) -> None:
        """End all descendants, with TERM first."""
        now, term_s = time.monotonic(), DUMP_S if dump else 0.0
        if dump:
            # Ranks run with PYTHONFAULTHANDLER, so SIGABRT writes the stacks of all threads, even of one
            # stuck in native code.
            send(list(self.ranks), signal.SIGABRT)
            send(list(self.ranks), signal.SIGCONT)
        self.escalation = [(now + term_s, self.terminate), (now + term_s + grace_s, self.kill)]

    def terminate(self) -> None:
        """Ask all descendants to end."""
        send(list(descendants(os.getpid())), signal.SIGTERM)

    def kill(self) -> None:
        """Kill all descendants, repeatedly until none is left."""
        self.killing = True

    def kill_leftovers(self) -> None:
        """Report and kill processes that outlived the ranks."""
        left = [f"{name} (pid {pid})" for pid, name in descendants(os.getpid()).items()]
        if left:
            self.tell({"leftovers": left})
        self.kill()

    def keep_house(self, now: float) -> None:
        """Check the driver, the memory of the host and the size of the logs, once in a while."""
        self.next_housekeeping = now + HOUSEKEEPING_S
        self.least_free = min(self.least_free, free_memory())
        if os.getppid() != self.driver:
            self.lose_driver()
        for rank in self.ranks.values():
            trim(rank.log)

    def tell(self, event: dict[str, Any]) -> None:
        """Write one event to the driver."""
        data = memoryview(json.dumps(event).encode() + b"\n")
        try:
            while data and not self.driver_gone:
                data = data[os.write(1, data) :]
        except BrokenPipeError:
            self.lose_driver()

    def lose_driver(self) -> None:
        """Kill everything: the driver is gone."""
        with contextlib.suppress(KeyError):
            self.poll.unregister(0)
        self.driver_gone = True
        self.kill()


def main(start: Start = execute) -> None:
    """Read the spec, start the ranks, watch them, clean up."""
    driver = os.getppid()
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # Rule 2
    first = bytearray()
    while b"\n" not in first:
        data = os.read(0, 1 << 16)
        if not data:
            return
        first += data
    line, _, orders = first.partition(b"\n")
    spec = json.loads(line)
    if spec.get("cores"):
        with contextlib.suppress(OSError):  # cores were taken from this process' group meanwhile
            os.sched_setaffinity(0, spec["cores"])  # ranks inherit it
    try:
        Supervisor(spec, driver, orders, start).run()
    finally:
        shutil.rmtree(spec["scratch"], ignore_errors=True)


if __name__ == "__main__":
    main()
