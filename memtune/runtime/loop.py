"""The training step itself. The recorder, the trials and `Tuned.step` all run this one function: what it holds, they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import memtune.ops  # noqa: F401  (defines torch.ops.memtune)
from memtune.batches import to_device

LossFunction = Callable[[nn.Module, Any], Tensor]
SyncContext = Callable[[bool], AbstractContextManager[Any]]
Upload = Callable[[Any, torch.device], Any]


class Order(Protocol):
    """Runs micro-batches in another order than one after the other (`runtime.order`)."""

    def accumulate(
        self,
        model: nn.Module,
        loss_function: LossFunction,
        batches: Sequence[Any],
        device: torch.device,
        *,
        sync: SyncContext,
        upload: Upload,
    ) -> Tensor:
        """As the function `accumulate`."""


def upload(batch: Any, device: torch.device) -> Any:
    """`batch` with every tensor copied to `device` through the seam; on CPU that is a copy from the host tier."""
    return to_device(batch, device, lambda tensor: torch.ops.memtune.to_device(tensor, device))


def accumulate(
    model: nn.Module,
    loss_function: LossFunction,
    batches: Sequence[Any],
    device: torch.device,
    *,
    sync: SyncContext = lambda last: nullcontext(),
    upload: Upload = upload,
    order: Order | None = None,
    among: range | None = None,
    total: Tensor | None = None,
) -> Tensor:
    """Forward and backward over all micro-batches; leaves the mean gradient in the parameters.

    Args:
        model: What is trained.
        loss_function: `loss(model, micro_batch)`, a scalar.
        batches: The micro-batches, all of one size; each is moved to `device` when its turn comes.
        device: Where the model computes.
        sync: From "is this the last micro-batch?" to the context in which it runs (DDP's `no_sync`).
        upload: Moves a micro-batch to `device`.
        order: Runs them in another order than one after the other.
        among: Which of `batches` are run here; None: all.
        total: Sum of the losses of those before.

    Returns:
        The mean loss, detached.
    """
    if order is not None:
        return order.accumulate(model, loss_function, batches, device, sync=sync, upload=upload)
    for index in range(len(batches)) if among is None else among:
        with sync(index == len(batches) - 1):
            here = upload(batches[index], device)
            loss = loss_function(model, here)
            if len(batches) > 1:
                loss = loss / len(batches)
            loss.backward()
            part = loss.detach()
            total = part if total is None else total + part
            del loss, here, part
    assert total is not None
    return total


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss_function: LossFunction,
    batches: Iterable[Any],
    device: torch.device,
    *,
    sync: SyncContext = lambda last: nullcontext(),
    upload: Upload = upload,
    order: Order | None = None,
) -> Tensor:
    """One optimizer step over `batches`; returns the mean loss, detached."""
    loss = accumulate(model, loss_function, list(batches), device, sync=sync, upload=upload, order=order)
    update(optimizer)
    return loss


def update(optimizer: Optimizer) -> None:
    """What a step ends with."""
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
