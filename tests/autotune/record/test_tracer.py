"""The tracer: who holds what until when, which op belongs where, and when backward asks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memtune.autotune.record.tracer import Tracer
from memtune.program.step import FOREVER, Kind, Phase, Step


def trace(
    make: Callable[[], nn.Module],
    loss: Callable[[nn.Module, Tensor], Tensor],
    blocks: list[str],
    *,
    fake: bool = True,
) -> Step:
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else torch.enable_grad():
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.ones(4, 8)
        tracer = Tracer(model, optimizer, blocks)
        with tracer.recording():
            loss(model, x).backward()
            tracer.note_gradients()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return tracer.step()


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def names(step: Step, phase: Phase) -> list[str]:
    return [step.names[name] for name in step.ops.name[step.ops.phase == phase]]


def test_tracer_rows_of_two_layers_equal_hand_calculation() -> None:
    step = trace(two_layers, lambda model, x: model(x).sum(), ["0", "2"])
    assert names(step, Phase.FORWARD)[:4] == [
        "aten.addmm.default",
        "aten.tanh.default",
        "aten.addmm.default",
        "aten.sum.default",
    ]
    assert [step.blocks[i] if i >= 0 else "" for i in step.ops.block[:4]] == ["0", "", "2", ""]
    tanh = int(np.flatnonzero(step.storages.producer == 1)[0])
    assert step.storages.bytes[tanh] == 4 * 16 * 4
    assert (
        step.freed_after[int(np.flatnonzero(step.storages.producer == 0)[0])] == 1
    )  # no op needs tanh's input
    rows = np.flatnonzero(step.saves.storage == tanh)
    assert step.saves.is_output[rows].tolist() == [
        1,
        0,
    ]  # by tanh itself, and by the second layer as its input
    assert step.saves.packed_before[rows].tolist() == [2, 2]
    assert (step.saves.unpacked_before[rows] > 3).all()
    assert (
        step.saves.unpacked_before[rows[1]] < step.saves.unpacked_before[rows[0]]
    )  # backward asks in the opposite order
    assert [p.name for p in step.parameters] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert all(
        step.storages.kind[p.gradient] == Kind.GRADIENT and step.storages.grad_ready_after[p.gradient] >= 0
        for p in step.parameters
    )
    assert (step.storages.held_until[[p.storage for p in step.parameters]] == FOREVER).all()
    assert names(step, Phase.OPTIMIZER)


def test_tracer_rows_are_equal_on_fake_and_real_tensors() -> None:
    steps = [trace(two_layers, lambda model, x: model(x).sum(), [], fake=fake) for fake in (True, False)]
    assert names(steps[0], Phase.FORWARD) == names(steps[1], Phase.FORWARD)
    assert np.array_equal(steps[0].live_bytes(), steps[1].live_bytes())


def test_tracer_records_lifetime_of_python_references() -> None:
    kept: list[Tensor] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        extra = x * 2
        kept.append(extra)
        out = model(x)
        kept.clear()
        del extra
        return out.sum()

    step = trace(two_layers, loss, [])
    extra = int(np.flatnonzero(step.storages.producer == 0)[0])
    assert step.freed_after[extra] == 3  # the last op of the model
    assert not (step.saves.storage == extra).any()


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y[:, 0].mul_(2.0)
        return y.relu_()


def test_tracer_assigns_backward_of_view_writes_to_writing_block() -> None:
    step = trace(lambda: nn.Sequential(Writes()), lambda model, x: model(x).sum(), ["0"])
    backward = step.ops.phase == Phase.BACKWARD
    inside = {step.names[i] for i in step.ops.name[backward & (step.ops.block == 0)]}
    assert {"aten.threshold_backward.default", "aten.copy_.default", "aten.mm.default"} <= inside


def test_tracer_marks_output_written_into_view_as_output() -> None:
    step = trace(lambda: nn.Sequential(Writes()), lambda model, x: model(x).sum(), ["0"])
    relu = [step.names[i] for i in step.ops.name].index("aten.relu_.default")
    rows = np.flatnonzero(step.saves.packed_before == relu + 1)
    assert 1 in step.saves.is_output[rows]


def test_tracer_records_batch_norm_statistics_writes() -> None:
    step = trace(lambda: nn.Sequential(nn.BatchNorm1d(8)), lambda model, x: model(x).sum(), [])
    op = [step.names[i] for i in step.ops.name].index("aten.native_batch_norm.default")
    written = step.uses.storage[(step.uses.op == op) & (step.uses.mode == 1)]
    assert (step.storages.kind[written] == Kind.BUFFER).all()
    assert len(written) == 2


def test_tracer_omits_views_and_storages_without_producer() -> None:
    step = trace(two_layers, lambda model, x: model(x.view(2, 2, 8).flatten(0, 1).t().t()).sum(), [])
    assert not any(name.startswith(("aten.view", "aten.t.", "aten._unsafe_view")) for name in step.names)


def test_tracer_does_not_change_results() -> None:
    def gradients(watched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = two_layers()
        tracer = Tracer(model, torch.optim.SGD(model.parameters()), [])
        x = torch.randn(4, 8)
        if watched:
            with tracer.recording():
                model(x).square().sum().backward()
        else:
            model(x).square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert all(torch.equal(one, two) for one, two in zip(gradients(True), gradients(False), strict=True))
