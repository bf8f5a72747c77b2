"""Regions of single blocks equal the captures of live blocks, and a step run by plain schedules is the plain
step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.training_runs import same, trained_values
from support.zoo_paths import ZOO
from torch import nn

from memtune.activations.capture.region_capture import capture, shapes_of
from memtune.activations.schedules.block_regions_pass import (
    BlockRegions,
    block_regions_of,
    find_block_schedule_error,
    run_blocks,
)
from memtune.activations.schedules.scheduled_region import ScheduledRegion
from memtune.program.op_schedule import OpGraph, Schedule, build_schedule, plain_schedule
from memtune.program.step import Phase, Step
from memtune.runtime.rng_state import autocast_now
from memtune.testing.drift_check import recording_of
from memtune.testing.training import build

OTHERS = ("hf_llama", "autocast", "tied", "lora", "inplace_views", "cnn_bn", "tobf16", "lstm")


def regions_of(name: str) -> tuple[Step, BlockRegions]:
    step = recording_of(ZOO[name]).at(4)
    found = block_regions_of(step)
    assert isinstance(found, BlockRegions), found
    return step, found


def again(graph: OpGraph) -> Schedule:
    """Return a schedule that recomputes all of the forward that may run again, before backward."""
    ops = [op for op in range(graph.n_forward) if op not in graph.once]
    found = build_schedule(graph, range(graph.n_forward), [*ops, *range(graph.n_forward, graph.n_ops)])
    return plain_schedule(graph) if find_block_schedule_error(graph, found) else found


def captured(name: str) -> dict[str, OpGraph]:
    """Return by block the ops of its module's forward and backward when the model is called."""
    workload, model, _ = build(ZOO[name])
    found: dict[str, OpGraph] = {}
    step, _regions = regions_of(name)

    def look(module: nn.Module, args: Any, kwargs: Any) -> None:
        tape = capture(module, module.forward, shapes_of((args, kwargs)), autocast_now(), lambda i, out: True)
        found[step.blocks[len(found)]] = tape.graph

    hooks = [
        model.get_submodule(each).register_forward_pre_hook(look, with_kwargs=True) for each in step.blocks
    ]
    workload.loss(model, workload.make_batch(4))
    for each in hooks:
        each.remove()
    return found


def check_equal(name: str) -> None:
    step, regions = regions_of(name)
    live = captured(name)
    for block, graph_index in zip(regions.blocks, regions.graph_index.tolist(), strict=True):
        assert live[step.blocks[block]].sha256 == regions.graphs[graph_index].sha256


def test_regions_equal_the_captured_blocks() -> None:
    check_equal("gpt")


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_regions_equal_the_captured_blocks_of_other_models(name: str) -> None:
    check_equal(name)


def test_plain_schedules_give_the_plain_step() -> None:
    step, regions = regions_of("gpt")
    new = run_blocks(step, regions, [regions.plain[graph_index] for graph_index in regions.graph_index])
    new.validate()
    assert len(regions.graphs) == 1  # four equal blocks
    assert new.ops.n == step.ops.n
    less = (
        step.without_donations().live_bytes() - new.live_bytes()
    )  # autograd frees them when a node of several ops has run
    assert (less >= 0).all()
    assert not less[step.ops.phase != Phase.BACKWARD].any()
    assert new.peak_bytes() == step.without_donations().peak_bytes()


def test_recomputation_is_inside_its_blocks_backward() -> None:
    step, regions = regions_of("gpt")
    new = run_blocks(
        step, regions, [again(regions.graphs[graph_index]) for graph_index in regions.graph_index]
    )
    new.validate()
    second = new.ops.phase == Phase.RECOMPUTE
    assert second.sum() == 4 * regions.graphs[0].n_forward
    backward = new.ops.block[(second | (new.ops.phase == Phase.BACKWARD)) & (new.ops.block >= 0)]
    assert backward.tolist() == sorted(backward.tolist(), reverse=True)
    assert new.peak_bytes() < step.peak_bytes()


def check_trains(name: str) -> None:
    step, regions = regions_of(name)
    plain = trained_values(*build(ZOO[name]), 2, 1, micro_batches=2)
    workload, model, optimizer = build(ZOO[name])
    frozen = []
    for block, graph_index in zip(regions.blocks, regions.graph_index.tolist(), strict=True):
        frozen.append(
            ScheduledRegion(
                model.get_submodule(step.blocks[block]),
                again(regions.graphs[graph_index]),
                torch.device("cpu"),
            )
        )
        frozen[-1].install()
    assert same(trained_values(workload, model, optimizer, 2, 1, micro_batches=2), plain)
    assert all((each.runs.frozen, each.runs.plain) == (2, 0) for each in frozen), [
        each.runs.why_plain for each in frozen
    ]


def test_scheduled_blocks_train_bitwise() -> None:
    check_trains("gpt")


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_scheduled_blocks_of_other_models_train_bitwise(name: str) -> None:
    check_trains(name)


BIASED = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x, bias):
        return x + torch.tanh(self.linear(x)) * bias.sigmoid()

class Biased(nn.Module):  # all blocks read the same trained bias
    def __init__(self):
        super().__init__()
        self.bias = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
    def forward(self, x):
        bias = self.bias(x)
        for block in self.blocks:
            x = block(x, bias)
        return x

def model(): return Biased()
def batch(size): return torch.randn(size, 8)
def loss(model, x): return model(x).square().mean()
"""


def test_regions_refuse_gradients_summed_in_blocks(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(BIASED)
    assert "gradients of several blocks are summed" in str(
        block_regions_of(recording_of(tmp_path / "model.py").at(4))
    )
