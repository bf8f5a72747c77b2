"""Settings by which `Tuned.step` runs the micro-batches of an optimizer step."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memtune.runtime.training_step import LossFunction, Order, SyncContext, train_step, update


class Rotation(Protocol):
    """Every rank of a model-parallel group runs the micro-batches of all of them, in one order."""

    def gather(self, batches: Iterable[Any]) -> list[Any]:
        """Return the micro-batches of all ranks of the group; collective."""

    def upload(self, batch: Any, device: torch.device, /) -> Any:
        """Return one of them on `device`, broadcast by its owner; collective."""

    def own_numbers(self, device: torch.device) -> AbstractContextManager[None]:
        """Return a context with the micro-batch's random numbers; its end restores this rank's."""


class PipelineStep(Protocol):
    """Forward and backward of all micro-batches of a step, by a schedule over the ranks of a pipeline."""

    def __call__(self, model: nn.Module, loss_function: LossFunction, batches: Iterable[Any], /) -> Tensor:
        """Return the mean loss, detached; accumulates gradients in the parameters of this rank's stages."""


class Compiled(Protocol):
    """The parts of the model that run through torch.compile."""

    backend: str
    """The backend's name in the config."""
    partitioning: dict[str, Any]
    """Settings of `torch._functorch.config` for compilation; techniques add to them before the first call."""

    @property
    def is_whole(self) -> bool:
        """True if one graph contains the model, False for one graph per block."""

    def check_orders(self) -> dict[str, Any]:
        """Return facts about the order of the ops in the graphs, for the audit."""


@dataclass
class TrainingLoop:
    """The parts of `Tuned.step` that techniques replace; each is None for the plain loop's own.

    Written while techniques are applied; read by `Tuned`, by the tracer that records tuned models, and by
    techniques that refuse one another. `pipeline` takes precedence over `rotation`, and that over `order`.
    """

    sync: SyncContext | None = None
    """From "is this the last micro-batch of the step?" to the context in which its forward and backward run
    (as DDP's `no_sync`).

    Written by mechanisms that reduce gradients over ranks or update inside backward. A mechanism that is
    applied later and needs the last micro-batch too wraps the former context in its own.
    """
    order: Order | None = None
    """Runs micro-batches in another order than one after the other, for layer-major offload."""
    rotation: Rotation | None = None
    """Distributes micro-batches among ranks that run one at a time; written by model parallelism."""
    pipeline: PipelineStep | None = None
    """Runs all forwards and backwards of a step; written by pipelines and multiplexed stages. If
    `sharding.parallel` is a pipeline, `sharding.states` asks it to reduce gradients after the last
    backward (`parallel.pipeline.pipeline_parallel.Pipeline`).
    """
    runner: nn.Module | None = None
    """The module to call instead of the model: DDP's wrapper, written by `replicate`."""
    compiled: Compiled | None = None
    """The compiled forwards, written before any technique, read by those that order or partition graphs."""
    resumed_steps: int = 0
    """Optimizer steps of earlier runs that this one continues, set by offload to SSD when it resumes."""

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch's forward and backward; `last` marks the last one of a step."""
        return nullcontext() if self.sync is None else self.sync(last)

    def step(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: LossFunction,
        batches: Iterable[Any],
        device: torch.device,
    ) -> Tensor:
        """Run one optimizer step over `batches`; return their mean loss, detached.

        Args:
            model: The module to call.
            optimizer: Its optimizer.
            loss: `loss(model, micro_batch)`, a scalar.
            batches: Micro-batches of this rank, of one size, on any device.
            device: Device on which the model computes.
        """
        # A pipeline runs forward and backward itself, in its own order; a rotation only exchanges
        # micro-batches between ranks.
        if self.pipeline is not None:
            mean = self.pipeline(model, loss, batches)
            update(optimizer)
            return mean
        if self.rotation is None:
            return train_step(
                model, optimizer, loss, batches, device, sync=self.micro_batch, order=self.order
            )
        rotated = self.rotation.gather(batches)
        # All ranks draw by the micro-batches' seeds inside, and each continues with its own numbers
        # afterwards.
        with self.rotation.own_numbers(device):
            return train_step(
                model, optimizer, loss, rotated, device, sync=self.micro_batch, upload=self.rotation.upload
            )
