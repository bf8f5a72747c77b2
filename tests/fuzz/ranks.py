"""Ranks that stay alive between cases: starting processes and their group costs more than a case."""

from __future__ import annotations

import gc
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from support.gloo import FRESH, backends_on

RESTART_AFTER = 200
"""Cases until the processes are replaced: each leaves process groups, which are never closed."""

GRACE_S = 30.0
"""Time for the other ranks once one is done."""


class RanksFailed(Exception):
    """A rank ended or hung; with its output."""


class Ranks:
    """Processes of one group that run one function after another.

    Args:
        count: Number of ranks.
        deadline_s: Time for one call; ranks that need longer are ended.
        device: Device type of the ranks: `cpu` or `sim`.
    """

    def __init__(self, count: int, deadline_s: float = 120.0, device: str = "cpu") -> None:
        self.count, self._deadline_s, self._device = count, deadline_s, device
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder = ""
        self._calls = 0

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return `function(*arguments)` of each rank.

        Raises:
            RanksFailed: A rank ended or hung. The next call starts new ones.
        """
        if self._calls >= RESTART_AFTER:
            self.close()
        if not self._processes:
            self._start()
        self._calls += 1
        try:
            for pipe in self._pipes:
                pipe.send((function, arguments))
            return self._results()
        except (EOFError, BrokenPipeError) as error:
            raise self._failed("a rank ended") from error

    def _results(self) -> list[Any]:
        found: dict[Connection, Any] = {}
        until = time.monotonic() + self._deadline_s
        while len(found) < self.count:
            open_pipes = [each for each in self._pipes if each not in found]
            ready = wait(open_pipes, max(until - time.monotonic(), 0))
            if not ready:
                raise self._failed(
                    f"ranks hang; the others: {[str(each)[-1500:] for each in found.values()]}"
                )
            until = min(until, time.monotonic() + GRACE_S)
            for pipe in ready:
                assert isinstance(pipe, Connection)
                found[pipe] = pipe.recv()
        return [found[pipe] for pipe in self._pipes]

    def _failed(self, text: str) -> RanksFailed:
        logs = [Path(self._folder, f"log{rank}") for rank in range(self.count)]
        tails = "\n".join(f"-- {log.name} --\n{log.read_text(errors='replace')[-1500:]}" for log in logs)
        self.close()
        return RanksFailed(f"{text}\n{tails}")

    def _start(self) -> None:
        self._folder, self._calls = tempfile.mkdtemp(prefix="fuzz-ranks-"), 0
        for rank in range(self.count):
            mine, theirs = FRESH.Pipe()
            args = theirs, self._folder, rank, self.count, self._device
            process = FRESH.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        for file in Path(self._folder).iterdir() if self._folder else ():
            file.unlink()
        if self._folder:
            Path(self._folder).rmdir()
        self._processes, self._pipes, self._folder = [], [], ""


def _serve(pipe: Connection, folder: str, rank: int, count: int, device: str) -> None:
    log = os.open(f"{folder}/log{rank}", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    backends = backends_on(device, rank, count)
    dist.init_process_group(backends, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=count)
    gc.freeze()  # what is imported need not be searched after each case
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(function(*arguments))
        except BaseException:
            traceback.print_exc()
            raise
        gc.collect()
