"""Saved activations on SSD in the stages of a pipeline, for several micro-batches at once."""

from __future__ import annotations

import gc
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.gloo import run_ranks
from support.ranks.model_parallel_runs import SIZE
from support.ranks.pipeline_runs import CHAIN, candidate, document, trained

from memtune.activations.offload.ssd_spill import SSDSpill
from memtune.api import apply
from memtune.autotune.predict.simulation import simulate
from memtune.hardware.spec import find
from memtune.memory.ledger import Ledger
from memtune.program.residency import WRITES_IN_FLIGHT
from memtune.program.step import Phase, Resource, Step, Tier
from memtune.runtime import transfer
from memtune.runtime.memory_tiers import HOST, tier
from memtune.ssd import offload_dir, ssd_tensors
from memtune.testing.training import build

RANKS, ACCUMULATE = 2, 2
MICRO_BATCHES = RANKS * ACCUMULATE
LINKS = {
    "device_to_host": Resource.DEVICE_TO_HOST,
    "host_to_device": Resource.HOST_TO_DEVICE,
    "ssd_write": Resource.SSD_WRITE,
    "ssd_read": Resource.SSD_READ,
}


def moved(prefetch: int | None = None, **knobs: Any) -> dict[str, Any]:
    return {
        "offload": {
            "activations": {
                "kind": "copy_out",
                "target": "ssd",
                "min_bytes": 256,
                "prefetch": prefetch,
                **knobs,
            }
        }
    }


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))


@cache
def ranks(schedule: str, prefetch: int, accumulate: int) -> list[Step]:
    """Return the step of each rank, the one of highest peak first."""
    made = candidate(CHAIN, RANKS, moved(prefetch), accumulate=accumulate, schedule=schedule)
    return [each.step for each in made.program.rank_classes]


def bytes_on(step: Step, link: Resource) -> int:
    return int(step.ops.traffic_bytes[step.ops.resource == link].sum())


# -- what the pass says --------------------------------------------------------------------------------------


def test_micro_batches_in_flight_are_on_ssd_and_written_and_read_once() -> None:
    """1F1B has p - i micro-batches in flight on stage i, GPipe all of them."""
    for schedule, in_flight in (("1f1b", [2, 1]), ("gpipe", [MICRO_BATCHES, MICRO_BATCHES])):
        for step, n in zip(ranks(schedule, 2, ACCUMULATE), in_flight, strict=True):
            written = bytes_on(step, Resource.SSD_WRITE)
            assert written == bytes_on(step, Resource.SSD_READ) == bytes_on(step, Resource.DEVICE_TO_HOST) > 0
            assert step.peak_bytes(Tier.SSD) == n * written // MICRO_BATCHES


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_host_memory_follows_the_rules_of_the_ssd_spill(schedule: str, prefetch: int) -> None:
    """Op by op: at most two tensors being written, also of an earlier micro-batch, and `prefetch` read of the
    same one.
    """
    for step in ranks(schedule, prefetch, ACCUMULATE):
        write, read = (
            np.flatnonzero(step.ops.resource == link) for link in (Resource.SSD_WRITE, Resource.SSD_READ)
        )
        source = {int(op): storage_of(step, int(op), Tier.HOST) for op in write}
        writing: list[int] = []
        for op in sorted([*write.tolist(), *read.tolist()]):
            finished = writing if op in read else writing[: max(len(writing) - WRITES_IN_FLIGHT + 1, 0)]
            assert all(step.freed_after[each] == op - 1 for each in finished), "finished just before"
            writing = writing[len(finished) :]
            writing += [source[op]] if op in source else []
        assert not writing
        assert_read_for_the_backward_that_runs(step, read, prefetch)


def storage_of(step: Step, op: int, tier: Tier) -> int:
    (found,) = [
        int(each) for each in step.uses.storage[step.uses.op == op] if step.storages.tier[each] == tier
    ]
    return found


def assert_read_for_the_backward_that_runs(step: Step, read: Any, prefetch: int) -> None:
    """Assert that no read tensor is kept from one backward to the next, and at most `prefetch` and the
    requested one are.
    """
    came = {
        int(op): int(np.flatnonzero((step.storages.producer == op) & (step.storages.tier == Tier.HOST))[0])
        for op in read
    }
    backward = step.ops.phase > Phase.FORWARD
    for op, storage in came.items():
        assert backward[op : step.freed_after[storage] + 1].all()
        assert sum(other <= op <= step.freed_after[each] for other, each in came.items()) <= prefetch + 1


def test_simulator_reports_written_bytes() -> None:
    made = candidate(CHAIN, RANKS, moved(2), accumulate=ACCUMULATE)
    found = simulate(made.program, find("a100-80g"), level="events")
    assert found.ssd_written_bytes == made.program.accumulate * bytes_on(
        made.program.step, Resource.SSD_WRITE
    )


