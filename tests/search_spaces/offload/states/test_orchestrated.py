"""Coordinated offload: ranks of one link copy other blocks or one at a time, and train as replicas with a
host optimizer.

Distinguishing test: `test_ranks_of_a_link_load_different_blocks_in_every_moment` and, for the token,
`test_token_is_exclusive_and_first_come_first_served`: with mode `none`, all load the same blocks at the same
time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support.gloo import run_ranks
from support.sharding_programs import program
from support.suites.block_offload_suite import block_bytes
from support.suites.sharded_suite import ShardedSuite
from support.zoo_paths import ZOO

from memtune import hardware
from memtune.api import Tuned, apply
from memtune.errors import ApplyError
from memtune.offload.parameters.link_coordination import place_of, swapped_blocks
from memtune.program.parameter_columns import columns_of
from memtune.program.residency import order_of_use
from memtune.program.step import Phase, Resource, Step
from memtune.search_spaces.offload.states.optimizer_cpu import OptimizerCpu
from memtune.search_spaces.offload.states.orchestrated import TensorMovement
from memtune.search_spaces.sharding.states.ddp import Ddp
from memtune.search_spaces.sharding.states.fsdp import Fsdp
from memtune.technique import Target, Technique
from memtune.testing.training import build, settings_of

PAIR = TensorMovement(group=2)
TOKEN = TensorMovement(mode="token", group=2, slot_mib=1)


class TestOrchestrated(ShardedSuite):
    technique = TensorMovement
    variants = (PAIR, TOKEN)
    other_slots: ClassVar = (Ddp(),)
    briefly = False

    @classmethod
    def default(cls) -> Technique:
        return PAIR

    def sabotage(self, tuned: Tuned) -> bool:
        for name in tuned._context.blocks:
            for parameter in tuned._context.model.get_submodule(name).parameters():
                parameter.untyped_storage().resize_(parameter.nbytes)
        return True


def chosen(mine: TensorMovement, ranks: int, **changes: Any) -> Target:
    machine = replace(hardware.find("a100-80g"), **changes)
    return Target(machine, ranks, chosen={"sharding.states": Ddp(), mine.slot: mine})


def loaded(step: Step) -> list[tuple[int, int]]:
    """Return (moment, block) of every loaded block."""
    copies = np.flatnonzero((step.ops.resource == Resource.HOST_TO_DEVICE) & (step.ops.call >= 0))
    written = np.isin(step.uses.op, copies) & (step.uses.mode == 1)
    block = columns_of(step.parameters).block[step.storages.owner[step.uses.storage[written]]]
    uses = order_of_use(len(step.blocks))
    half = len(step.blocks) * (step.ops.phase[step.uses.op[written]] > Phase.FORWARD)
    moment = [
        uses.index(int(call), int(first))
        for call, first in zip(step.ops.call[step.uses.op[written]], half, strict=True)
    ]
    return sorted(set(zip(moment, block.tolist(), strict=True)))


@pytest.mark.parametrize("group", [2, 3, 4])
@pytest.mark.parametrize("blocks", [4, 12, 13])
def test_block_masks_are_disjoint_and_equal(group: int, blocks: int) -> None:
    """Every block is offloaded by one rank of a group, each rank offloads as many, one more if they do not
    divide the blocks.
    """
    masks = [swapped_blocks(blocks, group, place_of(rank, 8, group)) for rank in range(group)]
    assert sorted(block for mask in masks for block in mask) == list(range(blocks))
    sizes = [len(mask) for mask in masks]
    assert sizes[0] == blocks // group <= max(sizes) <= sizes[0] + 1


def test_groups_do_not_cross_nodes() -> None:
    assert [place_of(rank, 4, 2) for rank in range(8)] == [0, 1] * 4
    assert [place_of(rank, 3, 2) for rank in range(6)] == [0, 1, 0] * 2


def test_ranks_of_a_link_load_different_blocks_in_every_moment() -> None:
    """The mechanism: disjoint selection. Without it both ranks load the same blocks at once."""
    whole, machine = program(ranks=2), chosen(PAIR, 2)
    plan = PAIR.plan(whole, machine)
    one, other = (loaded(each.step) for each in PAIR.rewrite(whole, plan, machine).rank_classes)
    assert {block for _, block in one} | {block for _, block in other} == {0, 1, 2, 3}
    assert not {block for _, block in one} & {block for _, block in other}
    alike = TensorMovement(mode="none", group=2)
    (same,) = alike.rewrite(whole, alike.plan(whole, chosen(alike, 2)), chosen(alike, 2)).rank_classes
    assert same.count == 2
    assert len(loaded(same.step)) == len(one) == len(other)


@pytest.mark.parametrize("stride", [2, 4])
def test_offloaded_blocks_are_loaded_once_per_pass(stride: int) -> None:
    """Bytes H2D: the weights of the offloaded blocks once a pass, the last block's once in all; none of the
    others.
    """
    mine = TensorMovement(group=2, stride=stride, window=1)
    whole, machine = program(ranks=2), chosen(mine, 2)
    for place, each in enumerate(mine.rewrite(whole, mine.plan(whole, machine), machine).rank_classes):
        blocks = swapped_blocks(4, stride, place)
        sizes = block_bytes(whole.step)
        ups = (each.step.ops.resource == Resource.HOST_TO_DEVICE) & (each.step.ops.call >= 0)
        assert int(each.step.ops.traffic_bytes[ups].sum()) == sum(
            sizes[b] * (1 if b == 3 else 2) for b in blocks
        )


def test_fits_refuses_with_a_reason() -> None:
    whole = program(ranks=2)
    assert "one rank" in str(PAIR.fits(program(), chosen(PAIR, 1)))
    assert "its own link" in str(
        TensorMovement().fits(whole, chosen(TensorMovement(), 2, gpus_per_pcie_root=1))
    )
    assert TensorMovement().fits(whole, chosen(TensorMovement(), 2, gpus_per_pcie_root=2)) is None
    sharded = Target(hardware.detect("cpu"), 2, chosen={"sharding.states": Fsdp()})
    assert "it needs replicas" in str(PAIR.fits(whole, sharded))
    assert "the same blocks" in str(TensorMovement(group=4, stride=2).fits(program(ranks=4), chosen(PAIR, 4)))
    assert "4 blocks only" in str(TensorMovement(group=2, stride=5).fits(whole, chosen(PAIR, 2)))
    assert "4 blocks only" in str(TensorMovement(group=2, window=5).fits(whole, chosen(PAIR, 2)))


def test_fits_refuses_one_rank_and_sharded_ranks() -> None:
    workload, model, optimizer = build(ZOO["gpt"])
    assert workload is not None
    with pytest.raises(ApplyError, match="it needs replicas") as caught:
        apply(model, optimizer, {"settings": settings_of(PAIR)}, strict=False)
    assert caught.value.code == "MT364"


def trained_both(mine: TensorMovement) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return weights with the technique, and with only the optimizer on the host."""
    return trained(mine), trained(None)


