"""Training runs and comparisons shared by tests of mechanisms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from memtune.workload.workload import Workload


def trained_values(
    workload: Workload, model: nn.Module, optimizer: Any, size: int, steps: int, micro_batches: int
) -> list[Tensor]:
    """Return losses and gradients (summed over the micro-batches), and at the end weights and buffers."""
    out: list[Tensor] = []
    for step in range(steps):
        torch.manual_seed(step)
        for batch in [workload.make_batch(size) for _ in range(micro_batches)]:
            loss = workload.loss(model, batch)
            loss.backward()
            out.append(loss.detach())
        out += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return [*out, *(each.clone() for each in model.state_dict().values())]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Return True if all values are bitwise equal."""
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