# -- on ranks ------------------------------------------------------------------------------------------------


def on_rank(path: Path, plain: dict[str, Any], config: dict[str, Any], folder: str) -> dict[str, Any]:
    os.environ[offload_dir.VARIABLE] = folder
    runs = [
        trained(path, RANKS, each, False, config["settings"]["execution"]["accumulate"])
        for each in (plain, config)
    ]
    return {"runs": runs, "left": ssd_tensors.current().used_bytes, **measured(path, config)}


def measured(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return bytes by link of the last of four steps, peaks by tier, and the bytes on SSD after it."""
    gc.collect()
    ledger = Ledger.open("cpu")
    empty = ledger.live_bytes(), ledger.live_bytes(HOST)
    workload, model, optimizer = build(path)
    tuned = apply(model, optimizer, config, loss=workload.loss, strict=False)
    on_ssd, put = [0], SSDSpill.start_write

    def noted(spill: SSDSpill, entry: Any) -> None:
        put(spill, entry)
        on_ssd.append(ssd_tensors.current().used_bytes)

    SSDSpill.start_write = noted  # type: ignore[method-assign]
    for _ in range(4):
        with tier(HOST):
            batches = [
                workload.make_batch(SIZE) for _ in range(config["settings"]["execution"]["accumulate"])
            ]
        transfer.COUNTERS.take()
        ledger.reset_peak()
        on_ssd.clear()
        tuned.step(batches)
    peaks = (
        ledger.peak_allocated_bytes() - empty[0],
        ledger.peak_allocated_bytes(HOST) - empty[1],
        max(on_ssd),
    )
    return {"moved": transfer.COUNTERS.take(), "peaks": peaks, "after": ssd_tensors.current().used_bytes}


def wide(folder: Path) -> Path:
    """`CHAIN` with tensors that fill whole blocks of the file."""
    text = CHAIN.read_text()
    assert text.count("SEQ, DIM, HEADS, LAYERS = 32, 8, 16, 2, 8") == 1
    file = folder / "wide.py"
    file.write_text(
        text.replace(
            "SEQ, DIM, HEADS, LAYERS = 32, 8, 16, 2, 8", "SEQ, DIM, HEADS, LAYERS = 32, 64, 64, 2, 8"
        )
    )
    return file


@pytest.mark.slow
@pytest.mark.native_ledger
@pytest.mark.parametrize(
    "knobs",
    [{}, {"prefetch": 0, "ratio": 0.6}, {"schedule": "interleaved_1f1b"}, {"recompute": "full"}],
    ids=str,
)
def test_two_ranks_are_bitwise_and_use_every_tier_as_predicted(knobs: dict[str, Any], tmp_path: Path) -> None:
    own = {name: value for name, value in knobs.items() if name in ("prefetch", "ratio")}
    recompute = {"recompute": {"kind": knobs.get("recompute", "none")}}
    other_slots = {**moved(**{"min_bytes": 4096, **own}), **recompute}
    how = {"accumulate": ACCUMULATE, "schedule": knobs.get("schedule", "1f1b")}
    path = wide(tmp_path)
    plain, config = document(path, RANKS, recompute, **how), document(path, RANKS, other_slots, **how)
    found = run_ranks(on_rank, RANKS, path, plain, config, str(tmp_path), deadline_s=200)
    made = candidate(path, RANKS, other_slots, **how)
    steps = [each.step for each in made.program.rank_classes for _ in range(each.count)]
    assert len(steps) == RANKS
    of_rank = sorted(found, key=lambda each: -each["peaks"][2])
    for each, step in zip(of_rank, sorted(steps, key=lambda each: -each.peak_bytes(Tier.SSD)), strict=True):
        assert_bits(*each["runs"])
        assert each["left"] == each["after"] == 0
        predicted = {name: made.program.accumulate * bytes_on(step, link) for name, link in LINKS.items()}
        predicted["host_to_device"] = predicted["ssd_read"] + ACCUMULATE * batch_bytes(
            path
        )  # a rank uploads its own samples
        assert {link: each["moved"].get(link, 0) for link in LINKS} == predicted
        wanted = [step.peak_bytes(where) for where in (Tier.DEVICE, Tier.HOST, Tier.SSD)]
        states = (
            3 * torch.get_rng_state().nbytes if "recompute" in knobs else 0
        )  # no pass counts what a second run puts back
        for peak, want, spare in zip(each["peaks"], wanted, (0, states, 0), strict=True):
            assert abs(peak - want) <= 0.02 * want + spare, (each["peaks"], wanted)


def batch_bytes(path: Path) -> int:
    return sum(each.nbytes for each in build(path)[0].make_batch(SIZE))


def assert_bits(plain: dict[str, Any], run: dict[str, Any]) -> None:
    assert run["losses"] == plain["losses"]
    assert all(torch.equal(run["model"][name], weight) for name, weight in plain["model"].items())
