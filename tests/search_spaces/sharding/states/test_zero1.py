"""ZeRO 1: conditions, record, and the suite's checks on two ranks.

Distinguishing test: a rank holds all parameters and 1/N of the state (rounded up along the first dim), and
per step the gradients cross the link once and the weights once, (N - 1)/N of each.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from support.sharding_programs import bytes_of, program, step, target, with_parameter
from support.suites.sharded_suite import ShardedSuite
from support.zoo_paths import ZOO

from memtune.program.step import Kind
from memtune.search_spaces.sharding.states.zero1 import Zero1
from memtune.technique import NO_PLAN


@pytest.mark.parametrize(("ranks", "reason"), [(1, "only one rank"), (2, None), (8, None)])
def test_zero1_fits_or_gives_the_reason(ranks: int, reason: str | None) -> None:
    found = Zero1().fits(program(ranks=ranks), target(ranks))
    assert found is None if reason is None else reason in str(found)


def test_fits_refuses_trained_scalar_parameters_only() -> None:
    assert "has no dimension to divide" in str(Zero1().fits(with_parameter(3, shape=()), target(2)))
    assert Zero1().fits(with_parameter(3, shape=(), trainable=False), target(2)) is None


def test_rewrite_shards_optimizer_state_only() -> None:
    after = Zero1().rewrite(program(ranks=4), NO_PLAN, target(4))
    after.step.validate()
    assert bytes_of(after.step, Kind.OPTIMIZER) * 4 == bytes_of(step(), Kind.OPTIMIZER)
    assert bytes_of(after.step, Kind.PARAMETER) == bytes_of(step(), Kind.PARAMETER)


def test_gradients_cross_the_link_once_per_step() -> None:
    once, often = (Zero1().rewrite(program(accumulate=count), NO_PLAN, target(2)).step for count in (1, 4))
    for done in (once, often):
        sent = done.ops.traffic_bytes[done.ops.group > 0]
        flags = 2 * 4 * len(step().parameters)
        assert sent.tolist() == [
            bytes_of(step(), Kind.PARAMETER) + flags,
            bytes_of(step(), Kind.PARAMETER),
        ]


def test_peak_is_between_ddp_and_fsdp() -> None:
    from memtune.search_spaces.sharding.states.ddp import Ddp
    from memtune.search_spaces.sharding.states.fsdp import Fsdp

    ddp, zero, fsdp = (
        each.rewrite(program(ranks=8), NO_PLAN, target(8)).step for each in (Ddp(), Zero1(), Fsdp())
    )
    assert ddp.live_bytes()[0] > zero.live_bytes()[0] > fsdp.live_bytes()[0]


def test_record_has_the_factors() -> None:
    record = Zero1().record(target(8))
    assert record["states.shard"] == {"parameters": 1, "gradients": 1, "optimizer": 8}
    assert record != Zero1(bucket_cap_mb=100).record(target(8))


class TestZero1(ShardedSuite):
    technique = Zero1
    models: ClassVar[dict[str, Path]] = {"lora": ZOO["lora"]}
