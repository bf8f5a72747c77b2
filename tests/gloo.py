"""Run a function on N gloo ranks, each in a child process of its own, with a deadline: `run_ranks(function, 2, argument)`."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).parent
_CHILD = """
import importlib.util, pickle, sys
import torch, torch.distributed as dist
rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
file, name, arguments = pickle.load(open(f"{folder}/call", "rb"))
spec = importlib.util.spec_from_file_location("gloo_test", file)
module = importlib.util.module_from_spec(spec)
sys.modules["gloo_test"] = module
if ranks:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
spec.loader.exec_module(module)
result = getattr(module, name)(*arguments)
with open(f"{folder}/result{rank}", "wb") as out:
    pickle.dump(result, out)
if ranks:
    dist.barrier()
    dist.destroy_process_group()
"""


def run_ranks(function: Callable[..., Any], ranks: int, *arguments: Any, deadline_s: float = 90) -> list[Any]:
    """Results of `function(*arguments)`, one per rank; the function must be at the top of its file.

    Args:
        function: Runs with the default process group in place, on one thread.
        ranks: Number of processes; 0 is one process without a group.
        arguments: Anything that can be pickled.
        deadline_s: Children that are not done by then are killed.

    Raises:
        AssertionError: A rank failed or hung; with the end of what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        call = (function.__code__.co_filename, function.__name__, arguments)
        Path(folder, "call").write_bytes(pickle.dumps(call))
        children = [_start(folder, rank, ranks) for rank in range(max(ranks, 1))]
        try:
            _wait(children, folder, time.monotonic() + deadline_s)
        finally:
            for child in children:
                child.kill()
                child.wait()
        return [pickle.loads(Path(folder, f"result{rank}").read_bytes()) for rank in range(max(ranks, 1))]


def _start(folder: str, rank: int, ranks: int) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    with Path(folder, f"log{rank}").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(rank), str(ranks), folder],
            stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def _wait(children: list[subprocess.Popen[bytes]], folder: str, until: float) -> None:
    while any(child.poll() is None for child in children):
        failed = [rank for rank, child in enumerate(children) if child.poll() not in (None, 0)]
        assert time.monotonic() < until, f"ranks hang\n{_logs(folder, len(children))}"
        assert not failed, f"rank {failed[0]} failed\n{_logs(folder, len(children))}"
        time.sleep(0.02)
    codes = [child.returncode for child in children]
    assert not any(codes), f"exit codes {codes}\n{_logs(folder, len(children))}"


def _logs(folder: str, count: int) -> str:
    return "\n".join(f"-- rank {r} --\n{Path(folder, f'log{r}').read_text(errors='replace')[-3000:]}" for r in range(count))