def trained(mine: TensorMovement | None) -> dict[str, Any]:
    """Return weights after three steps of this rank's own batches on replicas, and the audit."""
    workload, model, optimizer = build(ZOO["gpt"])
    settings = settings_of(Ddp(), OptimizerCpu() if mine is None else mine)
    tuned = apply(model, optimizer, {"settings": settings}, loss=workload.loss, strict=False)
    torch.manual_seed(torch.distributed.get_rank())
    for _ in range(3):
        tuned.step([workload.make_batch(2) for _ in range(2)])
    return {"weights": tuned.state_dict()["model"], "audit": tuned.audit()["offload.states"]}


@pytest.mark.parametrize(
    "mine", [PAIR, pytest.param(TOKEN, marks=pytest.mark.slow)], ids=lambda each: each.mode
)
def test_training_is_bitwise_that_of_replicas_with_a_host_optimizer(mine: TensorMovement) -> None:
    found, wanted = zip(*run_ranks(trained_both, 2, mine), strict=True)
    blocks = [rank["audit"]["swapped_blocks"] for rank in found]
    assert blocks == ([[1, 3], [0, 2]] if mine.mode == "disjoint" else [[1, 3], [1, 3]])
    assert all(("times_held" in rank["audit"]) == (mine.mode == "token") for rank in found)
    for one, other in zip(found, wanted, strict=True):
        assert all(torch.equal(weight, other["weights"][name]) for name, weight in one["weights"].items())


def trained_until_killed(kills_at: int) -> str:
    """Train until rank 1 is killed while it holds the token; return the error of rank 0, which has then held
    the token.
    """
    workload, model, optimizer = build(ZOO["gpt"])
    settings = settings_of(Ddp(), TOKEN)
    tuned = apply(model, optimizer, {"settings": settings}, loss=workload.loss, strict=False)
    token = tuned._context.checks["offload.states"].__self__._token  # type: ignore[attr-defined]
    if torch.distributed.get_rank() == 1:
        exclusive = token.exclusive

        @contextmanager
        def killed() -> Iterator[int]:
            with exclusive() as number:
                if token.times_held == kills_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield number

        token.exclusive = killed
    try:
        for _ in range(20):
            tuned.step([workload.make_batch(2)])
    except Exception as error:  # gloo's, or that of the mechanism which waits for it
        with token.exclusive():
            return type(error).__name__
    return "no error"


def test_rank_killed_while_it_holds_the_token_stops_no_other_rank_at_the_link() -> None:
    """The other rank copies on, and learns of the death from the next collective."""
    found = run_ranks(trained_until_killed, 2, 7, may_fail=True)
    assert found[1] is None
    assert found[0] not in (None, "no error")
