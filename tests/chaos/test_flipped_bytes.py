"""Random flipped bytes in files that are read back: found, or without any effect."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from torch import nn

from memtune.api import Tuned, apply
from memtune.autotune.search.search_events import EventLog, Note, Unknown, read_events
from memtune.autotune.space import DAMAGE
from memtune.autotune.space.sampler import Sampler
from memtune.autotune.space.search_space import Space
from memtune.errors import MemtuneError
from memtune.executors.base import TrialResult
from memtune.search_spaces import find, null
from memtune.search_spaces.execution import Execution
from memtune.ssd.last_step import Manifest

SCALE = int(os.environ.get("MEMTUNE_CHAOS", "1"))
SEED = int(os.environ.get("MEMTUNE_SEED", "0"))
"""Other cases for each: a long run may be cut into several."""


def flipped(path: Path, draw: random.Random) -> None:
    """Change one random byte of the file."""
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= draw.randrange(1, 256)
    path.write_bytes(data)


def tuned(seed: int) -> Tuned:
    torch.manual_seed(seed)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    return apply(model, optimizer, {}, strict=False)


def test_flipped_bytes_of_a_checkpoint_are_noticed(tmp_path: Path) -> None:
    tuned(1).save(tmp_path)
    draw, found = random.Random(1 + SEED), tuned(2)
    for index in range(40 * SCALE):
        path = tmp_path / (".metadata" if index % 4 == 0 else "__0_0.distcp")
        whole = path.read_bytes()
        flipped(path, draw)
        with pytest.raises(MemtuneError):
            found.load(tmp_path)
        path.write_bytes(whole)
    print(f"{40 * SCALE} flipped bytes of checkpoints: 0 silent")


def test_flipped_bytes_of_a_log_are_noticed(tmp_path: Path) -> None:
    path, draw = tmp_path / "log", random.Random(2 + SEED)
    with EventLog(path) as log:
        for number in range(5):
            log.write(Note(text=f"step {number} took 25 ms"))
    whole, wanted = path.read_bytes(), list(read_events(path))
    for _ in range(100 * SCALE):
        flipped(path, draw)
        assert all(each in wanted or isinstance(each, Unknown) for each in read_events(path))
        path.write_bytes(whole)
    print(f"{100 * SCALE} flipped bytes of event logs: 0 silent")


def test_flipped_bytes_of_a_manifest_are_noticed(tmp_path: Path) -> None:
    Manifest("key" * 20, 4, [], [1.0], {"buffer": torch.arange(4.0)}).write(tmp_path)
    (path,), draw = tmp_path.iterdir(), random.Random(3 + SEED)
    whole = path.read_bytes()
    for _ in range(100 * SCALE):
        flipped(path, draw)
        assert Manifest.read(path) is None
        path.write_bytes(whole)
    print(f"{100 * SCALE} flipped bytes of manifests: 0 silent")


def test_flipped_bytes_of_a_study_are_noticed(tmp_path: Path) -> None:
    """It is whole, or known to be damaged; no error of Optuna, SQLite or pydantic escapes."""
    full = find("recompute", "full")(kind="full")
    space = Space((Execution(micro_batch=2),), {"recompute": (null("recompute"), full)}, {})
    path, told = tmp_path / "study.db", {}
    sampler = Sampler(path, space, 0)
    for choice in space:
        number, _ = sampler.ask(choice)
        result = TrialResult(number=number, status="ok", step_s=1.25, peak_allocated_bytes=1234567)
        told[number] = choice.dump(), result
        sampler.tell(number, result, 1.0)
    sampler.close()
    whole, draw, noticed = path.read_bytes(), random.Random(4 + SEED), 0
    for _ in range(6 * SCALE):
        flipped(path, draw)
        try:
            again = Sampler(path, space, 0)
        except DAMAGE:
            noticed += 1
        else:
            if again.holds(told):
                found = {each.number: each.result for each in again.trials()}
                assert {number: found[number] for number in told} == {
                    n: result for n, (_, result) in told.items()
                }
            else:
                noticed += 1
            again.close()
        path.write_bytes(whole)
    print(f"{6 * SCALE} flipped bytes of studies: {noticed} noticed, the others without effect on any result")
