"""The recompute pass by itself: the ops that run again, their place, and unchanged ops."""

from __future__ import annotations

import numpy as np
import pytest
from support.zoo_paths import ZOO

from memtune.activations.recompute.recompute_pass import recompute_blocks
from memtune.program.step import Phase, Step
from memtune.testing.drift_check import plain_program


def step_of(model: str) -> Step:
    return plain_program(ZOO[model]).step


@pytest.mark.parametrize("model", ZOO)
def test_recompute_of_each_single_block_is_valid(model: str) -> None:
    step = step_of(model)
    for block in range(len(step.blocks)):
        new = recompute_blocks(step, [block])
        new.validate()
        again = new.ops.phase == Phase.RECOMPUTE
        assert set(new.ops.block[again]) <= {block}
        copies = (new.ops.phase == Phase.FORWARD).sum() - (
            step.ops.phase == Phase.FORWARD
        ).sum()  # of buffers that it reads back
        assert new.ops.n == step.ops.n + again.sum() + copies
        assert copies == 0 or model == "inplace_views"


def test_recompute_without_saves_returns_the_step() -> None:
    step = step_of("gpt")
    assert recompute_blocks(step, []) is step
    step = step_of("lstm")
    assert recompute_blocks(step, [step.blocks.index("embedding")]) is step


def test_second_run_is_between_forward_and_backward() -> None:
    new = recompute_blocks(step_of("gpt"), [0, 1, 2, 3])
    for block in range(4):
        mine = new.ops.block == block
        first, again, back = (np.flatnonzero(mine & (new.ops.phase == phase)) for phase in (1, 2, 3))
        assert first.max() < again.min()
        assert again.max() < back.max()
        assert (new.ops.copy_of[again] >= 0).all()
        assert [new.ops.name[i] for i in new.ops.copy_of[again]] == [new.ops.name[i] for i in again]


def test_backward_reads_only_outputs_of_the_second_run() -> None:
    new = recompute_blocks(step_of("gpt"), [1])
    reads = (new.ops.phase[new.uses.op] == Phase.BACKWARD) & (new.ops.block[new.uses.op] == 1)
    producers = new.storages.producer[new.uses.storage[reads]]
    forward = (producers >= 0) & (new.ops.phase[producers] == Phase.FORWARD)
    assert set(new.ops.block[producers[forward]]) <= {0}  # the block's input alone


def test_keep_all_recomputes_nothing() -> None:
    step = step_of("gpt")
    new = recompute_blocks(step, [0, 1], lambda name: True)
    written = {step.names[i] for i in new.ops.name[new.ops.phase == Phase.RECOMPUTE]}
    assert not any(
        "addmm" in name or "norm" in name for name in written
    )  # only what is written into later, and who writes


def test_peak_falls_with_the_recomputed_blocks() -> None:
    step = step_of("gpt")
    saved = [recompute_blocks(step, list(range(n))).saved_bytes() for n in range(5)]
    assert saved == sorted(saved, reverse=True)
    assert len(set(saved)) == 5
