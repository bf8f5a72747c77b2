"""Short trainings that keep their last step, in processes of their own that can be killed."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.gloo import FRESH, backends_on
from torch import nn

import memtune
from memtune.offload.near_storage import update_worker_client
from memtune.ssd import offload_dir, ssd_tensors

STEPS = 3
OTHERS: dict[str, dict[str, Any]] = {
    "ssd": {"parameters": "ssd", "parameter_prefetch": 0},
    "lohan": {"kind": "lohan", "bucket_mib": 0},
    "updaters": {"kind": "smart_infinity", "sub_group_mib": 0.0002, "buffers": 2},
    "pages": {"kind": "angel_ptm", "optimizer": "ssd"},
}
PLANS: dict[str, dict[str, Any]] = {"pages": {"page_bytes": 512, "frames": 4, "prefetch": [0] * 4}}


def fresh(blocks: int = 1) -> nn.Module:
    torch.manual_seed(1)
    layers = [
        nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.3), nn.Linear(9, 6))
        for _ in range(blocks)
    ]
    return nn.Sequential(*layers, nn.Linear(6, 2))


def model_for(resume: str) -> nn.Module:
    return fresh(2 if "," in resume else 1)


def tuned_of(model: nn.Module, resume: str) -> memtune.Tuned:
    """Return settings from a text: `resume`, and after a comma a key of `OTHERS`."""
    resume, _, other = resume.partition(",")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    settings = {"offload": {"states": {"kind": "zero_infinity", "resume": resume, **OTHERS.get(other, {})}}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it goes on
        config = {"settings": settings, "plan": {"offload.states": PLANS[other]} if other in PLANS else {}}
        return memtune.apply(model, optimizer, config, loss=lambda m, x: m(x).pow(2).mean())


def train(directory: str, resume: str, kill_at: int, log: str, device: str = "cpu") -> None:
    """Train to step `STEPS`; the process kills itself at durable act number `kill_at`. The data is torch's
    draw.
    """
    os.environ[offload_dir.VARIABLE] = directory
    torch.set_num_threads(1)
    backends_on(device, 0, 1)
    if kill_at >= 0:
        kill_at_act(kill_at)
    tuned = tuned_of(model_for(resume).to(device), resume)
    with open(log, "a") as out:
        print("start", tuned.resumed_steps, file=out, flush=True)
        for step in range(tuned.resumed_steps, STEPS):
            tuned.step([torch.randn(4, 6)])
            print("done", step + 1, file=out, flush=True)
        torch.save((tuned.state_dict(), torch.get_rng_state()), f"{log}.pt")
    tuned.finish()
    end_updaters()
    # what the end of an interpreter does; processes forked from a server have none
    ssd_tensors.folder().close()


def end_updaters() -> None:
    """End the updaters, as the end of an interpreter does."""
    for link in list(update_worker_client._links.values()):
        link.close()


DURABLE: list[tuple[Any, str]] = [
    *((os, name) for name in ("fsync", "fdatasync", "replace", "unlink", "rmdir")),
    (ssd_tensors.Disk, "store"),
    (update_worker_client.UpdaterLink, "order"),
]
"""Acts that change the drive's content: writes, flushes, renames, removals."""


def kill_at_act(
    number: int, acts: list[tuple[Any, str]] = DURABLE, victim: Callable[[], int] = os.getpid
) -> None:
    """Kill a process, this one by default, before a numbered one of `acts`."""
    count = iter(range(10**6))

    def counted(act: Callable[..., Any]) -> Callable[..., Any]:
        def one(*args: Any, **kwargs: Any) -> Any:
            if next(count) == number:
                os.kill(victim(), signal.SIGKILL)
            return act(*args, **kwargs)

        return one

    for where, name in acts:
        setattr(where, name, counted(getattr(where, name)))


def run(directory: Path, log: Path, kill_at: int = -1, resume: str = "last_step") -> int:
    child = FRESH.Process(target=train, args=(str(directory), resume, kill_at, str(log)))
    child.start()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode


def same(one: Path, other: Path) -> None:
    got, wanted = (torch.load(f"{each}.pt", map_location="cpu") for each in (one, other))
    assert torch.equal(got[1], wanted[1])
    assert all(torch.equal(value, wanted[0]["model"][name]) for name, value in got[0]["model"].items())
    for index, state in wanted[0]["optimizer"]["state"].items():
        assert all(
            torch.equal(
                torch.as_tensor(state[name]), torch.as_tensor(got[0]["optimizer"]["state"][index][name])
            )
            for name in state
        )
