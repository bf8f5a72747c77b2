"""Every writer of the project under storage faults; run by test_storage_faults.py with the shim preloaded.

`python storage_writers.py SHIM FOLDER MOST` makes the n-th call of each writer fail, for n = 1 until a run
has no n-th call or n is MOST, for each kind of fault, and prints a line of JSON for each writer: the number
of faults, and what went wrong.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from memtune.api import Tuned, apply
from memtune.autotune.search.search_events import EventLog, Note, read_events
from memtune.autotune.search.study_store import StudyFolder
from memtune.autotune.space.sampler import Sampler
from memtune.autotune.space.search_space import Space
from memtune.config import save_text
from memtune.errors import MemtuneError
from memtune.executors.base import TrialResult
from memtune.search_spaces import find, null
from memtune.search_spaces.execution import Execution
from memtune.ssd.last_step import Manifest
from memtune.ssd.ssd_file import Extent
from memtune.ssd.ssd_tensors import Disk

KINDS = {"no space": 1, "input/output error": 2, "short write": 3}
Check = Callable[[bool], None]
"""Takes whether the writer has reported success; raises if a reader finds anything but old or new."""
Writer = Callable[[Path], tuple[Callable[[], None], Check]]


def config(folder: Path) -> tuple[Callable[[], None], Check]:
    file, new = folder / "tuned.yaml", "settings: {}\n" * 200
    file.write_text("old")

    def check(done: bool) -> None:
        assert file.read_text() == new if done else file.read_text() in ("old", new)
        assert [each.name for each in folder.iterdir()] == [file.name]

    return (lambda: save_text(file, new) and None), check


def event_log(folder: Path) -> tuple[Callable[[], None], Check]:
    file = folder / "events.jsonl"

    def write() -> None:
        with EventLog(file) as log:
            for number in range(3):
                log.write(Note(text=f"note {number}"))

    def check(done: bool) -> None:
        found = list(read_events(file)) if file.exists() else []
        assert all(each.event in ("log_opened", "note") for each in found), found
        assert not done or len(found) == 4
        with EventLog(file) as log:
            log.write(Note(text="after"))
        assert [each.event for each in read_events(file)][-2:] == ["log_opened", "note"]

    return write, check


def tuned(seed: int) -> Tuned:
    torch.manual_seed(seed)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    return apply(model, optimizer, {}, strict=False)


def checkpoint(folder: Path) -> tuple[Callable[[], None], Check]:
    old, new, place = tuned(1), tuned(2), folder / "checkpoint"
    old.save(place)

    def check(done: bool) -> None:
        reader = tuned(3)
        before = reader.model.weight.clone()
        try:
            reader.load(place)
        except MemtuneError:
            assert not done
            assert torch.equal(reader.model.weight, before)
        else:
            assert torch.equal(reader.model.weight, new.model.weight)

    return (lambda: new.save(place)), check


def weights(folder: Path) -> tuple[Callable[[], None], Check]:
    model, file = tuned(1), folder / "weights.safetensors"
    model.export(file)
    new = file.read_bytes()
    file.write_bytes(b"old")

    def check(done: bool) -> None:
        assert file.read_bytes() == new if done else file.read_bytes() in (b"old", new)

    return (lambda: model.export(file)), check


def manifest(folder: Path) -> tuple[Callable[[], None], Check]:
    def made(step: int) -> Manifest:
        extent = Extent("weight", 0, 4096, np.arange(3, dtype=np.uint64))
        return Manifest("key" * 20, step, [extent], [1.0], {"buffer": torch.arange(4.0)})

    made(4).write(folder)
    made(3).write(folder)

    def check(done: bool) -> None:
        found = [Manifest.read(path) for path in folder.glob("manifest-*")]
        steps = sorted(each.step for each in found if each is not None)
        assert steps in ([[4, 5]] if done else [[3, 4], [4, 5]]), steps

    return (lambda: made(5).write(folder)), check


def tensors(folder: Path) -> tuple[Callable[[], None], Check]:
    # The threads' engine; io_uring does not call the C library.
    disk = Disk(folder / "tensors", engine="threads", block_bytes=4096)
    values = torch.arange(5000.0)
    kept: list[Any] = []

    def write() -> None:
        kept.append(disk.tensor("layer", values))
        disk.store(kept[0], values).result()

    def check(done: bool) -> None:
        if not done:
            return
        back = torch.empty_like(values)
        disk.load(back, kept[0]).result()
        assert torch.equal(back, values)

    return write, check


FULL = find("recompute", "full")(kind="full")
SPACE = Space((Execution(micro_batch=2),), {"recompute": (null("recompute"), FULL)}, {})


def study(folder: Path) -> tuple[Callable[[], None], Check]:
    path, choice = folder / "study.db", list(SPACE)[1]
    told = TrialResult(number=0, status="ok", step_s=1.0, peak_allocated_bytes=10)
    sampler = Sampler(path, SPACE, 0)
    sampler.ask(choice)
    sampler.tell(0, told, 1.0)

    def write() -> None:
        number, _ = sampler.ask(choice)
        sampler.tell(number, told.model_copy(update={"number": number}), 1.0)

    def check(done: bool) -> None:
        sampler.close()
        again = Sampler(path, SPACE, 0)
        document = choice.dump()
        wanted = {0: (document, told)}
        if done:
            wanted[1] = document, told.model_copy(update={"number": 1})
        assert again.holds(wanted)
        again.close()

    return write, check


def study_folder(folder: Path) -> tuple[Callable[[], None], Check]:
    place = StudyFolder(folder / "home" / "study")

    def write() -> None:
        with place:
            place.claim({"model": "a"}, resume=True)

    def check(done: bool) -> None:
        with place:
            assert place.claim({"model": "a"}, resume=True) or not done

    return write, check


WRITERS: dict[str, Writer] = {
    each.__name__: each
    for each in (config, event_log, checkpoint, weights, manifest, tensors, study, study_folder)
}


def run(shim: Any, writer: Writer, folder: Path, most: int) -> dict[str, Any]:
    """Return the number of faults and what went wrong under them."""
    n_faults, wrong = 0, []
    for kind, code in KINDS.items():
        for number in range(1, most + 1):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            write, check = writer(folder)
            shim.arm(code, number, str(folder).encode())
            done = False
            try:
                write()
                done = True
            except MemtuneError:
                pass
            except Exception as error:
                wrong.append(f"{kind}, call {number}: {type(error).__name__}: {error}")
            fired = shim.fired()
            shim.disarm()
            try:
                check(done)
            except Exception as error:
                wrong.append(f"{kind}, call {number}, done {done}: {type(error).__name__}: {error}")
            if not fired:
                break
            n_faults += 1
    return {"faults": n_faults, "wrong": wrong}


def main() -> None:
    warnings.simplefilter("ignore")
    shim = ctypes.CDLL(sys.argv[1])
    folder = Path(sys.argv[2])
    for name, writer in WRITERS.items():
        found = run(shim, writer, folder / name, int(sys.argv[3]))
        print(json.dumps({"writer": name, **found}), flush=True)


if __name__ == "__main__":
    main()
