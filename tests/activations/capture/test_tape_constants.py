"""Code may read values that follow from constants during a capture, and no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from memtune.activations.capture.region_capture import capture, shapes_of
from memtune.activations.capture.tape import CaptureError
from memtune.runtime.rng_state import autocast_now

LOOKS: dict[str, Callable[[Tensor], bool]] = {
    "positions": lambda x: bool((torch.arange(x.shape[1]).diff() == 1).all()),
    "literal": lambda x: torch.tensor([3, 4]).sum().item() == 7,
    "written": lambda x: bool((torch.zeros(3, dtype=torch.long).add_(x.long()[0, :3]) == 0).all()),
    "argument": lambda x: bool((x.long() == 0).all()),
    "drawn": lambda x: bool((torch.randint(2, (3,)) == 0).all()),
}


class Looking(nn.Module):
    def __init__(self, looks: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.linear, self.looks = nn.Linear(4, 4), looks

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y * 3 if self.looks(x) else y


def captured(name: str) -> tuple[str, ...]:
    net = Looking(LOOKS[name])
    return capture(
        net, net.forward, shapes_of(((torch.ones(2, 4),), {})), autocast_now(), lambda i, out: True
    ).graph.names


@pytest.mark.parametrize("name", ["positions", "literal"])
def test_constant_tensors_answer_reads(name: str) -> None:
    assert captured(name).count("aten.mul.Tensor") == 2  # forward and backward


@pytest.mark.parametrize("name", ["written", "argument", "drawn"])
def test_capture_refuses_reads_of_data_by_name(name: str) -> None:
    with pytest.raises(CaptureError, match="_local_scalar_dense"):
        captured(name)
