"""A step in which the sentinel's parameter took no part trains as the plain one, and changed gradients are
still noticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memtune.api import apply
from memtune.errors import ApplyError

pytestmark = pytest.mark.usefixtures("one_thread")
NATIVE: dict[str, Any] = {"offload": {"states": {"kind": "optimizer_cpu", "update": "native"}}}
"""Without a sentinel; its bits are those of every native update, which in tensors of a few values differ from
torch's.
"""
TECHNIQUES: dict[str, dict[str, Any]] = {
    "zero_offload": {"offload": {"states": {"kind": "zero_offload", "bucket_mib": 0}}},
    "per_layer": {
        "offload": {"states": {"kind": "optimizer_cpu", "update": "native", "trigger": "per_layer"}}
    },
    "roam": {"execution": {"order": {"kind": "roam"}}},
}


class Skips(nn.Module):
    """The layer with the smallest parameter is skipped in some forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.skipped, self.last = nn.Linear(6, 6), nn.Linear(6, 1), nn.Linear(6, 3)
        self.runs = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return self.last(x * self.skipped(x) if self.runs else x)  # type: ignore[no-any-return]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def made() -> tuple[Skips, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Skips()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def backwards(model: Skips, tuned: Any | None = None) -> Iterator[None]:
    """Steps of two micro-batches: with all layers, without one, and with it in the first or in the second
    alone.
    """
    for step, runs in enumerate(((True, True), (False, False), (True, False), (False, True), (False, False))):
        torch.manual_seed(20 + step)
        for index, model.runs in enumerate(runs):
            if tuned is None:
                loss_of(model, torch.randn(4, 6)).backward()  # type: ignore[no-untyped-call]
            else:
                with tuned.micro_batch(last=index == 1):
                    loss_of(model, torch.randn(4, 6)).backward()  # type: ignore[no-untyped-call]
        yield


def without_sentinel(kind: str) -> dict[str, Any]:
    return {} if kind == "roam" else NATIVE


@pytest.mark.parametrize("kind", TECHNIQUES)
def test_layer_skipped_in_a_step_trains_as_plain(kind: str) -> None:
    ended = []
    for settings in (without_sentinel(kind), TECHNIQUES[kind]):
        model, optimizer = made()
        tuned = apply(model, optimizer, {"settings": settings}, strict=False)
        for _ in backwards(model, tuned):
            optimizer.step()
            optimizer.zero_grad()
        ended.append([each.clone() for each in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ended, strict=True))


@pytest.mark.parametrize("kind", ["per_layer", "roam"])
def test_clipping_of_a_step_with_a_placeholder_raises(kind: str) -> None:
    model, optimizer = made()
    tuned = apply(model, optimizer, {"settings": TECHNIQUES[kind]}, strict=False)
    steps = backwards(model, tuned)
    for _ in range(2):
        next(steps)
        if not model.runs:
            with pytest.raises(ApplyError, match="MT364"):
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            return
        optimizer.step()
        optimizer.zero_grad()
    raise AssertionError("the layer ran in every step")


@pytest.mark.parametrize("kind", TECHNIQUES)
def test_second_backward_for_the_sentinel_alone_counts_as_no_change(kind: str) -> None:
    ended = []
    for settings in (without_sentinel(kind), TECHNIQUES[kind]):
        model, optimizer = made()
        tuned = apply(model, optimizer, {"settings": settings}, strict=False)
        with tuned.micro_batch(last=True):
            loss_of(model, torch.ones(2, 6)).backward()  # type: ignore[no-untyped-call]
            model.skipped.bias.square().sum().backward()
        optimizer.step()
        ended.append([each.clone() for each in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ended, strict=True))
