"""A server process with torch imported, from which supervisors and ranks are forked.

Trials start without importing torch.

Rules:

1. A forked rank is as fresh as an executed one: it has run only imports, has the same environment, and runs
  the program as `__main__`. Libraries read variables while loading, so ranks whose environment differs from
  the server's in more than their place in the trial are executed instead. So are all ranks that may use a GPU
  driver.
2. The server answers one request, `the working directory`, with a forked supervisor, and never waits for it:
  it knows nothing of trials. End of file on its socket means that the driver is gone, during its imports as
  well, and when the server ends, its supervisors end (supervisor rule 1).
3. /proc shows the server's environment for a forked rank, so the trial's marker is missing there. Leftovers
  of a killed supervisor are the processes that carry the server's marker and are not its descendants.
4. A failure of the server costs time only: ranks are executed then.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, Any, Final

from memtune.executors import supervisor
from memtune.garbage import no_collections

MARKER: Final = "MEMTUNE_FORK_SERVER"
OF_ONE_RANK: Final = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MEMTUNE_RENDEZVOUS",
        "MEMTUNE_TRIAL_FILE",
        "MEMTUNE_GROUP",
        "MEMTUNE_OFFLOAD_DIR",
        "PYTEST_CURRENT_TEST",  # another one in each test that uses the same executor
    }
)
"""Variables that no library reads at import."""
READY_S, ANSWER_S, END_S = 120.0, 20.0, 5.0


class ForkedSupervisor:
    """A running supervisor, with the needed part of `subprocess.Popen`'s interface.

    Its exit status is unknown.
    """

    returncode: Final = None

    def __init__(self, stdin: IO[bytes], stdout: IO[bytes], pidfd: int, marker: str, server: int) -> None:
        self.stdin, self.stdout = stdin, stdout
        self._pidfd, self._marker, self._server = pidfd, marker, server

    @property
    def pid(self) -> int:
        """Return its pid, -1 if it has ended."""
        with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{self._pidfd}") as facts:
            return next((int(line.split()[1]) for line in facts if line.startswith("Pid:")), -1)
        return -1

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for its end, and kill its leftovers.

        Raises:
            subprocess.TimeoutExpired: It still runs.
        """
        if self._pidfd < 0:
            return
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(None if timeout_s is None else timeout_s * 1000):
            raise subprocess.TimeoutExpired("supervisor", timeout_s or 0.0)
        os.close(self._pidfd)
        self._pidfd = -1
        self._end_strays()

    def kill(self) -> None:
        """Kill it, but not its descendants."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _end_strays(self) -> None:
        """Kill its leftovers (rule 3)."""
        stop_s = time.monotonic() + END_S
        while time.monotonic() < stop_s:
            below = supervisor.descendants(self._server)
            strays = [
                pid for pid in supervisor.marked(self._marker) if pid not in below and pid != self._server
            ]
            if not strays:
                return
            supervisor.send(strays, signal.SIGKILL)
            time.sleep(0.02)


class ForkServer:
    """Starts the server when first needed, and again if it has ended; thread-safe.

    Args:
        preload: Module that ranks run, or that imports the same modules.
    """

    def __init__(self, preload: str = "memtune.executors.worker") -> None:
        self._preload = preload
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._shared: dict[str, str] = {}
        self._marker = ""
        self._failures = 0

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Return the server's pid, None if none runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def fork_supervisor(self, command: Sequence[str], env: Mapping[str, str]) -> ForkedSupervisor | None:
        """Return a supervisor whose ranks are forked; None if ranks must be executed (rules 1 and 4)."""
        # The server's libraries have read them at import, so the rank must have the same.
        shared = {name: value for name, value in env.items() if name not in OF_ONE_RANK}
        if module_of(command) is None:
            return None
        with self._lock:
            try:
                if self.pid is None and self._failures < 2:
                    self._end()
                    self._start(shared)
                return self._forked() if self.pid is not None and shared == self._shared else None
            except OSError:  # it ended, or did not answer in time
                self._failures += 1
                self._end()
                return None

    def close(self) -> None:
        """End the server and all its forks; may be called twice."""
        with self._lock:
            # From now on none is started, also by a thread that is in `fork_supervisor`.
            self._failures = 2
            self._end()

    def _start(self, shared: dict[str, str]) -> None:
        """Start the server process, and wait until it has imported."""
        self._marker, self._shared = f"{MARKER}={uuid.uuid4().hex}", shared
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "memtune.executors.fork_server",
                    str(theirs.fileno()),
                    self._preload,
                ],
                env={**shared, MARKER: self._marker.partition("=")[2]},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._socket.settimeout(READY_S)
        if not self._socket.recv(16):
            raise ConnectionError("it ended while it imported")
        self._socket.settimeout(ANSWER_S)

    def _forked(self) -> ForkedSupervisor:
        assert self._socket is not None
        assert self._process is not None
        (read_in, write_in), (read_out, write_out) = os.pipe(), os.pipe()
        try:
            socket.send_fds(self._socket, [os.getcwd().encode()], [read_in, write_out])
            _, pidfds, _, _ = socket.recv_fds(self._socket, 16, 1)
            if not pidfds:
                raise ConnectionError("it ended")
        except OSError:
            os.close(write_in)
            os.close(read_out)
            raise
        finally:
            os.close(read_in)
            os.close(write_out)
        stdin, stdout = os.fdopen(write_in, "wb"), os.fdopen(read_out, "rb")
        return ForkedSupervisor(stdin, stdout, pidfds[0], self._marker, self._process.pid)

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = self._socket = None


def module_of(command: Sequence[str]) -> str | None:
    """Return the module that `command` runs, if it is this Python with a safe path and a module."""
    python, *rest = command
    return rest[2] if python == sys.executable and rest[:2] == ["-P", "-m"] and len(rest) == 3 else None


# -- in the server -------------------------------------------------------------------------------------------


def serve(requests: socket.socket) -> None:
    """Fork a supervisor for every request until the driver is gone."""
    while True:
        try:
            folder, ends, _, _ = socket.recv_fds(requests, 1 << 16, 2)
        except ConnectionError:
            return
        if not folder:
            return
        pid = os.fork()
        if pid == 0:
            _run_supervisor(folder.decode(), *ends)
        for end in ends:
            os.close(end)
        # A pidfd, not the number, which the kernel may give to another process.
        pidfd = os.pidfd_open(pid)
        with contextlib.suppress(ConnectionError):
            socket.send_fds(requests, [b"supervisor"], [pidfd])
        os.close(pidfd)


def _run_supervisor(folder: str, stdin: int, stdout: int) -> None:
    try:
        os.setsid()
        os.chdir(folder)
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        # The server's socket among them: its end must be seen when the server alone has gone.
        os.closerange(3, _open_files())
        # The server ignores it, and the supervisor waits for its ranks.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        supervisor.main(run_here)
    finally:
        os._exit(0)


def run_here(spec: dict[str, Any], report_end: int) -> None:
    """Run in this process the program that a rank would execute; does not return."""
    env = {**spec["env"], MARKER: os.environ[MARKER], supervisor.REPORT_FD: str(report_end)}
    os.environ.clear()
    os.environ.update(env)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)  # as Python has them when it starts
    os.closerange(3, report_end)
    os.closerange(report_end + 1, _open_files())
    # As in a fresh process; Python's own generator is reseeded by os.fork.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    # The driver has checked the command. `sys.executable` of this process may spell the same path otherwise.
    module = spec["argv"][-1]
    sys.argv = [module]
    # Preloaded under its own name; as `__main__` it must run again.
    sys.modules.pop(module, None)
    code: Any = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(
            AttributeError, OSError, ValueError
        ):  # the user's code may have closed or replaced it
            stream.flush()
    # Without atexit handlers: those of the server's imports would run in every rank.
    os._exit(code or 0)


def _open_files() -> int:
    """Return one more than the highest descriptor in use."""
    return 1 + max(int(each) for each in os.listdir("/proc/self/fd"))


def _end_with_driver(requests: socket.socket) -> None:
    """Let the kernel end this process when the driver closes its socket: no import would notice."""
    # The first event on the socket sends SIGIO, which ends a process; the driver sends nothing before
    # `ready`.
    fcntl.fcntl(requests, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(requests, fcntl.F_SETFL, fcntl.fcntl(requests, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([requests], [], [], 0)[0]:  # the driver has ended before
        sys.exit()


def main() -> None:
    """Import, report readiness, serve."""
    _, descriptor, preload = sys.argv
    requests = socket.socket(fileno=int(descriptor))
    requests.set_inheritable(False)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps supervisors: no process waits for them
    _end_with_driver(requests)
    with no_collections():
        importlib.import_module(preload)
    fcntl.fcntl(requests, fcntl.F_SETFL, fcntl.fcntl(requests, fcntl.F_GETFL) & ~os.O_ASYNC)
    if "torch" in sys.modules:  # the first optimizer imports a third of torch
        torch = sys.modules["torch"]
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    requests.send(b"ready")
    serve(requests)


if __name__ == "__main__":
    main()
