"""A forward with side effects is not captured, and a capture has no side effects of its own."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memtune.activations.capture.region_capture import capture, shapes_of
from memtune.activations.capture.tape import CaptureError


class Net(nn.Module):
    n: Tensor

    def __init__(self, leave: Callable[[Net, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.leave = nn.Linear(4, 4), leave
        self.log: list[Any] = [0]
        self.seen: dict[str, Any] = {"mean": 0.0, "last": 1.0}
        self.nested: dict[str, list[Any]] = {"x": [1]}
        self.meters, self.recent, self.counted = [Meter()], deque([1, 2], maxlen=2), Counter(n=2)
        self.register_buffer("n", torch.zeros(()))
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x) + self.n)
        self.leave(self, y)
        return y


STATS: dict[str, Any] = {"deep": {"aux": []}}
LAST: float = 0.0


class Meter:
    """Is held in a list."""

    count = 0


def set_new_global(_: Net, y: Tensor) -> None:
    global NEW
    NEW = y.detach()  # type: ignore[name-defined]


def set_global(_: Net, y: Tensor) -> None:
    global LAST
    LAST = y.shape[0] / 32


def delete_global(_: Net, __: Tensor) -> None:
    global LAST
    del LAST


LEAVES: dict[str, tuple[str, Callable[[Net, Tensor], Any]]] = {
    "buffer": ("n", lambda net, y: setattr(net, "n", net.n + 1)),
    "buffer in place of None": ("late", lambda net, y: setattr(net, "late", y.detach())),
    "new buffer": ("more", lambda net, y: net.register_buffer("more", y.detach())),
    "list": ("log", lambda net, y: net.log.append(y.detach())),
    "list in a dict": ("nested", lambda net, y: net.nested["x"].append(y.detach())),
    "object in a list": ("meters", lambda net, y: setattr(net.meters[0], "count", net.meters[0].count + 1)),
    "deque": ("recent", lambda net, y: net.recent.append(y.detach())),
    "counter": ("counted", lambda net, y: net.counted.update(n=1)),
    "list in a global": ("STATS", lambda net, y: STATS["deep"]["aux"].append(y.detach())),
    "global that is only written": ("LAST", set_global),
    "new global": ("NEW", set_new_global),
    "global that is gone": ("LAST", delete_global),
    "new attribute of a class": ("last_mean", lambda net, y: setattr(Net, "last_mean", y.detach().mean())),
    "dict": ("seen", lambda net, y: net.seen.update(mean=y.detach().mean())),
}


@pytest.mark.parametrize("what", LEAVES)
def test_capture_refuses_and_undoes_side_effects(what: str) -> None:
    name, leave = LEAVES[what]
    net = Net(leave)
    buffers, seen = dict(net._buffers), dict(net.seen)
    with pytest.raises(
        CaptureError,
        match=rf"its forward (sets the \w+.* {name}|changes {name}, which belongs to no module)$",
    ):
        capture(net, net.forward, shapes_of(((torch.ones(2, 4),), {})), [], lambda i, out: True)
    assert list(net._buffers.items()) == list(buffers.items())
    assert net.log == [0]
    assert list(net.seen.items()) == list(seen.items())
    assert (net.nested, net.meters[0].count, net.recent, net.counted) == (
        {"x": [1]},
        0,
        deque([1, 2], maxlen=2),
        Counter(n=2),
    )
    assert (STATS, LAST, "NEW" in globals(), hasattr(Net, "last_mean")) == (
        {"deep": {"aux": []}},
        0.0,
        False,
        False,
    )


def test_capture_ignores_state_of_logging() -> None:
    logger = logging.getLogger("memtune.test_capture")
    net = Net(lambda net, y: net.logger.debug("y"))
    net.logger = logger  # type: ignore[assignment]
    logger._cache.clear()  # type: ignore[attr-defined]
    assert capture(net, net.forward, shapes_of(((torch.ones(2, 4),), {})), [], lambda i, out: True).calls
    assert logger._cache  # type: ignore[attr-defined]


def test_capture_allows_in_place_use_of_local_data() -> None:
    net = Net(lambda net, y: net.n.add_(net.log[0]))
    tape = capture(net, net.forward, shapes_of(((torch.ones(2, 4),), {})), [], lambda i, out: True)
    assert tape.graph.once
    assert net.n == 0
