"""The recompute pass on its own: what runs again, where it starts and stops, and what it leaves alone."""

from __future__ import annotations

import numpy as np
import pytest
from zoo_paths import ZOO

from memtune.passes.recompute import recompute_blocks
from memtune.program import Phase, Step
from memtune.testing.drift import plain_program


def step_of(model: str) -> Step:
    return plain_program(ZOO[model]).step


@pytest.mark.parametrize("model", ZOO)
def test_every_block_alone_is_a_valid_step(model: str) -> None:
    step = step_of(model)
    for block in range(len(step.blocks)):
        new = recompute_blocks(step, [block])
        new.validate()
        again = new.op_phase == Phase.RECOMPUTE
        assert set(new.op_block[again]) <= {block}
        copies = (new.op_phase == Phase.FORWARD).sum() - (step.op_phase == Phase.FORWARD).sum()  # of buffers that it reads back
        assert new.n_ops == step.n_ops + again.sum() + copies
        assert copies == 0 or model == "inplace_views"


def test_no_block_and_blocks_that_save_nothing_change_nothing() -> None:
    step = step_of("gpt")
    assert recompute_blocks(step, []) is step
    step = step_of("lstm")
    assert recompute_blocks(step, [step.blocks.index("embedding")]) is step


def test_a_second_run_comes_between_the_blocks_forward_and_its_backward() -> None:
    new = recompute_blocks(step_of("gpt"), [0, 1, 2, 3])
    for block in range(4):
        mine = new.op_block == block
        first, again, back = (np.flatnonzero(mine & (new.op_phase == phase)) for phase in (1, 2, 3))
        assert first.max() < again.min()
        assert again.max() < back.max()
        assert (new.op_copy_of[again] >= 0).all()
        assert [new.op_name[i] for i in new.op_copy_of[again]] == [new.op_name[i] for i in again]


def test_backward_reads_the_second_runs_products_and_no_others() -> None:
    new = recompute_blocks(step_of("gpt"), [1])
    reads = (new.op_phase[new.use_op] == Phase.BACKWARD) & (new.op_block[new.use_op] == 1)
    producers = new.producer[new.use_storage[reads]]
    forward = (producers >= 0) & (new.op_phase[producers] == Phase.FORWARD)
    assert set(new.op_block[producers[forward]]) <= {0}  # the block's input alone


def test_keeping_everything_runs_nothing_again() -> None:
    step = step_of("gpt")
    new = recompute_blocks(step, [0, 1], lambda name: True)
    written = {step.names[i] for i in new.op_name[new.op_phase == Phase.RECOMPUTE]}
    assert not any("addmm" in name or "norm" in name for name in written)  # only what is written into later, and who writes


def test_peak_falls_with_the_blocks_that_are_recomputed() -> None:
    step = step_of("gpt")
    saved = [recompute_blocks(step, list(range(n))).saved_bytes() for n in range(5)]
    assert saved == sorted(saved, reverse=True)
    assert len(set(saved)) == 5
