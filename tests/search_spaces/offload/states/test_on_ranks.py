"""Offload of states on several ranks: the bits of the native update under the same sharding, counted bytes, and the peak."""

from __future__ import annotations

from pathlib import Path

import pytest
from ssd_ranks import check_on_ranks

from memtune.search_spaces.offload.states.optimizer_cpu import OptimizerCpu
from memtune.search_spaces.offload.states.smart_infinity import SmartInfinity
from memtune.search_spaces.offload.states.zero_infinity import ZeroInfinity
from memtune.search_spaces.sharding.states.ddp import Ddp
from memtune.search_spaces.sharding.states.fsdp import Fsdp
from memtune.search_spaces.sharding.states.zero1 import Zero1
from memtune.technique import Technique

NATIVE = OptimizerCpu(kind="optimizer_cpu", update="native")
SHARDINGS = [Ddp(kind="ddp"), Zero1(kind="zero1"), Fsdp(kind="fsdp")]


@pytest.mark.slow
@pytest.mark.usefixtures("ssd")
@pytest.mark.parametrize("sharding", SHARDINGS, ids=lambda each: each.kind)
@pytest.mark.parametrize(
    "technique", [SmartInfinity(kind="smart_infinity"), ZeroInfinity(kind="zero_infinity")], ids=lambda each: each.kind
)
def test_state_on_ssd(tmp_path: Path, technique: Technique, sharding: Technique) -> None:
    """Each rank has its part of the state in files, or updaters, of its own."""
    check_on_ranks(tmp_path, technique, sharding, NATIVE)
