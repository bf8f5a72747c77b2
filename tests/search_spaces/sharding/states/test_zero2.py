"""ZeRO 2: conditions and record. On real ranks: tests/parallel/sharding/test_zero_partition.py.

Distinguishing test: no unsharded gradient outlives the backward of its micro-batch, and per step the
gradients cross the link once a micro-batch and the weights once, (N - 1)/N of each.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from support.sharding_programs import program, step, target, with_parameter
from support.suites.sharded_suite import ShardedSuite
from support.zoo_paths import ZOO

from memtune.parallel.sharding.zero_partition_pass import partition_states
from memtune.program.step import Kind, Phase, Program, Step, Tier
from memtune.search_spaces.sharding.states._zero import partitioning
from memtune.search_spaces.sharding.states.zero2 import Zero2
from memtune.technique import NO_PLAN


def test_fits_several_micro_batches() -> None:
    assert "it equals zero1 (sharding.states: zero1)" in str(Zero2().fits(program(), target(2)))
    assert Zero2().fits(program(accumulate=2), target(2)) is None
    assert "only one rank" in str(Zero2().fits(program(ranks=1), target(1)))


def test_fits_refuses_scalar_parameters() -> None:
    scalar = with_parameter(3, shape=())
    assert "has no dimension" in str(Zero2().fits(Program(scalar.rank_classes, 2, accumulate=2), target(2)))


def test_gradient_sums_are_shards() -> None:
    whole = program(accumulate=2).step
    after = Zero2().rewrite(program(ranks=4, accumulate=2), NO_PLAN, target(4)).step
    after.validate()

    def sums(done: Step) -> int:
        mine = (
            (done.storages.kind == Kind.GRADIENT)
            & (done.storages.producer < 0)
            & (done.storages.tier == Tier.DEVICE)
        )
        return int(done.storages.bytes[mine].sum())

    flags = 4 * len(step().parameters)
    assert (sums(after) - flags) * 4 == sums(whole)


def test_gradients_cross_the_link_in_every_micro_batch() -> None:
    done = Zero2().rewrite(program(accumulate=4), NO_PLAN, target(2)).step
    reduced = [op for op in range(done.ops.n) if "reduce_scatter" in done.names[done.ops.name[op]]]
    assert {int(done.ops.phase[op]) for op in reduced} == {Phase.BACKWARD}  # which runs once a micro-batch
    gathered = [op for op in range(done.ops.n) if "all_gather" in done.names[done.ops.name[op]]]
    assert {int(done.ops.phase[op]) for op in gathered} == {Phase.BOUNDARY}  # and this once a step


def test_buffers_have_the_size_of_a_bucket_not_of_the_model() -> None:
    """ZeRO-R's constant-size buffers: one bucket for all gradients takes a part of their bytes again."""
    whole = program(accumulate=2)
    how = partitioning(whole, target(2), 25, every_micro_batch=True)
    plain = step().storages
    gradients = int(plain.bytes[(plain.kind == Kind.PARAMETER) & (plain.tier == Tier.DEVICE)].sum())
    small, medium, all_of_them = (
        partition_states(whole.step, replace(how, bucket_bytes=size)).peak_bytes()
        for size in (gradients // 64, gradients // 16, 2 * gradients)
    )
    assert small <= medium <= small + gradients // 8
    assert all_of_them >= small + gradients // 4


def test_record_has_the_factors() -> None:
    assert Zero2().record(target(8))["states.shard"] == {"parameters": 1, "gradients": 8, "optimizer": 8}


class TestZero2(ShardedSuite):
    technique = Zero2
    accumulate, peak_rel, briefly = 2, 0.02, False
    models: ClassVar[dict[str, Path]] = {"lora": ZOO["lora"]}
