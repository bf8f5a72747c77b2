"""Run a function on N gloo ranks, each in its own process, with a deadline: `run_ranks(function, 2,
argument)`.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from support import rate_readers

from memtune.search_spaces import SLOTS, kinds


class ForkedFromImports(ForkServerContext):
    """Forks processes from one that has imported torch, memtune and the helpers of tests: imports took most
    of the time of a test.

    It has run no op, so that it has no threads which a fork would lose.
    """

    def Process(self, *args: Any, **how: Any) -> ForkServerProcess:  # type: ignore[override]
        rate_readers.note_reader()  # what it reads is not seen
        return self.rank(*args, **how)

    def rank(self, *args: Any, **how: Any) -> ForkServerProcess:
        """Return a process that says itself whether it reads rates."""
        _start_server()
        return super().Process(*args, **how)


def _start_server() -> None:
    """Start the server with the path of tests/: Python 3.11 ignores `sys.path` when it preloads, silently.

    Its processes have its environment: not the cache directory of the test that starts it.
    """
    before, cache = os.environ.get("PYTHONPATH"), os.environ.pop("MEMTUNE_CACHE", None)
    here = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = here if before is None else os.pathsep.join((here, before))
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
        if cache is not None:
            os.environ["MEMTUNE_CACHE"] = cache


PRELOADED = (
    *("torch", "torch.distributed.fsdp", "torch.distributed.tensor"),
    "torch._dynamo",  # the first optimizer imports it, a third of torch
    *("pytest", "support.shared_recordings", "support.gloo"),  # each rank imports its test's file
    *(f"memtune.search_spaces.{slot}.{kind}" for slot in SLOTS for kind in kinds(slot)),
)
FRESH = ForkedFromImports()
FRESH.set_forkserver_preload([*PRELOADED])


def run_ranks(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    deadline_s: float = 90,
    may_fail: bool = False,
    device: str = "cpu",
) -> list[Any]:
    """Return the results of `function(*arguments)`, one per rank; the function must be at the top of its
    file.

    Args:
        function: Runs with the default process group in place, on one thread.
        ranks: Number of processes; 0 is one process without a group.
        arguments: Anything that can be pickled.
        deadline_s: Children that still run by then are killed.
        may_fail: A failed rank ends neither the others nor the test; its result is None. Ranks do not wait
            for one another at the end: a rank reached by a failure must end for the others to notice it.

    Raises:
        AssertionError: A rank failed or hung; with the end of its output.
    """
    file, name = function.__code__.co_filename, function.__name__
    with tempfile.TemporaryDirectory() as folder:
        children: list[BaseProcess] = [
            FRESH.rank(target=_rank, args=(folder, rank, ranks, file, name, arguments, may_fail, device))
            for rank in range(max(ranks, 1))
        ]
        try:
            for child in children:
                child.start()
            _wait(children, folder, time.monotonic() + deadline_s, may_fail)
        finally:
            for child in children:
                if child.pid is not None:
                    child.kill()
                    child.join()
        files = [Path(folder, f"result{rank}") for rank in range(max(ranks, 1))]
        found = [pickle.loads(file.read_bytes()) if file.exists() else (None, True) for file in files]
        if any(reads_rates for _, reads_rates in found):
            rate_readers.note_reader()
        return [result for result, _ in found]


def _rank(
    folder: str,
    rank: int,
    ranks: int,
    file: str,
    name: str,
    arguments: tuple[Any, ...],
    may_fail: bool,
    device: str,
) -> None:
    log = os.open(f"{folder}/log{rank}", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    missing = [name for name in PRELOADED if name not in sys.modules]
    assert not missing, f"the server has not imported {missing}"
    import torch
    import torch.distributed as dist

    gc.freeze()  # collections do not traverse what the server has imported
    from support import shared_recordings

    shared_recordings.install()
    rate_readers.install()
    torch.set_num_threads(1)
    backends = backends_on(device, rank, max(ranks, 1))
    if ranks:
        dist.init_process_group(
            backends, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks
        )
    result = getattr(_module(file), name)(*arguments)
    reads_rates = bool(rate_readers.NOTES.readers)
    Path(folder, f"result{rank}").write_bytes(pickle.dumps((result, reads_rates)))
    if ranks and not may_fail:
        dist.barrier()
        dist.destroy_process_group()


def backends_on(device: str, rank: int, ranks: int) -> str:
    """Return the backends of a group on `device`; start simulated devices, of which `rank` has its own."""
    if device != "sim":
        return "gloo"
    import torch
    from support.simulated_device import start

    from memtune.device import backends_of

    start(ranks)
    torch.accelerator.set_device_index(rank)
    return backends_of(device)


def _module(file: str) -> Any:
    spec = importlib.util.spec_from_file_location("gloo_test", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gloo_test"] = module
    spec.loader.exec_module(module)
    return module


def _wait(children: list[BaseProcess], folder: str, until: float, may_fail: bool) -> None:
    while any(child.exitcode is None for child in children):
        failed = [rank for rank, child in enumerate(children) if child.exitcode]
        assert time.monotonic() < until, f"ranks hang\n{_logs(folder, len(children))}"
        assert may_fail or not failed, f"rank {failed[0]} failed\n{_logs(folder, len(children))}"
        time.sleep(0.02)
    codes = [child.exitcode for child in children]
    assert may_fail or not any(codes), f"exit codes {codes}\n{_logs(folder, len(children))}"


def _logs(folder: str, count: int) -> str:
    return "\n".join(f"-- rank {r} --\n{_log(Path(folder, f'log{r}'))}" for r in range(count))


def _log(path: Path) -> str:
    return path.read_text(errors="replace")[-3000:] if path.exists() else ""
