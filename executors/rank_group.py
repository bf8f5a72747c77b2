"""The ranks of one trial as processes of this machine, below one supervisor.

See `supervisor.py` for the protocol and its rules.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from memtune.errors import EnvironmentFault
from memtune.executors import supervisor
from memtune.executors.base import Progress, Trial, TrialResult
from memtune.executors.core_wait import core_wait_s
from memtune.executors.fork_server import ForkedSupervisor, ForkServer
from memtune.executors.merge_results import RankExit
from memtune.executors.monitor import SILENCE_S, Event, Leftovers, Line, RankLost, run_monitored
from memtune.executors.secret_values import mask_file, masked
from memtune.hardware import threads_per_rank, usable_cores
from memtune.ssd import offload_dir

WORKER: tuple[str, ...] = (sys.executable, "-P", "-m", "memtune.executors.worker")
"""Command of one rank. -P keeps a `random.py` in the user's directory from shadowing Python's."""
MARKER = "MEMTUNE_GROUP"
CLOSE_S = 10.0


@dataclass(frozen=True)
class Place:
    """The ranks of a trial on this machine, and their rendezvous.

    Args:
        ranks: Global ranks to start here, by local rank.
        rendezvous: URL at which all ranks meet (`file://…` or `tcp://…`); a fresh file when empty, for one
            machine.
        cores: Number of processor cores that the ranks here share.
        bound: Ids of these cores if the ranks may use no others; empty for any.
        env: Variables for all ranks here; they override the parent's and are overridden by the trial's.
    """

    ranks: Sequence[int]
    rendezvous: str = ""
    cores: int = 1
    bound: Sequence[int] = ()
    env: Mapping[str, str] | None = None


def log_path(log_dir: Path, number: int, rank: int) -> Path:
    """Return the path of the output of one rank of trial `number`."""
    return log_dir / f"trial-{number:04d}.rank-{rank}.log"


def rank_env(
    trial: Trial, place: Place, local_rank: int, scratch: str, marker: str, drives: Sequence[Path] = ()
) -> dict[str, str]:
    """Return the complete environment of one rank; tensors on SSD go to `drives`, if there are any."""
    env = {**os.environ, **(place.env or {})}
    if drives:
        # Folders of this trial alone: steps that it keeps must not be taken for the user's training.
        env[offload_dir.VARIABLE] = os.pathsep.join(map(str, drives))
    # OpenMP waits as in training. OMP_WAIT_POLICY=passive makes steps of small ops 40 % longer on two idle
    # cores (44 instead of 31 ms; large ops 4 %), although on cores shared by ten processes spinning takes 577
    # instead of 158 ms and 6 times the CPU time.
    env.setdefault("OMP_NUM_THREADS", str(threads_per_rank(place.cores, len(place.ranks))))
    if not place.rendezvous.startswith("tcp:"):
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: no listener that others could reach
    return {
        **env,
        "PYTHONUNBUFFERED": "1",  # what was printed before a kill is the evidence
        "PYTHONFAULTHANDLER": "1",  # stacks on SIGSEGV, and on the SIGABRT that ends a hang
        # After the parent's: an allocator setting of the user would change what is measured.
        **trial.env,
        "RANK": str(place.ranks[local_rank]),
        "WORLD_SIZE": str(trial.ranks),
        "LOCAL_RANK": str(local_rank),
        "MEMTUNE_RENDEZVOUS": place.rendezvous or f"file://{scratch}/rendezvous",
        "MEMTUNE_TRIAL_FILE": f"{scratch}/trial.json",
        MARKER: marker,
    }


class LocalRanks:
    """Ranks of one trial on this machine; implements `monitor.Ranks`.

    Args:
        trial: The trial; each rank reads it as JSON from the file named by MEMTUNE_TRIAL_FILE.
        command: Program and arguments of one rank.
        log_dir: Existing folder for the output of the ranks.
        place: Ranks that run here, and the rendezvous with the others.
        server: Forks them where possible; without one they are executed.

    Raises:
        EnvironmentFault: No process can be started, or the folder for temporary files cannot be written.
    """

    def __init__(
        self,
        trial: Trial,
        command: Sequence[str],
        log_dir: Path,
        place: Place,
        server: ForkServer | None = None,
    ) -> None:
        self.marker = uuid.uuid4().hex
        self.pending = set(place.ranks)
        self._on_drives = offload_dir.folders_of_own()
        drives = [each.path for each in self._on_drives]
        try:
            self._folder = offload_dir.RunFolder.temporary()
            self.scratch = str(self._folder.path)
            Path(self.scratch, "trial.json").write_text(trial.model_dump_json())
            envs = [
                rank_env(trial, place, index, self.scratch, self.marker, drives)
                for index in range(len(place.ranks))
            ]
            forked = server.fork_supervisor(command, envs[0]) if server is not None else None
            self.process = forked or start_supervisor()
        except OSError as error:
            self._clear_drives()
            fix = "free processes, or space in the folder for temporary files (TMPDIR)"
            raise EnvironmentFault(
                "A trial cannot be started.", evidence=str(error), fix=fix, code="MT501"
            ) from error
        self._logs = [log_path(log_dir, trial.number, rank) for rank in place.ranks]
        ranks = [
            {"rank": rank, "argv": list(command), "env": env, "log": str(log)}
            for rank, env, log in zip(place.ranks, envs, self._logs, strict=True)
        ]
        self._order({"ranks": ranks, "scratch": self.scratch, "cores": list(place.bound)})
        self._buffer = bytearray()
        self._read_all = False
        self._poll = select.poll()
        self._poll.register(_pipe(self.process.stdout), select.POLLIN)

    @property
    def gone(self) -> bool:
        """Return whether the supervisor, and so every process, has ended, and all events were read."""
        return self._read_all

    @property
    def core_wait_s(self) -> float:
        """Return the longest time for which a process of the trial has waited for a core."""
        return core_wait_s(self.process.pid)

    def events(self, timeout_s: float) -> list[Event]:
        """Return the ranks' reports and exits since the last call, waiting `timeout_s` for the first."""
        if self._read_all or not self._poll.poll(timeout_s * 1000):
            return []
        data = os.read(_pipe(self.process.stdout).fileno(), 1 << 20)
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        found = [event for line in lines if (event := self._event(json.loads(line)))]
        # End of file: the supervisor ends last, so no process of the trial is left.
        if not data:
            self._read_all = True
            found += [RankLost(rank, "was lost: its supervisor has ended") for rank in sorted(self.pending)]
        return found

    def _event(self, report: dict[str, Any]) -> Event | None:
        if "leftovers" in report:
            return Leftovers(tuple(report["leftovers"]))
        rank = report["rank"]
        if "exit" in report:
            self.pending.discard(rank)
            return RankExit(rank, report["exit"], masked(report["tail"]), report["host_oom"])
        try:
            line = json.loads(masked(report["line"]))
        except ValueError:
            return None  # user code printed into the descriptor
        return Line(rank, line, report["at"]) if isinstance(line, dict) else None

    def stop(self, *, dump: bool, grace_s: float) -> None:
        """Ask all processes to end, dumping stacks first if `dump`; they are killed after the grace."""
        self._order({"dump": dump, "grace_s": grace_s})

    def _order(self, order: dict[str, Any]) -> None:
        # If the supervisor has ended, its closed pipe reports that.
        with contextlib.suppress(BrokenPipeError, ValueError):
            stream = _pipe(self.process.stdin)
            stream.write(json.dumps(order).encode() + b"\n")
            stream.flush()

    def close(self) -> None:
        """Kill remaining processes, and return when none is left."""
        end_supervisor(self.process)
        # A supervisor that was killed has killed none of its descendants; the marker in their environment
        # finds them.
        if self.process.returncode != 0:
            supervisor.kill_marked(f"{MARKER}={self.marker}")
        for log in self._logs:
            mask_file(log)
        self._folder.remove()
        self._clear_drives()

    def _clear_drives(self) -> None:
        """Delete the ranks' files on SSD: a rank ends without the interpreter's clean-up, or is killed."""
        for each in self._on_drives:
            each.remove()


