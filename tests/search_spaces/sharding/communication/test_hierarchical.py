"""Gathers in two hops: conditions, and the suite's checks. Numbers: tests/parallel/collectives.

Distinguishing test: of a unit of M bytes over p ranks, (p/k - 1)·M/p reach a rank between nodes and (k -
1)·M/k inside its own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from support.sharding_programs import program, target
from support.suites.sharded_suite import NOT_AT_THE_PEAK, ShardedSuite
from support.zoo_paths import ZOO

from memtune.search_spaces.sharding.communication.hierarchical import Hierarchical
from memtune.search_spaces.sharding.states.fsdp import Fsdp


@pytest.mark.parametrize(
    ("ranks", "per_node", "reason"),
    [
        (8, None, "all 8 ranks share a node"),
        (16, None, None),
        (16, 6, "do not divide"),
        (40, 2, "20 nodes share a copy"),
    ],
)
def test_fits_over_several_but_not_too_many_nodes(
    ranks: int, per_node: int | None, reason: str | None
) -> None:
    found = Hierarchical(ranks_per_node=per_node).fits(
        program(ranks=ranks), replace(target(ranks), chosen={"sharding.states": Fsdp()})
    )
    assert found is None if reason is None else reason in str(found)


class TestHierarchical(ShardedSuite):
    technique = Hierarchical
    ranks, other_slots, briefly = 4, (Fsdp(),), False
    models: ClassVar[dict[str, Path]] = {"lora": ZOO["lora"]}
    # The same bits and the same peak over other links: tests/parallel/collectives counts the bytes of each
    # link (test_fsdp_comm_hooks.py), and compares rewrite and executed ops (test_collectives_pass.py).
    not_shown = (*NOT_AT_THE_PEAK, "rewrite does nothing", "apply does nothing")

    @classmethod
    def default(cls) -> Hierarchical:
        return Hierarchical(ranks_per_node=2)
