"""Block gradients that are averaged when their block is ready: a rank that lacks some raises, and none waits
forever.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from support.gloo import run_ranks
from support.ranks.block_offload_on_ranks import share_of, started
from support.suites.layer_major_suite import CHAIN

from memtune.activations.recompute.activation_table import ActivationTable
from memtune.autotune.record_parallel.fake_process_group import fake_ranks
from memtune.errors import ApplyError, MemtuneError
from memtune.offload.optimizer.host_optimizer import HostOptimizer
from memtune.offload.parameters.block_gradients import BlockGradients
from memtune.offload.parameters.block_units import OffloadedBlocks
from memtune.parallel.replicas.gradient_reducer import GradientReducer
from memtune.runtime.context import Context
from memtune.testing.training import build
from memtune.workload.repeated_blocks import find_blocks

RANKS = 2
REPLICAS = {"sharding": {"states": {"kind": "ddp"}}, "offload": {"states": {"kind": "l2l"}}}


def skipped(settings: dict[str, Any], index: int) -> str:
    """Return the error on this rank in the step in which rank 1 skips the block `index`; '' for none."""
    workload, tuned = started({"settings": settings})
    tuned.step(share_of(workload, 0, 1, RANKS))
    model: Any = tuned._context.model
    if dist.get_rank() == 1:
        del model.h[index]
        # Meanwhile this rank's last messages meet the other's, which has one more.
        GradientReducer.finish = delayed(GradientReducer.finish)  # type: ignore[method-assign]
    try:
        for step in range(1, 3):
            tuned.step(share_of(workload, step, 1, RANKS))
    except MemtuneError as error:
        return str(error)
    return ""


def delayed(finish: Callable[[GradientReducer], Any]) -> Callable[[GradientReducer], Any]:
    """Return `finish` half a second later."""

    def called(reducer: GradientReducer) -> Any:
        time.sleep(0.5)
        return finish(reducer)

    return called


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "index"), [("l2l", 0), ("l2l", 2), ("l2l", -1), ("zero_offload", 2), ("zero_offload", -1)]
)
def test_rank_that_skips_a_block_raises(kind: str, index: int) -> None:
    """The other rank waits in a collective that never starts, and ends when this one has ended: gloo aborts
    it.

    Gradients that are averaged one by one have messages of their own sizes: out of order gloo
    ends the process.
    """
    settings = REPLICAS | {"offload": {"states": {"kind": kind}}}
    other, said = run_ranks(skipped, RANKS, settings, index, may_fail=True, deadline_s=100)
    assert "MT346 12 parameters got no gradient in this backward" in said
    assert "every rank needs each of them" in said
    assert other is None or "Another rank ended" in other


@pytest.mark.slow
def test_ranks_that_all_skip_the_same_block_raise_the_same_error() -> None:
    assert all("12 parameters got no gradient" in said for said in run_ranks(skipped_by_all, RANKS))


def skipped_by_all() -> str:
    workload, tuned = started({"settings": REPLICAS})
    model: Any = tuned._context.model
    del model.h[1]
    with pytest.raises(ApplyError) as caught:
        tuned.step(share_of(workload, 0, 1, RANKS))
    return str(caught.value)


def test_offload_of_gradients_without_averaging_is_refused() -> None:
    """Several replicas without DDP, whose runner would leave the blocks' gradients to the offloader."""
    _, model, optimizer = build(CHAIN)
    blocks = find_blocks(model)
    with fake_ranks(RANKS):
        context = Context(
            model, optimizer, blocks, next(model.parameters()).device, ActivationTable(model, blocks)
        )
        with pytest.raises(ApplyError, match="would not be averaged among ranks"):
            BlockGradients(context, OffloadedBlocks(context, HostOptimizer(context, "native")))