def start_supervisor() -> subprocess.Popen[bytes]:
    """Start a supervisor that waits for its spec."""
    # In its own session, so that Ctrl-C in the terminal does not reach it.
    return subprocess.Popen(
        # Isolated and without site packages: it starts in milliseconds, and no user's file shadows a module
        # of it.
        [sys.executable, "-I", "-S", str(Path(supervisor.__file__).resolve())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def end_supervisor(process: subprocess.Popen[bytes] | ForkedSupervisor) -> None:
    """Close the pipes of a supervisor, which then kills its descendants and ends; kill it if it does not."""
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            _pipe(stream).close()
    try:
        process.wait(CLOSE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise ValueError("the supervisor was started without pipes")
    return stream


def make_log_dir(log_dir: Path | str) -> Path:
    """Return the folder for the output of trials, created if missing, readable by the user only.

    Raises:
        EnvironmentFault: It cannot be written.
    """
    path = Path(log_dir)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = path / f".{os.getpid()}-{time.monotonic_ns()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        fix = "name a folder that you may write"
        raise EnvironmentFault(
            f"Logs cannot be written to {path}.", evidence=str(error), fix=fix, code="MT502"
        ) from error
    return path


def run_group(
    trial: Trial,
    command: Sequence[str] = WORKER,
    *,
    log_dir: Path | str,
    cores: int | None = None,
    bound: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
    cancelled: threading.Event | None = None,
    silence_s: float = SILENCE_S,
    server: ForkServer | None = None,
) -> TrialResult | None:
    """Run `trial` in fresh processes of this machine, one per rank, and wait for the result.

    Args:
        trial: The trial; all of its ranks run here.
        command: Program and arguments of one rank.
        log_dir: Folder for the output of the ranks (`log_path`).
        cores: Number of processor cores that the ranks share, all usable ones when None.
        bound: Ids of the only cores that the ranks may use; empty for any.
        env: Variables that override the parent's, such as CUDA_VISIBLE_DEVICES.
        on_progress: Called with every heartbeat of rank 0.
        cancelled: Set it from another thread to end the trial.
        silence_s: Once steps are made, a rank silent for longer than this and than 20 steps has hung.
        server: Forks the ranks where possible; without one they are executed.

    Returns:
        The result, or None if `cancelled` was set. No process of the trial is left in either case.

    Raises:
        EnvironmentFault: The machine allows no process, no temporary file or no log.
    """
    folder = make_log_dir(log_dir)
    place = Place(range(trial.ranks), cores=cores or usable_cores(), bound=bound, env=env)
    return run_monitored(
        trial,
        lambda: LocalRanks(trial, command, folder, place, server),
        on_progress=on_progress,
        cancelled=cancelled or threading.Event(),
        silence_s=silence_s,
    )
