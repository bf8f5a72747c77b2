"""Trials in child processes of this machine: no cluster, no port, any number of ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from memtune.device import platform_of
from memtune.executors.base import Progress, Trial, TrialResult
from memtune.executors.fork_server import ForkServer
from memtune.executors.rank_group import WORKER, make_log_dir, run_group
from memtune.executors.slot_pool import PoolExecutor
from memtune.hardware import core_sets, usable_cores
from memtune.ssd import RunFolder


class LocalExecutor(PoolExecutor):
    """Runs each trial in fresh child processes below its own supervisor, forked without a GPU driver.

    Args:
        slots: Number of concurrent trials; each is bound to an equal set of the processor cores, unless it
            runs alone.
        log_dir: Folder of the ranks' output; when None one that `close` removes.
        gpus: Ids (as in CUDA_VISIBLE_DEVICES) that the slots share evenly; empty leaves the choice to the
            trial.
        command: Program and arguments of one rank.

    Raises:
        EnvironmentFault: The folder for logs cannot be written.
    """

    name = "local"

    def __init__(
        self,
        slots: int = 1,
        *,
        log_dir: Path | str | None = None,
        gpus: Sequence[str] = (),
        command: Sequence[str] = WORKER,
    ) -> None:
        self._temporary = RunFolder.temporary() if log_dir is None else None
        self.log_dir = make_log_dir(self._temporary.path if self._temporary else log_dir or "")
        self._gpus, self._command = tuple(gpus), tuple(command)
        self._server = ForkServer()
        self._cores = core_sets(slots) if slots > 1 else []
        super().__init__(slots)

    def close(self) -> None:
        """End all running trials; no process survives. May be called twice."""
        super().close()
        self._server.close()
        if self._temporary is not None:
            self._temporary.remove()

    def _run(
        self, trial: Trial, slot: int, on_progress: Callable[[Progress], None], cancelled: threading.Event
    ) -> TrialResult | None:
        share = len(self._gpus) // self.slots
        mine = self._gpus if trial.alone else self._gpus[slot * share : (slot + 1) * share]
        bound = self._cores[slot] if self._cores and not trial.alone else ()
        if self._gpus and trial.device != "cpu" and len(mine) < trial.ranks:
            reason = f"needs {trial.ranks} GPUs; each of the {self.slots} slots has {share}"
            return TrialResult(number=trial.number, status="unfit", reason=reason)
        return run_group(
            trial,
            self._command,
            log_dir=self.log_dir,
            cores=usable_cores() if trial.alone else len(bound) or max(1, usable_cores() // self.slots),
            bound=bound,
            env={platform_of(trial.device).visible_devices: ",".join(mine)} if mine else None,
            on_progress=on_progress,
            cancelled=cancelled,
            # A forked process cannot use a GPU driver that its parent has started.
            server=self._server if trial.device == "cpu" else None,
        )
