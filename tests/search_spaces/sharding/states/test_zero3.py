"""ZeRO 3 is FSDP over all ranks: one record, one candidate. On real ranks: tests/parallel/sharding.

Distinguishing test: a rank holds 1/N of all state, and per micro-batch 3·(N - 1)/N of the weights' bytes
cross the link.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
from support.sharding_programs import program, target
from support.suites.sharded_suite import ShardedSuite
from support.zoo_paths import ZOO

from memtune.search_spaces.sharding.states.fsdp import Fsdp
from memtune.search_spaces.sharding.states.zero3 import Zero3
from memtune.technique import NO_PLAN


def test_record_equals_fsdp_over_all_ranks() -> None:
    knobs = {"reshard_after_forward": False, "blocks_per_unit": 2}
    assert Zero3().record(target(8)) == Fsdp().record(target(8)) == Fsdp(degree=8).record(target(8))
    assert Zero3(**knobs).record(target(8)) == Fsdp(**knobs).record(target(8))
    ours, theirs = (each.rewrite(program(ranks=8), NO_PLAN, target(8)).step for each in (Zero3(), Fsdp()))
    assert np.array_equal(ours.live_bytes(), theirs.live_bytes())


def test_fits_as_fsdp_does() -> None:
    assert "only one rank" in str(Zero3().fits(program(), target(1)))
    assert Zero3().fits(program(ranks=8), target(8)) is None
    assert "there are 4 blocks" in str(Zero3(blocks_per_unit=9).fits(program(), target(2)))


class TestZero3(ShardedSuite):
    technique = Zero3
    briefly = False
    models: ClassVar[dict[str, Path]] = {"lora": ZOO["lora"]}
