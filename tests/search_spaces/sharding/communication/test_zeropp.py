"""ZeRO++: conditions, exactness and plan. Numbers: tests/parallel/collectives.

Distinguishing test: with hpZ backward's gathers send no byte between nodes; qwZ and qgZ send
`bits`/(8·itemsize) of the bytes and 4 bytes per block.
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

QUANTIZED = {"hpz": False, "qwz": True}


def target_with(ranks: int, states: Technique | None, device: str = "cuda") -> Target:
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
        ({"ranks_per_node": 1}, 16, Fsdp(), "every node has one of the ranks"),
        ({}, 16, Fsdp(reshard_after_forward=False), "nothing is gathered again in backward"),
        (QUANTIZED, 16, Fsdp(reshard_after_forward=False), None),
        (QUANTIZED, 4, Fsdp(), None),
        ({}, 16, Fsdp(), None),
        ({"ranks_per_node": 2}, 8, Fsdp(), None),
    ],
)
def test_zeropp_fits_or_gives_the_reason(
    knobs: dict[str, Any], ranks: int, states: Technique | None, reason: str | None
) -> None:
    found = ZeroPp(**knobs).fits(program(ranks=ranks), target_with(ranks, states))
    assert found is None if reason is None else reason in str(found)


def test_node_on_cpu_is_the_machine_unless_configured() -> None:
    assert "share a node" in str(ZeroPp().fits(program(ranks=4), target_with(4, Fsdp(), "cpu")))
    assert ZeroPp(ranks_per_node=2).fits(program(ranks=4), target_with(4, Fsdp(), "cpu")) is None


def test_fits_refuses_to_quantize_mixed_types() -> None:
    mixed = Program((RankClass(16, with_parameter(5, itemsize=2).step),), 2)
    assert "several types" in str(ZeroPp(**QUANTIZED).fits(mixed, target_with(16, Fsdp())))
    assert ZeroPp().fits(mixed, target_with(16, Fsdp())) is None


def test_quantization_is_lossy_and_no_effect_is_refused() -> None:
    assert ZeroPp().exactly() is Exactness.BITWISE
    assert ZeroPp(qwz=True).exactly() is Exactness.LOSSY
    with pytest.raises(ValidationError, match="corrects the gradients that qgz quantizes"):
        ZeroPp(error_feedback=True)
    with pytest.raises(ValidationError, match=r"it is sharding\.communication: none"):
        ZeroPp(hpz=False)


def test_plan_has_the_size_of_a_node() -> None:
    on = target_with(16, Fsdp())
    plan = ZeroPp().plan(program(ranks=16), on)
    assert plan.document() == {"ranks_per_node": 8}
    assert ZeroPp().explain(plan) == ("nodes of 8 ranks",)
    assert ZeroPp(ranks_per_node=4).plan(program(ranks=16), on).is_empty
    assert ZeroPp().record(on) == ZeroPp(ranks_per_node=8).record(on) != ZeroPp(ranks_per_node=4).record(on)


def test_choices_are_valid_knobs() -> None:
    assert find("sharding.communication", "zeropp") is ZeroPp
    assert ZeroPp(hpz=False, qgz=True).exactly() is Exactness.LOSSY
    for knob, values in ZeroPp().choices().items():
        assert values[0] == getattr(ZeroPp(), knob)
        for value in values:
            ZeroPp(**{"qgz": True, knob: value} if knob != "qgz" else {"hpz": True, knob: value})


class TestZeroPp(ShardedSuite):
    technique = ZeroPp
    ranks, other_slots, briefly = 4, (Fsdp(),), False
    models: ClassVar[dict[str, Path]] = {"lora": ZOO["lora"]}

    @classmethod
    def default(cls) -> ZeroPp:
        return ZeroPp(ranks_per_node=2)
