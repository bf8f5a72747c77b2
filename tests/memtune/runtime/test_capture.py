"""A forward that leaves something in its module is not captured, and the capture leaves nothing of its own there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memtune.runtime.capture import capture, shapes_of
from memtune.runtime.tape import CaptureError


class Net(nn.Module):
    n: Tensor

    def __init__(self, leave: Callable[[Net, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.leave = nn.Linear(4, 4), leave
        self.log: list[Any] = [0]
        self.seen: dict[str, Any] = {"mean": 0.0, "last": 1.0}
        self.register_buffer("n", torch.zeros(()))
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x) + self.n)
        self.leave(self, y)
        return y


LEAVES: dict[str, tuple[str, Callable[[Net, Tensor], Any]]] = {
    "buffer": ("n", lambda net, y: setattr(net, "n", net.n + 1)),
    "buffer in place of None": ("late", lambda net, y: setattr(net, "late", y.detach())),
    "new buffer": ("more", lambda net, y: net.register_buffer("more", y.detach())),
    "list": ("log", lambda net, y: net.log.append(y.detach())),
    "dict": ("seen", lambda net, y: net.seen.update(mean=y.detach().mean())),
}


@pytest.mark.parametrize("what", LEAVES)
def test_what_forward_leaves_is_refused_and_taken_back(what: str) -> None:
    name, leave = LEAVES[what]
    net = Net(leave)
    buffers, seen = dict(net._buffers), dict(net.seen)
    with pytest.raises(CaptureError, match=rf"its forward sets the .* {name}$"):
        capture(net, net.forward, shapes_of(((torch.ones(2, 4),), {})), [], lambda i, out: True)
    assert list(net._buffers.items()) == list(buffers.items())
    assert net.log == [0]
    assert list(net.seen.items()) == list(seen.items())


def test_what_is_read_or_written_in_place_is_captured() -> None:
    net = Net(lambda net, y: net.n.add_(net.log[0]))
    tape = capture(net, net.forward, shapes_of(((torch.ones(2, 4),), {})), [], lambda i, out: True)
    assert tape.graph.once
    assert net.n == 0
