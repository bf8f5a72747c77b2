"""The training step. The recorder, the trials and `Tuned.step` all run it, so recorded, measured and real
steps hold the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune.workload import to_device

LossFunction = Callable[[nn.Module, Any], Tensor]
SyncContext = Callable[[bool], AbstractContextManager[Any]]
Upload = Callable[[Any, torch.device], Any]


class Order(Protocol):
    """Runs micro-batches in another order than one after the other (`layer_major_order`)."""

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
        """Do the same as the function `accumulate`."""


def upload(batch: Any, device: torch.device) -> Any:
    """Return `batch` with every tensor copied to `device` through the seam, on CPU from the host tier."""
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
    """Run forward and backward over all micro-batches; accumulates the mean gradient in the parameters.

    Args:
        model: The model.
        loss_function: `loss(model, micro_batch)`, a scalar.
        batches: The micro-batches, all of one size; each is moved to `device` just before it runs.
        device: Device on which the model computes.
        sync: From "is this the last micro-batch?" to the context in which it runs (DDP's `no_sync`).
        upload: Moves a micro-batch to `device`.
        order: Runs them in another order than one after the other.
        among: Indices of `batches` that run in this call; None: all.
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
                # Before backward, not after the sum: gradients of a step are then the mean's, whatever the
                # optimizer does next.
                loss = loss / len(batches)
            loss.backward()
            # The loss itself holds the graph, which must be gone before the next micro-batch runs.
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
    """Run one optimizer step over `batches`; return the mean loss, detached."""
    loss = accumulate(model, loss_function, list(batches), device, sync=sync, upload=upload, order=order)
    update(optimizer)
    return loss


def update(optimizer: Optimizer) -> None:
    """Run the optimizer at the end of a step."""
    # Then `zero_grad`, which frees gradients: between two steps none is live, as recorded and predicted.
    optimizer.step()
    optimizer.zero_grad()


def prepare_model(model: nn.Module) -> nn.Module:
    """Disable the key-value cache of Hugging Face models before anything is recorded or measured."""
    # It is for generation only, and a second run of a block would fill it twice.
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False  # type: ignore[union-attr]
    return model
