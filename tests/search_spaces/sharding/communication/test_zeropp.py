"""ZeRO++: when it fits, what it stands for, what is lossy. Its numbers:
memtune/{passes,runtime}/test_communicat*.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import ValidationError
from support.sharding_programs import program, target, with_parameter
from support.suites.sharded_suite import ShardedSuite
from support.zoo_paths import ZOO

from memtune.program.step import Program, RankClass
from memtune.search_spaces import find
from memtune.search_spaces.sharding.communication.zeropp import ZeroPp
from memtune.search_spaces.sharding.states.ddp import Ddp
from memtune.search_spaces.sharding.states.fsdp import Fsdp
from memtune.technique import Exactness, Target, Technique

QUANTISED = {"hpz": False, "qwz": True}


def beside(ranks: int, states: Technique | None, device: str = "cuda") -> Target:
    return replace(target(ranks, device), chosen={} if states is None else {"sharding.states": states})


@pytest.mark.parametrize(
    ("knobs", "ranks", "states", "reason"),
    [
        ({}, 1, None, "only one rank"),
        ({}, 8, Fsdp(), "all 8 ranks share a node"),
        ({}, 16, Ddp(), "sharding.states is ddp (sharding.states: fsdp)"),
        ({}, 16, None, "sharding.states is none"),
        ({}, 16, Fsdp(degree=8), "the 8 ranks that share a copy are on one node"),
        ({"ranks_per_node": 6}, 16, Fsdp(), "nodes of 6 ranks do not divide the 16"),
        ({"ranks_per_node": 1}, 16, Fsdp(), "every node has one rank"),
        ({}, 16, Fsdp(reshard_after_forward=False), "nothing is gathered again in backward"),
        (QUANTISED, 16, Fsdp(reshard_after_forward=False), None),
        (QUANTISED, 4, Fsdp(), None),
        ({}, 16, Fsdp(), None),
        ({"ranks_per_node": 2}, 8, Fsdp(), None),
    ],
)
def test_fits(knobs: dict[str, Any], ranks: int, states: Technique | None, reason: str | None) -> None:
    found = ZeroPp(**knobs).fits(program(ranks=ranks), beside(ranks, states))
    assert found is None if reason is None else reason in str(found)


def test_a_node_on_cpu_is_the_machine_unless_the_config_says_otherwise() -> None:
    assert "share a node" in str(ZeroPp().fits(program(ranks=4), beside(4, Fsdp(), "cpu")))
    assert ZeroPp(ranks_per_node=2).fits(program(ranks=4), beside(4, Fsdp(), "cpu")) is None


def test_only_floats_of_one_type_are_quantised() -> None:
    mixed = Program((RankClass(16, with_parameter(5, itemsize=2).step),), 2)
    assert "several types" in str(ZeroPp(**QUANTISED).fits(mixed, beside(16, Fsdp())))
    assert ZeroPp().fits(mixed, beside(16, Fsdp())) is None


def test_what_quantises_is_lossy_and_what_does_nothing_is_refused() -> None:
    assert ZeroPp().exactly() is Exactness.BITWISE
    assert ZeroPp(qwz=True).exactly() is Exactness.LOSSY
    with pytest.raises(ValidationError, match="of the gradients that qgz quantises"):
        ZeroPp(error_feedback=True)
    with pytest.raises(ValidationError, match=r"it is sharding\.communication: none"):
        ZeroPp(hpz=False)


def test_the_plan_is_the_size_of_a_node() -> None:
    on = beside(16, Fsdp())
    plan = ZeroPp().plan(program(ranks=16), on)
    assert plan.document() == {"ranks_per_node": 8}
    assert ZeroPp().explain(plan) == ("nodes of 8 ranks",)
    assert ZeroPp(ranks_per_node=4).plan(program(ranks=16), on).is_empty
    assert ZeroPp().record(on) == ZeroPp(ranks_per_node=8).record(on) != ZeroPp(ranks_per_node=4).record(on)


def test_every_choice_is_a_valid_knob() -> None:
    assert find("sharding.communication", "zeropp") is ZeroPp
    assert ZeroPp(hpz=False, qgz=True).exactly() is Exactness.LOSSY
    for knob, values in ZeroPp().choices().items():
        assert values[0] == getattr(ZeroPp(), knob)
        for value in values:
            ZeroPp(**{"qgz": True, knob: value} if knob != "qgz" else {"hpz": True, knob: value})


class TestZeroPp(ShardedSuite):
    technique = ZeroPp
    ranks, beside, briefly = 4, (Fsdp(),), False
    models: ClassVar[dict[str, Path]] = {"lora": ZOO["lora"]}

    @classmethod
    def default(cls) -> ZeroPp:
        return ZeroPp(ranks_per_node=2)
