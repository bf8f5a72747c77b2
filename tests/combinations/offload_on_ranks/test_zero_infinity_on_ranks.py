"""Weights of blocks on SSD, host and device with several ranks: replicated with DDP, a rank's rows with
FSDP.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.gloo import run_ranks
from support.ranks.block_offload_on_ranks import check_on_ranks, started
from support.suites.layer_major_suite import CHAIN

from memtune.errors import ApplyError
from memtune.program.parameter_columns import columns_of
from memtune.program.step import Resource, Tier
from memtune.search_spaces.offload.states.optimizer_cpu import OptimizerCpu
from memtune.search_spaces.offload.states.zero_infinity import ZeroInfinity
from memtune.search_spaces.recompute.full import Full
from memtune.search_spaces.sharding.parallel.tensor import TensorParallel
from memtune.search_spaces.sharding.states.ddp import Ddp
from memtune.search_spaces.sharding.states.fsdp import Fsdp
from memtune.search_spaces.sharding.states.zero1 import Zero1
from memtune.technique import Technique
from memtune.testing.drift_check import plain_program, target_of
from memtune.testing.training import settings_of

ON_HOST = ZeroInfinity(kind="zero_infinity", parameters="host")
ON_SSD = ZeroInfinity(kind="zero_infinity", parameters="ssd")
ALL_ON_SSD = ON_SSD.model_copy(update={"gradients": "ssd"})
WAYS = {
    "host": ON_HOST,
    "ssd": ON_SSD,
    "gradients": ALL_ON_SSD,
    "one block": ON_SSD.model_copy(update={"on_device": 1}),
}
REPLICAS, DIVIDED = Ddp(), Fsdp(kind="fsdp")
NATIVE = OptimizerCpu(update="native")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.usefixtures("ssd")]


def under(states: Technique, *names: str) -> dict[str, tuple[Technique, Technique, Technique]]:
    return {name: (states, WAYS[name], NATIVE) for name in names or WAYS}


@pytest.mark.slow
def test_rows_of_blocks_on_ssd(tmp_path: Path) -> None:
    """Each rank writes its rows once, and reads them for forward, except for two blocks again for backward,
    and in the step.
    """
    step = check_on_ranks(under(DIVIDED, "gradients"), tmp_path, other_slots=(Full(),))["gradients"]
    columns = columns_of(step.parameters)
    sizes = columns.numel * columns.itemsize
    inside, everything = int(sizes[columns.block >= 0].sum()), int(sizes.sum())
    written = int(step.ops.traffic_bytes[step.ops.resource == Resource.SSD_WRITE].sum())
    assert (
        written == 3 * everything + 2 * inside
    )  # master and moments; weight and gradient of offloaded parameters
    assert step.peak_bytes(Tier.SSD) == written


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("states", [REPLICAS, DIVIDED], ids=lambda each: each.kind)
def test_tiers_train_as_one_rank(tmp_path: Path, states: Technique, parts: int) -> None:
    """Replicas sum averages, not their own gradients, so with accumulation their sums have another order."""
    check_on_ranks(under(states), tmp_path, parts=parts, bitwise=parts == 1 or states is DIVIDED)


@pytest.mark.slow
@pytest.mark.parametrize("states", [REPLICAS, DIVIDED], ids=lambda each: each.kind)
def test_three_ranks_pad_rows(tmp_path: Path, states: Technique) -> None:
    """Three ranks do not divide the rows."""
    check_on_ranks(under(states, "gradients"), tmp_path, ranks=3, bitwise=False)


def test_other_ways_to_use_ranks_are_refused() -> None:
    program = plain_program(CHAIN)
    for states, parallel, why in (
        (Zero1(kind="zero1"), None, "whole on each, or gathered from all"),
        (DIVIDED.model_copy(update={"prefetch": 1}), None, "not with prefetch"),
        (DIVIDED, TensorParallel(kind="tensor"), "whole on each rank"),
    ):
        others = [each for each in (states, parallel) if each is not None]
        assert why in str(ON_HOST.fits(program, replace(target_of(ON_HOST, *others), ranks=2)))
    stays = ON_HOST.model_copy(update={"parameters": "device"})
    assert stays.fits(program, replace(target_of(stays, Zero1(kind="zero1")), ranks=2)) is None


def refusals() -> list[str]:
    """Return the errors of `apply`."""
    found = []
    for states in (Zero1(kind="zero1"), DIVIDED.model_copy(update={"prefetch": 1})):
        try:
            started({"settings": settings_of(states, ON_HOST)})
        except ApplyError as refused:
            found.append(str(refused))
    return found


@pytest.mark.slow
def test_apply_refuses_them_by_name() -> None:
    for said in run_ranks(refusals, 2):
        assert [
            why in each for why, each in zip(("gathered from all", "not with prefetch"), said, strict=True)
        ] == [True, True]
