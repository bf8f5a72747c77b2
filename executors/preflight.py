"""Probe `model.py` in a child process, so that a file that trains, exits or crashes does no harm.

Rules, for parent and child:

1. The child answers once, with one JSON line on its own pipe; standard output and error belong to the user's
  code.
2. In all cases (answer, exit, crash, deadline, Ctrl-C), the parent kills the child's whole process group and
  reaps it.
3. The child loads torch only if the user's file does, or if batches are requested.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from memtune.errors import WorkloadError
from memtune.executors.core_wait import core_wait_s
from memtune.executors.secret_values import masked
from memtune.garbage import no_collections
from memtune.workload import OPTIONAL, REQUIRED, load_user_file, split_target

_GUARD = 'move the loop under  if __name__ == "__main__":'
_LEAST_WAIT_S = 0.1
_TRACE_WAIT_S = 0.5  # how long a hanging child may take to say where it hangs
_MOST_IMPORTS = 10
_MOST_OUTPUT_BYTES = 65536
"""Deadlines that a child inside an import may take: a cold disk loads large packages slowly."""
_STACK_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True)
class ProbeReport:
    """Contents of a usable `model.py`.

    Attributes:
        path: The file, absolute.
        source_sha256: Of the file's bytes.
        functions: Names found of model, batch, loss, optimizer and blocks.
        global_batch: Samples per optimizer step, or None if the file does not set it.
        imports_torch: Whether importing the file loaded torch.
        output: Text that the file printed, at most its last 2,000 characters.
        elapsed_s: Duration of the whole probe.
    """

    path: Path
    source_sha256: str
    functions: tuple[str, ...]
    global_batch: int | None
    imports_torch: bool
    output: str
    elapsed_s: float


def probe(target: str | Path, deadline_s: float = 60.0, *, batches: bool = False) -> ProbeReport:
    """Import `model.py` in a child process and check that it defines the functions that memtune needs.

    Args:
        target: `model.py` or `model.py:name`.
        deadline_s: Seconds after which the child is assumed to be training, and killed; `_MOST_IMPORTS`
            times as many if its stack shows that it is still importing another module.
        batches: Also make batches of 2 and 4 samples and check that the size is honoured.

    Raises:
        WorkloadError: The file cannot be used; or it was still running at the deadline, ended the process, or
            crashed it.
    """
    with probing(target, deadline_s, batches=batches) as begun:
        return begun.report()


@contextlib.contextmanager
def probing(target: str | Path, deadline_s: float = 60.0, *, batches: bool = False) -> Iterator[Probing]:
    """Probe in the background inside; at the end the child is gone, whether or not its report was read."""
    started = time.monotonic()
    path, _ = split_target(target)
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as trace:
        child, reading = _start_child(str(target), batches, output, trace)
        begun = Probing(path, deadline_s, started, child, reading, output, trace)
        try:
            yield begun
        finally:
            begun.end()


@dataclass
class Probing:
    """A running probe; it is ended once, after its report or when it is no longer needed."""

    path: Path
    deadline_s: float
    started: float
    child: subprocess.Popen[bytes]
    reading: int
    output: IO[bytes]
    trace: IO[bytes]

    def report(self) -> ProbeReport:
        """Wait for the report; raises as `probe` does."""
        answer, status = self._answer()
        if answer is None:
            raise _no_answer(self.path, status, self.deadline_s, _text(self.output), _text(self.trace))
        if "error" in answer:
            fields = answer["error"]
            if fields["code"] == "MT112":  # it ended by itself: its last line is the reason
                fields["evidence"] = "   ".join(
                    part for part in (fields["evidence"], _last_line(_text(self.output))) if part
                )
            raise WorkloadError(**fields)
        return ProbeReport(
            path=self.path,
            source_sha256=answer["source_sha256"],
            functions=tuple(answer["functions"]),
            global_batch=answer["global_batch"],
            imports_torch=answer["imports_torch"],
            output=_text(self.output)[-2000:],
            elapsed_s=time.monotonic() - self.started,
        )

    def end(self) -> None:
        """Close the pipe and kill the child's whole group (rule 2); may be called again."""
        if self.child.returncode is not None:
            return
        os.close(self.reading)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(
                self.child.pid, signal.SIGKILL
            )  # the child is not reaped yet, so the group is still its own
        self.child.wait()

    def _answer(self) -> tuple[dict[str, Any] | None, int | None]:
        """Return the child's answer, or None with its exit status (None if still running at the deadline)."""
        try:
            for count in range(1, _MOST_IMPORTS + 1):
                line = _read_line(self.reading, self.child.pid, self.started + count * self.deadline_s)
                ended = os.waitid(os.P_PID, self.child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
                if line or ended:
                    break
                self.trace.truncate(0)
                _ask_for_stack(self.child.pid, self.trace)
                if not _is_importing(_text(self.trace), self.path):
                    break
        finally:
            self.end()
        return (json.loads(line) if line else None), (self.child.returncode if ended else None)


def _start_child(
    target: str, batches: bool, output: IO[bytes], trace: IO[bytes]
) -> tuple[subprocess.Popen[bytes], int]:
    """Return the child, and the read end of the pipe for its answer."""
    reading, writing = os.pipe()
    root = str(
        Path(inspect.getfile(WorkloadError)).resolve().parents[1]
    )  # holds memtune, should it not be installed
    request = json.dumps(
        {"target": target, "batches": batches, "answer_fd": writing, "trace_fd": trace.fileno()}
    )
    program = (
        f"import sys; sys.path.append({root!r}); from memtune.executors.preflight import _child;"
        " _child(sys.argv.pop())"
    )
    try:
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", program, request],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(writing, trace.fileno()),
            start_new_session=True,
        )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return child, reading


