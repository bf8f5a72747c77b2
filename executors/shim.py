"""The thin process above the ranks of one trial; it imports only the standard library and leaves nothing behind.

Run as `python -I -S shim.py`, it talks JSON lines. Standard input: first the spec, then orders. Standard output: events.

    spec    {"ranks": [{"rank": 0, "argv": […], "env": {…}, "log": path}], "scratch": dir}
    order   {"dump": bool, "grace_s": seconds}          stop: stacks first if asked, TERM, KILL after the grace
    event   {"rank": 0, "line": text, "at": seconds since the epoch} · {"leftovers": [text]}
            · {"rank": 0, "exit": code, "tail": text, "host_oom": bool}

Rules:
1. End of file on standard input, or another parent, means that the driver is gone: everything below is killed at once.
2. As child subreaper the shim adopts every orphan below it, however often it forked or changed its session. So "no
   child is left" means that no process of the trial is left, and only then does the shim end.
3. The exit of a rank is told after all of its lines, and exits are looked for before lines are read: a rank that died
   is known before the errors that its death causes in others.
4. A rank dies with the shim (parent-death signal); what a rank started elsewhere is then found by the marker in its
   environment, by whoever started the shim.
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
"""Makes the process of a rank its program, from its entry of the spec and the descriptor that takes its reports."""


def tail(path: str, n_bytes: int = 8192) -> str:
    """The last `n_bytes` of a log as text, empty where there is none."""
    try:
        with open(path, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - n_bytes))
            return log.read().decode(errors="replace")
    except OSError:
        return ""


def trim(path: str) -> None:
    """Cut a log that grew over the limit to its end; its writers append, so they go on after the cut."""
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
    """How many processes the kernel has killed for lack of memory since the machine started, in all control groups."""
    return _numbers("/proc/vmstat").get("oom_kill", 0)


def free_memory() -> float:
    """Share of the host's memory that is available, 1 where it is not known."""
    memory = _numbers("/proc/meminfo")
    return memory["MemAvailable"] / memory["MemTotal"] if "MemAvailable" in memory else 1.0


def processes() -> Iterator[tuple[int, int, str]]:
    """(pid, parent's pid, name) of every process that is not a zombie."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", errors="replace") as stat:
                head, _, rest = stat.read().rpartition(")")
                state, parent = rest.split()[:2]
                if state not in "ZX":
                    yield int(entry), int(parent), head.partition("(")[2]


def descendants(root: int) -> dict[int, str]:
    """Name by pid of all processes below `root`."""
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
    """Pids of all processes, but this one, that were started with `marker` (`NAME=value`) in their environment."""
    found = []
    for pid, _, _ in processes():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environ:
            if pid != os.getpid() and marker.encode() in environ.read().split(b"\0"):
                found.append(pid)
    return found


def send(pids: list[int], number: int) -> None:
    """Signal each process that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_marked(marker: str, patience_s: float = 5.0) -> None:
    """Kill what carries `marker` until nothing does, for at most `patience_s`."""
    stop = time.monotonic() + patience_s
    while (pids := marked(marker)) and time.monotonic() < stop:
        send(pids, signal.SIGKILL)
        time.sleep(0.02)


@dataclass
class Rank:
    """One rank: what was asked for, and where its reports come in."""

    number: int
    log: str
    reports: int
    buffer: bytearray = field(default_factory=bytearray)


def execute(spec: dict[str, Any], report_end: int) -> None:
    """Become the program of a rank."""
    os.set_inheritable(report_end, True)
    os.execvpe(spec["argv"][0], spec["argv"], {**spec["env"], REPORT_FD: str(report_end)})


def spawn(spec: dict[str, Any], shim: int, start: Start) -> tuple[int, Rank]:
    """`start` one rank in a session of its own; its reports go to the descriptor named by MEMTUNE_REPORT_FD."""
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
        if os.getppid() != shim:
            os._exit(0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        # Asked for stacks, a rank ends by SIGABRT: no core file the size of its memory for that.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        # Should the host run out of memory, then a rank goes before the driver; Ray has set more than this already.
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+") as score:
            if int(score.read()) < 500:
                score.write("500")
        start(spec, report_end)
    except BaseException as error:
        os.write(2, f"cannot start {spec['argv'][0]}: {error}\n".encode())
    os._exit(127)


class Shim:
    """Starts the ranks, relays what they report, and ends when nothing below it is left."""

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
        """Serve until no process is left below."""
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
        """Wait for something to read, reap (Rule 3), then read."""
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
        """Collect what has ended; False when nothing is left below."""
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
        """Tell how a rank ended, after the rest of its lines."""
        while self.relay(rank):
            pass
        with contextlib.suppress(KeyError):
            self.poll.unregister(rank.reports)
        os.close(rank.reports)
        starved = oom_kills() > self.oom_kills or self.least_free < LOW_MEMORY
        host_oom = code == -signal.SIGKILL and not self.killing and starved
        self.tell({"rank": rank.number, "exit": code, "tail": tail(rank.log), "host_oom": host_oom})

    def relay(self, rank: Rank) -> bool:
        """Pass on the whole lines that a rank has reported; False when there was nothing to read."""
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
        """Follow an order of the driver; end of file is the last one (Rule 1)."""
        data = os.read(0, 1 << 16)
        if not data:
            self.lose_driver()
        self.orders += data
        *lines, self.orders = self.orders.split(b"\n")
        for line in lines:
            self.stop(**json.loads(line))

    def stop(self, dump: bool, grace_s: float) -> None:
        """End everything below, politely at first."""
        now, term_s = time.monotonic(), DUMP_S if dump else 0.0
        if dump:
            # Ranks run with PYTHONFAULTHANDLER, so SIGABRT writes the stacks of all threads, even of one stuck in native code.
            send(list(self.ranks), signal.SIGABRT)
            send(list(self.ranks), signal.SIGCONT)
        self.escalation = [(now + term_s, self.terminate), (now + term_s + grace_s, self.kill)]

    def terminate(self) -> None:
        """Ask all processes below to end."""
        send(list(descendants(os.getpid())), signal.SIGTERM)

    def kill(self) -> None:
        """Kill all processes below, again and again until none is left."""
        self.killing = True

    def kill_leftovers(self) -> None:
        """Report and kill what outlived the ranks."""
        left = [f"{name} (pid {pid})" for pid, name in descendants(os.getpid()).items()]
        if left:
            self.tell({"leftovers": left})
        self.kill()

    def keep_house(self, now: float) -> None:
        """What needs a look now and then: the driver, the memory of the host, the size of the logs."""
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
        """Kill everything: nobody is there to want it."""
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
    try:
        Shim(spec, driver, orders, start).run()
    finally:
        shutil.rmtree(spec["scratch"], ignore_errors=True)


if __name__ == "__main__":
    main()
