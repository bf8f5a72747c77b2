"""MiCS: conditions, record, and one average between groups per step.

Distinguishing test: for any number of micro-batches the link between groups carries 2·(1 - p/N)/p of the
gradients' bytes per step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.sharding_programs import program, target
from support.suites.sharded_suite import ShardedSuite
from support.zoo_paths import ZOO

from memtune.program.step import Phase, Resource, Step
from memtune.search_spaces.sharding.states.fsdp import Fsdp
from memtune.search_spaces.sharding.states.mics import Mics


@pytest.mark.parametrize(
    ("knobs", "ranks", "accumulate", "reason"),
    [
        ({}, 1, 2, "only one rank"),
        ({}, 16, 2, None),
        ({}, 8, 2, "all 8 ranks in one group are fsdp (sharding.states: fsdp)"),
        (
            {"group": 4},
            8,
            1,
            "with one micro-batch a step it is fsdp (sharding.states: {kind: fsdp, degree: 4})",
        ),
        ({"group": 3}, 8, 2, "group=3 must divide the 8 ranks (group: 2 or 4 or 8)"),
        ({"group": 16}, 8, 2, "group=16 is more than the 8 ranks"),
        ({"group": 2, "blocks_per_unit": 5}, 8, 2, "there are 4 blocks"),
    ],
)
def test_mics_fits_or_gives_the_reason(
    knobs: dict[str, Any], ranks: int, accumulate: int, reason: str | None
) -> None:
    found = Mics(**knobs).fits(program(ranks=ranks, accumulate=accumulate), target(ranks))
    assert found is None if reason is None else reason in str(found)


def rewritten(group: int | None, ranks: int) -> Step:
    technique, where = Mics(group=group), target(ranks)
    before = program(ranks=ranks, accumulate=2)
    step = technique.rewrite(before, technique.plan(before, where), where).step
    step.validate()
    return step


def ops(step: Step, name: str) -> list[int]:
    return [op for op in range(step.ops.n) if name in step.names[step.ops.name[op]]]


def test_groups_are_averaged_once_per_step_between_nodes() -> None:
    step = rewritten(4, 16)
    averages, reductions = ops(step, "all_reduce"), ops(step, "reduce_scatter")
    assert len(averages) == len(reductions)
    assert {int(step.ops.phase[op]) for op in averages} == {Phase.BOUNDARY}  # which runs once a step
    assert {int(step.ops.phase[op]) for op in reductions} == {Phase.BACKWARD}
    assert {int(step.ops.group[op]) for op in averages} == {4}
    assert {int(step.ops.resource[op]) for op in averages} == {Resource.INTER_LINK}
    assert {int(step.ops.group[op]) for op in reductions + ops(step, "all_gather")} == {4}
    assert sum(step.ops.traffic_bytes[averages]) * 4 == sum(step.ops.traffic_bytes[reductions])


def test_averages_of_all_but_the_last_unit_overlap_with_backward() -> None:
    step = rewritten(2, 4)
    averages, end = ops(step, "all_reduce"), max(ops(step, "reduce_scatter"))
    # The last unit, and the one before it, whose average overlaps with the last reduction.
    assert sum(op > end for op in averages) == 2


def test_group_is_a_node_by_default() -> None:
    where = target(16)
    assert where.hardware.gpus_per_node == 8
    assert Mics().plan(program(ranks=16, accumulate=2), where).document() == {"group": 8}
    assert Mics(group=4).plan(program(ranks=16, accumulate=2), where).is_empty
    assert Mics().record(where) == Mics(group=8).record(where)
    assert {int(rewritten(None, 16).ops.group[op]) for op in ops(rewritten(None, 16), "all_gather")} == {8}


def test_record_differs_from_fsdp_in_the_average_of_copies() -> None:
    one, other = Mics(group=4).record(target(8)), Fsdp(degree=4).record(target(8))
    assert one.keys() == other.keys()
    assert {name for name in one if one[name] != other[name]} == {"states.average"}


def test_choices_are_parts_of_a_node_a_node_or_several() -> None:
    assert Mics().choices_on(target(48))["group"] == (None, 24, 16, 8, 4, 2)
    assert Mics().choices_on(target(8))["group"] == (None, 4, 2)
    assert Mics().choices_on(target(1))["group"] == (None,)


class TestMics(ShardedSuite):
    technique = Mics
    ranks, accumulate, peak_rel, briefly = 4, 2, 0.02, False
    models: ClassVar[dict[str, Path]] = {"lora": ZOO["lora"]}

    @classmethod
    def default(cls) -> Mics:
        return Mics(group=2)
