"""Calls of a block: told apart where they can be, and put together again."""

from __future__ import annotations

import numpy as np
import pytest
from zoo_paths import ZOO

from memtune.autotune.record import record
from memtune.passes.calls import join_calls, split_calls
from memtune.program import Phase, Step
from memtune.testing.drift import plain_program
from memtune.workload import Workload

SHARED = """
import torch
from torch import nn

class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))

    def forward(self, x):
        for _ in range(3):
            for block in self.blocks:
                x = block(x)
        return x

def model():
    return Shared()

def batch(size):
    return torch.randn(size, 8)

def loss(model, batch):
    return model(batch).mean()
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Step:
    path = tmp_path_factory.mktemp("calls") / "shared.py"
    path.write_text(SHARED)
    return record(Workload.load(path)).step


@pytest.mark.parametrize("model", ZOO)
def test_blocks_that_run_once_stay_as_they_are(model: str) -> None:
    step = plain_program(ZOO[model]).step
    assert split_calls(step)[0] is step


def test_each_call_has_its_own_ops_saves_and_input(shared: Step) -> None:
    calls, block_of = split_calls(shared)
    assert block_of.tolist() == [0, 1, 0, 1, 0, 1]
    for call in range(6):
        forward, backward = (np.flatnonzero((calls.op_block == call) & (calls.op_phase == phase)) for phase in (1, 3))
        assert len(forward) == 2
        assert len(backward) >= 2
        saved = calls.producer[calls.save_storage[calls.save_block == call]]
        assert set(saved[saved >= forward[0]]) <= set(forward)
        (storage,) = calls.input_storage[calls.input_block == call]
        assert calls.producer[storage] == forward[0] - 1
    backward_at = [np.flatnonzero((calls.op_block == call) & (calls.op_phase == Phase.BACKWARD)).min() for call in range(6)]
    assert backward_at == sorted(backward_at, reverse=True)


def test_put_together_again_it_is_the_step_it_was(shared: Step) -> None:
    calls, block_of = split_calls(shared)
    again = join_calls(calls, shared.blocks, block_of)
    assert again.blocks == shared.blocks
    assert np.array_equal(again.save_block, shared.save_block)
    assert np.array_equal(again.input_block, shared.input_block)
    inside = (shared.op_phase == Phase.FORWARD) | ((shared.op_phase == Phase.BACKWARD) & (shared.op_node >= 0))
    assert np.array_equal(again.op_block[inside], shared.op_block[inside])