def _read_line(fd: int, pid: int, deadline: float) -> bytes:
    """Return one line from `fd`.

    Empty if process `pid` ends or `deadline` (monotonic seconds) passes before it is complete. The deadline
    moves by the time for which the process waited for a core.
    """
    exit_fd = os.pidfd_open(
        pid
    )  # end of file on the pipe is no sign of exit: forked grandchildren hold it too
    line = b""
    try:
        while not line.endswith(b"\n"):
            left_s = deadline - time.monotonic()
            ready, _, _ = select.select([fd, exit_fd], [], [], max(0.0, left_s))
            # A busy machine is no sign that the file trains.
            if not ready and deadline + core_wait_s(pid) > time.monotonic() + _LEAST_WAIT_S:
                select.select([fd, exit_fd], [], [], _LEAST_WAIT_S)
                continue
            chunk = os.read(fd, 65536) if fd in ready else b""
            if not chunk and (exit_fd in ready or not ready):
                return b""
            if not chunk:  # the user's code closed the pipe: only the exit can follow
                select.select([exit_fd], [], [], max(0.0, deadline - time.monotonic()))
                return b""
            line += chunk
    finally:
        os.close(exit_fd)
    return line


def _ask_for_stack(pid: int, trace: IO[bytes]) -> None:
    """Make a hanging child dump its stack; a child that cannot costs half a second."""
    os.kill(pid, _STACK_SIGNAL)
    until = time.monotonic() + _TRACE_WAIT_S
    while time.monotonic() < until and os.fstat(trace.fileno()).st_size == 0:
        time.sleep(0.01)


def _is_importing(trace: str, path: Path) -> bool:
    """Return whether the innermost line of `path` in a stack, latest call first, is an import statement."""
    above, found, _ = trace.partition(f'File "{path}"')
    return bool(found) and "<frozen importlib._bootstrap" in above.rstrip().rpartition("\n")[2]


def _no_answer(path: Path, status: int | None, deadline_s: float, output: str, trace: str) -> WorkloadError:
    """Return the error for a child that ended, or was killed, without an answer."""
    frame = re.search(rf'File "{re.escape(str(path))}", line (\d+)', trace)
    where = f", line {frame[1]}" if frame else ""
    evidence = _last_line(output) or "It printed nothing."
    if status is None:
        what = f"{path.name} started training on import (still running after {deadline_s:g} s{where})."
        return WorkloadError(what, evidence=evidence, fix=_GUARD, code="MT103")
    if status < 0:
        what = f"{path.name} crashed the process on import{where}:  {_signal_name(-status)}."
        cause = "the machine out of memory" if status == -signal.SIGKILL else "a native library it loads"
        fix = f"run  python {path}  to see it happen; the usual cause is {cause}"
        return WorkloadError(what, evidence=evidence, fix=fix, code="MT113")
    what = f"{path.name} ended the process on import:  exit status {status}."
    return WorkloadError(
        what, evidence=evidence, fix=_GUARD.replace("the loop", "what runs and exits"), code="MT112"
    )


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return f'Last line: "{lines[-1][:200]}"' if lines else ""


def _signal_name(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} ({signal.strsignal(number)})"
    except ValueError:
        return f"signal {number}"


def _text(file: IO[bytes]) -> str:
    """Return the end of a child's output in `file`, which may be large."""
    size = os.fstat(file.fileno()).st_size
    return masked(
        os.pread(file.fileno(), _MOST_OUTPUT_BYTES, max(0, size - _MOST_OUTPUT_BYTES)).decode(
            errors="replace"
        )
    )


def _child(request_json: str) -> None:
    """Run as the child: probe the file, answer once, exit without the user's exit handlers."""
    request = json.loads(request_json)
    answer_fd: int = request["answer_fd"]
    # A program that the user's file executes must not hold the pipe open.
    os.set_inheritable(answer_fd, False)
    _prepare_child(request["trace_fd"])
    try:
        with no_collections():
            file = load_user_file(request["target"])
        answer: dict[str, Any] = {
            "source_sha256": file.source_sha256,
            "functions": [name for name in (*REQUIRED, *OPTIONAL) if file.function(name) is not None],
            "global_batch": file.global_batch,
            "imports_torch": "torch" in sys.modules,
        }
        if request["batches"]:
            from memtune.workload import Workload

            Workload.of(file).check_batch()
    except WorkloadError as error:
        fields = {"what": error.what, "evidence": error.evidence, "fix": error.fix, "code": error.code}
        answer = {"error": fields}
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(
            AttributeError, OSError, ValueError
        ):  # the user's code may have closed or replaced it
            stream.flush()
    os.write(answer_fd, json.dumps(answer).encode() + b"\n")
    os._exit(0)


def _prepare_child(trace_fd: int) -> None:
    """Make a crash or hang report its line, leave no core file, and let the child die with its parent."""
    import ctypes
    import faulthandler
    import resource

    faulthandler.enable(trace_fd, all_threads=False)
    faulthandler.register(_STACK_SIGNAL, trace_fd, all_threads=False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pr_set_pdeathsig = 1
    # Also if the parent is killed, which then cannot end it.
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
