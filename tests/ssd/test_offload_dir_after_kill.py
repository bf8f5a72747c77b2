"""Training with states on SSD is killed before each durable act; its files are removed, those of living runs
are not.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.gloo import FRESH
from support.killed_training import DURABLE, kill_at_act
from support.search.prepared_search import rewriter
from support.zoo_paths import ZOO

from memtune.api import apply
from memtune.autotune.space.candidates import Candidate, Choice
from memtune.errors import EnvironmentFault
from memtune.offload.near_storage import update_worker_client
from memtune.runtime.memory_tiers import HOST, tier
from memtune.ssd import offload_dir, ssd_tensors
from memtune.ssd.offload_dir import RunFolder
from memtune.testing.training import SEED, build

STATES: dict[str, dict[str, Any]] = {
    "smart_infinity": {},
    "lohan": {},
    "angel_ptm": {"optimizer": "ssd"},
    "zero_infinity": {"parameters": "ssd", "gradients": "ssd"},
    "moesys": {},
}
STEPS = 2
ACTS: list[tuple[Any, str]] = [
    *((os, name) for name in ("posix_fallocate", "rename", "open")),
    *DURABLE[:-1],
    (ssd_tensors.Disk, "load"),
    (update_worker_client.UpdaterLink, "order"),
]


def config(kind: str) -> dict[str, Any]:
    """Return settings and plan."""
    settings = {"execution": {"micro_batch": 2}, "offload": {"states": {"kind": kind, **STATES[kind]}}}
    with patch.dict(os.environ, {offload_dir.VARIABLE: "/nothing-is-written"}):
        found = rewriter(_model(kind)).candidate(Choice.from_document(settings))
    assert isinstance(found, Candidate), found
    return {"settings": settings, "plan": {slot: plan.document() for slot, plan in found.plans.items()}}


def _model(kind: str) -> str:
    return "moe" if kind == "moesys" else "gpt"


def train(directory: str, kind: str, config: dict[str, Any], kill_at: int, updater: bool, log: str) -> None:
    """Train two steps; before act `kill_at` kill this process, or (`updater`) the first one that updates."""
    os.environ[offload_dir.VARIABLE] = directory
    torch.set_num_threads(1)
    workload, model, optimizer = build(ZOO[_model(kind)])
    if updater:
        kill_at_act(kill_at, ACTS[-1:], first_updater)
    else:
        kill_at_act(kill_at, ACTS)
    losses: list[float] = []
    with open(log, "w") as out:
        try:
            tuned = apply(model, optimizer, config, loss=workload.loss, strict=False)
            torch.manual_seed(SEED)
            for _ in range(STEPS):
                with tier(HOST):
                    batches = [workload.make_batch(2)]
                losses.append(float(tuned.step(batches)))
            tuned.audit()
        except EnvironmentFault as fault:
            print(fault.code, fault.what, file=out)
        else:
            print("losses", *losses, file=out)
    for link in list(update_worker_client._links.values()):
        link.close()
    if ssd_tensors.opened():
        # as the end of an interpreter does; processes forked from a server have none
        ssd_tensors.folder().close()


def first_updater() -> int:
    link = next(iter(update_worker_client._links.values()), None)
    return os.getpid() if link is None else link.process.pid


def run(
    directory: Path, kind: str, made: dict[str, Any], log: Path, kill_at: int = -1, updater: bool = False
) -> int:
    child = FRESH.Process(target=train, args=(str(directory), kind, made, kill_at, updater, str(log)))
    child.start()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL), child.exitcode
    return child.exitcode


def nothing_dead_is_left(directory: Path, living: Path) -> None:
    """Return True once updaters have noticed the end of their trainer and removed their folders."""
    stop_s = time.monotonic() + 30
    while True:
        for half_made in directory.glob(".memtune-new-*"):  # which is left alone at first
            os.utime(half_made, (0, 0))
        offload_dir.clean(directory)
        if list(directory.iterdir()) == [living] or time.monotonic() > stop_s:
            break
        time.sleep(0.05)
    assert list(directory.iterdir()) == [living]
    assert (living / "tensors").read_bytes() == b"in use"


def killed_before_acts(tmp_path: Path, kind: str, acts: range, *, updater: bool = False) -> int:
    """Train and kill for each of `acts`; return the largest number of acts."""
    directory, log, made = tmp_path / "drive", tmp_path / "log", config(kind)
    directory.mkdir()
    living = RunFolder(directory)
    (living.path / "tensors").write_bytes(b"in use")
    assert run(directory, kind, made, log) == 0
    nothing_dead_is_left(directory, living.path)
    plain, killed = log.read_text(), 0
    assert plain.startswith("losses")
    for act in acts:
        log.unlink(missing_ok=True)
        code = run(directory, kind, made, log, act, updater)
        if code == 0 and log.read_text() == plain:
            break
        killed += 1
        if updater:
            assert code == 0
            assert "MT380 The updater of storage domain 0" in log.read_text()
            assert "has ended by SIGKILL" in log.read_text()
        nothing_dead_is_left(directory, living.path)
    assert run(directory, kind, made, log) == 0
    assert log.read_text() == plain
    nothing_dead_is_left(directory, living.path)
    living.close()
    return killed


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_clean_removes_all_files_of_a_killed_trainer(tmp_path: Path) -> None:
    assert killed_before_acts(tmp_path, "smart_infinity", range(12, 13)) == 1


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", STATES)
def test_kill_before_any_act_leaves_no_folder(tmp_path: Path, kind: str) -> None:
    """Every fifth act; the others are of the same kinds."""
    assert (
        killed_before_acts(tmp_path, kind, range(0, 3000, int(os.environ.get("MEMTUNE_EVERY_ACT", "5")))) > 1
    )


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_killed_updater_is_named_in_the_error(tmp_path: Path) -> None:
    assert killed_before_acts(tmp_path, "smart_infinity", range(1, 60, 3), updater=True) > 5
