"""Gradients that are offloaded when they are ready, on ranks: the user's hooks, and several backwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.gloo import run_ranks
from support.ranks.block_offload_on_ranks import Weights, share_of, weights_of
from support.suites.layer_major_suite import CHAIN
from torch import Tensor

from memtune.api import apply
from memtune.runtime.memory_tiers import local
from memtune.testing.training import build

RANKS, STEPS = 2, 3
IN_STEP = {"kind": "optimizer_cpu", "update": "native"}
"""The same update, from gradients that are on the device until the step."""


def hooked(states: str, offload: dict[str, str]) -> tuple[Weights, list[Tensor]]:
    """Return weights after steps in which a hook reads and halves two gradients, and what it has read."""
    workload, model, optimizer = build(CHAIN)
    settings: dict[str, Any] = {"sharding": {"states": {"kind": states}}, "offload": {"states": offload}}
    tuned = apply(model, optimizer, {"settings": settings}, loss=workload.loss, strict=False)
    seen: list[Tensor] = []

    def halves(parameter: Tensor) -> None:
        assert parameter.grad is not None, "used before the hook ran"
        seen.append(local(parameter.grad).clone())
        parameter.grad.mul_(0.5)

    trained = list(tuned.model.parameters())
    for each in (trained[0], trained[len(trained) // 2]):
        each.register_post_accumulate_grad_hook(halves)
    for step in range(STEPS):
        tuned.step(share_of(workload, step, 1, RANKS))
    return weights_of(tuned), seen


@pytest.mark.parametrize(
    ("states", "offload"),
    [
        *(("ddp", "zero_offload"), ("zero1", "zero_offload")),
        *(pytest.param(states, "zero_offload", marks=pytest.mark.slow) for states in ("fsdp", "zero2")),
        *(pytest.param(states, "l2l", marks=pytest.mark.slow) for states in ("ddp", "fsdp")),
    ],
)
def test_hook_after_apply_sees_gradients_before_ranks_and_offload_take_them(
    states: str, offload: str
) -> None:
    mine, plain = (run_ranks(hooked, RANKS, states, each) for each in ({"kind": offload}, IN_STEP))
    for (weights, seen), (wanted, shown) in zip(mine, plain, strict=True):
        assert len(seen) == 2 * STEPS
        assert all(map(torch.equal, seen, shown))
        assert [name for name in wanted if not torch.equal(weights[name], wanted[name])] == []


def twice(states: str, offload: dict[str, str]) -> Weights:
    """Return the weights after steps of two backwards through one forward."""
    workload, model, optimizer = build(CHAIN)
    settings: dict[str, Any] = {"sharding": {"states": {"kind": states}}, "offload": {"states": offload}}
    tuned = apply(model, optimizer, {"settings": settings}, loss=workload.loss, strict=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = workload.loss(tuned.model, share_of(workload, step, 1, RANKS)[0])
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()
        optimizer.step()
    return weights_of(tuned)


@pytest.mark.parametrize(
    "states", ["zero1", *(pytest.param(each, marks=pytest.mark.slow) for each in ("zero2", "fsdp"))]
)
def test_second_backward_through_a_forward_adds_to_offloaded_gradients(states: str) -> None:
    mine, plain = (run_ranks(twice, RANKS, states, each) for each in ({"kind": "zero_offload"}, IN_STEP))
    for weights, wanted in zip(mine, plain, strict=True):
        assert [name for name in wanted if not torch.equal(weights[name], wanted[name])] == []
