"""The peak of divided model state on real ranks, by the native ledger, against what passes and simulation
say.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from support.gloo import run_ranks
from support.zoo_paths import ZOO

from memtune import hardware
from memtune.api import apply
from memtune.autotune.predict.simulation import simulate
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.technique import Target
from memtune.testing.drift_check import recording_of

RANKS, MICRO_BATCHES = 4, 2
OTHER_TECHNIQUES: dict[str, dict[str, Any]] = {
    "alone": {},
    "full": {"recompute": {"kind": "full"}},
    "selective": {"recompute": {"kind": "selective"}},
    "copy_out": {"offload": {"activations": {"kind": "copy_out", "min_bytes": 0}}},
}
STATES: dict[str, dict[str, Any]] = {
    "mics": {"kind": "mics", "group": 2},
    "mics, kept": {"kind": "mics", "group": 2, "reshard_after_forward": False},
    "fsdp, groups, two ahead": {"kind": "fsdp", "reshard_after_forward": 2, "prefetch": 2},
    "fsdp, bfloat16, none ahead": {
        "kind": "fsdp",
        "reduce_dtype": "bfloat16",
        "prefetch": 0,
        "keep_root": False,
    },
}


def settings(states: str, other_slots: str) -> dict[str, Any]:
    execution = {"micro_batch": 2, "accumulate": MICRO_BATCHES}
    return {"execution": execution, "sharding": {"states": STATES[states]}, **OTHER_TECHNIQUES[other_slots]}


def measured(path: str, cases: list[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """The largest peak of the steps after the first two."""
    from memtune.memory.ledger import Ledger
    from memtune.runtime.memory_tiers import HOST, tier
    from memtune.testing.training import build

    ledger, found = Ledger.open("cpu"), {}
    for case in cases:
        gc.collect()  # the model before is in cycles
        empty = ledger.live_bytes()
        workload, model, optimizer = build(Path(path))
        tuned = apply(model, optimizer, {"settings": settings(*case)}, loss=workload.loss, strict=False)
        peaks = []
        for _ in range(5):
            with tier(HOST):
                batches = [workload.make_batch(2) for _ in range(MICRO_BATCHES)]
            ledger.reset_peak()
            tuned.step(batches)
            peaks.append(ledger.peak_allocated_bytes() - empty)
        found[case] = max(peaks[2:])
        del model, optimizer, tuned, workload, batches
    return found


def check(cases: list[tuple[str, str]]) -> None:
    rewriter = Rewriter(recording_of(ZOO["gpt"]), Target(hardware.detect("cpu"), RANKS))
    runs = run_ranks(measured, RANKS, str(ZOO["gpt"]), cases, deadline_s=1100)
    for case in cases:
        candidate = rewriter.candidate(Choice.from_document(settings(*case)))
        assert isinstance(candidate, Candidate), candidate
        predicted = simulate(candidate.program, rewriter.target.hardware).peak_allocated_bytes
        assert max(run[case] for run in runs) == pytest.approx(predicted, rel=0.02), case


pytestmark = [
    pytest.mark.slow,
    pytest.mark.native_ledger,
]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("states", STATES)
def test_nested_sharding_peak_equals_prediction(states: str) -> None:
    check([(states, other_slots) for other_slots in OTHER_TECHNIQUES])
