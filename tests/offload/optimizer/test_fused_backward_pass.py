"""The optimizer's phase by parameter: equal to the recording of one-by-one updates, with foreach kernels and
accumulation.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.zoo_paths import ZOO

from memtune import hardware
from memtune.autotune.predict.caching_allocator import Action, event_stream
from memtune.autotune.record.recorder import record
from memtune.autotune.translate.translation import translate
from memtune.memory.workspace import WorkspaceTable
from memtune.offload.optimizer.fused_backward_pass import not_at_gradients, updates_at_gradients
from memtune.program.edit import accumulate_gradients
from memtune.program.lifecycle_steps import first_step
from memtune.program.step import Kind, Phase, Step
from memtune.search_spaces.execution.order.roam import Roam
from memtune.testing.drift_check import drift, plain_program
from memtune.workload.workload import Workload

SMALL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x)) * {factor}
        return x

def model():
    return Net()

def batch(size):
    return torch.randn(size, 32)

def loss(model, batch):
    return model(batch).square().mean()

def optimizer(params):
    return torch.optim.{optimizer}
"""


def small(folder: Path, optimizer: str, factor: str = "1") -> Path:
    path = folder / "model.py"
    path.write_text(SMALL.format(optimizer=optimizer, factor=factor))
    return path


@pytest.mark.parametrize(
    "optimizer", ["SGD(params, momentum=0.9)", "NAdam(params)", "AdamW(params, fused=True)"]
)
def test_pass_equals_a_recording_of_live_updates(optimizer: str, tmp_path: Path) -> None:
    """Ops, and live bytes of every tier at every op."""
    path = small(tmp_path, optimizer)
    assert not_at_gradients(plain_program(path).step) == ""
    assert not drift(path, Roam())


def test_kernel_over_parameters_with_inseparable_state_is_refused(tmp_path: Path) -> None:
    why = not_at_gradients(plain_program(small(tmp_path, "AdamW(params, foreach=True)")).step)
    assert " of the optimizer works on no " in why


class Scratch(WorkspaceTable):
    """Every kernel allocates a workspace in addition to its outputs, as on a calibrated machine."""

    def workspace_bytes(self, key: str) -> int:
        return 12


def test_workspace_of_optimizer_kernels_moves_with_its_op(tmp_path: Path) -> None:
    step = record(Workload.load(small(tmp_path, "AdamW(params)")), workspace=Scratch()).at(2)
    scratch = (step.storages.kind == Kind.WORKSPACE) & (
        step.ops.phase[step.storages.producer] == Phase.OPTIMIZER
    )
    assert scratch.sum() > 8
    assert not_at_gradients(step) == ""
    early = updates_at_gradients(step, 1)
    early.validate()
    after = (early.storages.kind == Kind.WORKSPACE) & (
        early.ops.phase[early.storages.producer] == Phase.OPTIMIZER
    )
    assert (
        early.storages.bytes[after].sum() == step.storages.bytes[scratch].sum()
    )  # every op is one parameter's here
    assert early.peak_bytes() < step.peak_bytes()


def test_foreach_kernels_of_a_step_translated_to_cuda_run_per_parameter() -> None:
    step = translate(record(Workload.load(ZOO["tied"]), target="cuda"), hardware.find("h100-80g")).at(2)
    assert not_at_gradients(step) == ""
    early = updates_at_gradients(step, 1)
    early.validate()
    before, after = (each.ops.phase == Phase.OPTIMIZER for each in (step, early))
    names = [step.names[name] for name in step.ops.name[before]]
    n_trained = sum(p.gradient >= 0 for p in step.parameters)
    assert [early.names[name] for name in early.ops.name[after]] == names * n_trained
    link = early.ops.resource[after] == early.ops.resource[after][-1]
    wanted = step.ops.traffic_bytes[before][step.ops.resource[before] == step.ops.resource[before][-1]].sum()
    assert early.ops.traffic_bytes[after][link].sum() == pytest.approx(wanted, rel=1e-3)
    temporaries = [
        each.storages.bytes[(each.storages.producer >= 0) & mine[each.storages.producer]].sum()
        for each, mine in ((step, before), (early, after))
    ]
    assert (
        temporaries[0] <= temporaries[1] < temporaries[0] + 100 * n_trained
    )  # a number for the counters for each
    assert early.peak_bytes() < step.peak_bytes()


def test_micro_batch_sums_are_live_until_the_last_micro_batch() -> None:
    """With two micro-batches the last one frees the sums; with more, one in the middle keeps them all."""
    step = accumulate_gradients(plain_program(ZOO["tied"]).step)

    def sums_left(each: Step) -> int:
        """Bytes of sums that outlive backward."""
        last = int(np.flatnonzero(each.ops.phase < Phase.BOUNDARY)[-1])
        mine = (
            (each.storages.kind == Kind.GRADIENT) & (each.storages.producer < 0) & (each.freed_after > last)
        )
        return int(each.storages.bytes[mine].sum())

    two, three = updates_at_gradients(step, 2), updates_at_gradients(step, 3)
    assert sums_left(two) < 0.5 * sums_left(step)
    assert three.peak_bytes() >= max(two.peak_bytes(), step.peak_bytes())
    assert sums_left(three) >= sums_left(two)
    assert (three.ops.phase == Phase.OPTIMIZER).sum() == (step.ops.phase == Phase.OPTIMIZER).sum()


def test_weight_read_after_its_gradient_is_ready_is_refused(tmp_path: Path) -> None:
    """The last layer's weight, without its gradient, is a factor in the layers whose backward comes later."""
    why = not_at_gradients(
        plain_program(small(tmp_path, "SGD(params)", "self.layers[-1].weight.detach()[0]")).step
    )
    assert why.endswith("of backward needs layers.3.weight after its gradient is complete")


def test_state_is_created_at_the_parameters_first_update() -> None:
    step = plain_program(ZOO["tied"]).step
    early = updates_at_gradients(step, 1)
    # AdamW uses one of the two moments, then the other; all are made at once where all parameters are updated
    # together.
    for each, moments in ((step, 1), (early, 2 * sum(p.gradient >= 0 for p in step.parameters))):
        state = (each.storages.kind == Kind.OPTIMIZER) & (each.storages.producer < 0)
        assert (
            len(np.unique(first_step(each).storages.producer[state & (each.storages.bytes > 8)])) == moments
        )
        events = event_stream(each, 1)
        rows = (events.action == Action.ALLOC) & np.isin(
            events.storage, np.flatnonzero(state & (each.storages.bytes > 8))
        )
        assert len(np.unique(events.op[rows])) == moments
