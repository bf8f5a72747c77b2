"""PaRO: strategies that fit, reasons of others, and their factors. On real ranks: tests/parallel/sharding.

Distinguishing test: bytes on each class of link are those of `memtune.parallel.sharding.factors` for the
letters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.sharding_programs import program, target, with_parameter
from support.suites.sharded_suite import ShardedSuite
from support.zoo_paths import ZOO

from memtune.program.step import Kind, Phase, Program, Resource, Step, Tier
from memtune.search_spaces.sharding.states.mics import Mics
from memtune.search_spaces.sharding.states.paro import Paro

RANKS = 16
BUILT = ("NNI", "NIG", "IIG", "IGG", "NII", "INI", "ING")


def verdict(ranks: int = RANKS, accumulate: int = 4, **knobs: Any) -> str:
    found = Paro(**knobs).fits(program(ranks=ranks, accumulate=accumulate), target(ranks))
    return str(found) if found is not None else ""


def test_fits_every_strategy_that_can_be_built() -> None:
    assert {letters: why for letters in BUILT if (why := verdict(strategy=letters))} == {}


@pytest.mark.parametrize(
    ("letters", "reason"),
    [
        ("IGI", "IGI cannot be built: optimizer=8 is no multiple of gradients=16"),
        ("IIN", "IIN cannot be built: optimizer=1 is no multiple of gradients=8"),
        ("GIG", "GIG cannot be built: gradients=8 is neither 1 nor a multiple of parameters=16"),
        ("GGG", "GGG does not use the groups"),
        ("III", "(8, 8, 8) is mics, group: 8"),
    ],
)
def test_fits_refuses_other_strategies(letters: str, reason: str) -> None:
    assert reason in verdict(strategy=letters)


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({"ranks": 1}, "only one rank"),
        ({"ranks": 8}, "all 8 ranks are in one group"),
        ({"group": 3}, "group=3 must divide the 16 ranks"),
        ({"group": 32}, "group=32 is more than the 16 ranks"),
        ({"accumulate": 1, "strategy": "NIG"}, "there are no sums of gradients"),
        ({"blocks_per_unit": 9}, "there are 4 blocks"),
    ],
)
def test_fits_refuses_groups_and_micro_batches(knobs: dict[str, Any], reason: str) -> None:
    assert reason in verdict(**knobs)


def test_fits_refuses_scalar_parameters() -> None:
    scalar = Program(with_parameter(3, shape=()).rank_classes, 2, accumulate=4)
    assert "has no dimension" in str(Paro(strategy="NIG").fits(scalar, target(RANKS)))


def rewritten(letters: str) -> Step:
    technique, where = Paro(strategy=letters), target(RANKS)
    before = program(ranks=RANKS, accumulate=4)
    step = technique.rewrite(before, technique.plan(before, where), where).step
    step.validate()
    return step


def sent(step: Step, name: str) -> set[tuple[int, int, int]]:
    rows = [op for op in range(step.ops.n) if name in step.names[step.ops.name[op]]]
    return {(int(step.ops.phase[op]), int(step.ops.group[op]), int(step.ops.resource[op])) for op in rows}


def test_iig_reduces_in_groups_and_crosses_them_once() -> None:
    step, inside, between = rewritten("IIG"), (8, Resource.INTRA_LINK), (2, Resource.INTER_LINK)
    assert sent(step, "reduce_scatter") == {(Phase.BACKWARD, *inside), (Phase.BOUNDARY, *between)}
    assert sent(step, "all_gather") == {
        (Phase.FORWARD, *inside),
        (Phase.BACKWARD, *inside),
        (Phase.BOUNDARY, *between),
    }
    assert not sent(step, "all_reduce")


def test_ing_sends_no_gradient_before_the_last_micro_batch() -> None:
    step = rewritten("ING")
    assert {phase for phase, *_ in sent(step, "reduce_scatter")} == {Phase.BOUNDARY}
    assert {group for _, group, _ in sent(step, "reduce_scatter")} == {8, 2}


def test_nii_averages_groups_once() -> None:
    assert sent(rewritten("NII"), "all_reduce") == {(Phase.BOUNDARY, 2, Resource.INTER_LINK)}


def test_held_bytes_follow_the_strategy() -> None:
    whole = program().step

    def held(step: Step, kind: Kind) -> int:
        return int(
            step.storages.bytes[
                (step.storages.kind == kind)
                & (step.storages.tier == Tier.DEVICE)
                & (step.storages.producer < 0)
                & (step.storages.bytes > 8)
            ].sum()
        )

    for letters in BUILT:
        step = rewritten(letters)
        for letter, kind in zip(letters[::2], (Kind.PARAMETER, Kind.OPTIMIZER), strict=True):
            assert held(step, kind) * {"N": 1, "I": 8, "G": 16}[letter] == held(whole, kind), (letters, kind)


def test_records_are_factors_and_groups_default_to_nodes() -> None:
    where = target(RANKS)
    assert Paro().record(where)["states.shard"] == {"parameters": 8, "gradients": 8, "optimizer": 16}
    assert Paro().record(where) == Paro(group=8).record(where) != Paro(group=4).record(where)
    assert Paro().plan(program(), where).document() == {"group": 8}
    assert Paro().explain(Paro().plan(program(), where)) == ("groups of 8 ranks",)
    assert Paro(strategy="III").record(where)["states.shard"] == Mics().record(where)["states.shard"]


def test_choices_are_strategies_and_sizes() -> None:
    choices = Paro().choices_on(target(RANKS))
    assert set(choices["strategy"]) == {"IIG", "NIG", "NII", "IGG", "ING", "NNI"}
    assert choices["group"] == (None, 8, 4)
    assert Paro().choices_on(target(2)) == {}


class TestParo(ShardedSuite):
    technique = Paro
    ranks, accumulate, peak_rel, briefly = 4, 2, 0.02, False
    models: ClassVar[dict[str, Path]] = {"lora": ZOO["lora"]}

    @classmethod
    def default(cls) -> Paro:
        return Paro(group=2)
