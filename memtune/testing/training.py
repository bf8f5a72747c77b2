"""Short training runs under a config, and their differences from the plain model's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memtune.api import Tuned, apply
from memtune.deferred_init import deferred
from memtune.runtime import HOST, accumulate, prepare_model, spent_as_none, tier
from memtune.technique import Technique
from memtune.workload import Workload

CPU = torch.device("cpu")
SEED = 7
_device: ContextVar[torch.device] = ContextVar("device under test", default=CPU)


def device_under_test() -> torch.device:
    """Return the device on which models train that are given none: the CPU, or that of `on_device`."""
    return _device.get()


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Train on `device` in this context: a suite that runs in it tests its technique there."""
    before = _device.set(device)
    try:
        yield
    finally:
        _device.reset(before)


@dataclass(frozen=True, eq=False)
class Run:
    """Copies of losses, gradients and weights of a few training steps."""

    losses: list[Tensor]
    gradients: list[dict[str, Tensor]]
    """Gradients by parameter name, one mapping per step; without parameters that have none."""
    weights: dict[str, Tensor]
    """Parameters and buffers after the last step."""


def settings_of(*techniques: Technique) -> dict[str, Any]:
    """Return the `settings` of a config with the given techniques, as plain data."""
    from memtune.config import Settings
    from memtune.search_spaces.execution import Execution

    return Settings.of(Execution(), {each.slot: each for each in techniques}).dump()


def config_of(
    path: Path, *techniques: Technique, micro_batch: int = 2, device: str | None = None
) -> dict[str, Any]:
    """Return a config with the given techniques and their plans for the workload in `path` on `device`, by
    default the one under test.
    """
    from memtune.testing.drift_check import planned

    device = device_under_test().type if device is None else device
    plans = (
        planned(path, *techniques, micro_batch=micro_batch, device=device)[1]
        if any(type(each).plan is not Technique.plan for each in techniques)
        else {}
    )
    return {
        "settings": settings_of(*techniques),
        "plan": {slot: plan.document() for slot, plan in plans.items() if not plan.is_empty},
    }


def build(
    path: Path, device: torch.device | None = None, *, is_deferred: bool = False
) -> tuple[Workload, nn.Module, Optimizer]:
    """Return the workload in `path`, its model in training mode on `device` (by default that under test) or
    deferred, and its optimizer, from a fixed seed.
    """
    device = device_under_test() if device is None else device
    workload = Workload.load(path)
    torch.manual_seed(SEED)
    made = deferred(workload.build_model, device) if is_deferred else workload.build_model().to(device)
    model = prepare_model(made).train()
    return workload, model, workload.make_optimizer(model)


def train(
    path: Path,
    *techniques: Technique,
    steps: int = 3,
    micro_batches: int = 2,
    size: int = 2,
    device: torch.device | None = None,
) -> Run:
    """Train the workload in `path` for a few optimizer steps with `techniques`; without any, the plain model.

    Args:
        path: File of the workload.
        techniques: At most one per slot, in any order.
        steps: Optimizer steps.
        micro_batches: Micro-batches per step.
        size: Samples per micro-batch.
        device: Where the model trains, by default the device under test; the results are on the host.
    """
    config = config_of(path, *techniques) if techniques else None
    return train_under(path, config, steps=steps, micro_batches=micro_batches, size=size, device=device)


def train_under(
    path: Path,
    config: Mapping[str, Any] | None,
    *,
    steps: int = 3,
    micro_batches: int = 2,
    size: int = 2,
    device: torch.device | None = None,
) -> Run:
    """Train like `train`, with a config document instead of techniques."""
    device = device_under_test() if device is None else device
    workload, model, optimizer = build(path, device)
    tuned = None if config is None else apply(model, optimizer, config, strict=False)
    losses, gradients = [], []
    for step in range(steps):
        loss, gradient = one_step(
            workload,
            model,
            optimizer,
            tuned,
            seed=SEED + 1 + step,
            micro_batches=micro_batches,
            size=size,
            device=device,
        )
        losses.append(loss)
        gradients.append(gradient)
    if tuned is not None:
        tuned.audit()
    state = model.state_dict() if tuned is None else tuned.state_dict()["model"]
    return Run(losses, gradients, {name: on_host(value) for name, value in state.items()})


def plain(path: Path) -> Run:
    """Return `train` without techniques, cached in this process."""
    return _plain(path, torch.get_num_threads(), device_under_test())


@cache
def _plain(path: Path, threads: int, device: torch.device) -> Run:
    # Sums have another order with another number of threads.
    return train(path, device=device)


def one_step(
    workload: Workload,
    model: nn.Module,
    optimizer: Optimizer,
    tuned: Tuned | None,
    *,
    seed: int,
    micro_batches: int = 2,
    size: int = 2,
    device: torch.device | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run one optimizer step with batches and random numbers from `seed`; return loss and gradients."""
    device = device_under_test() if device is None else device
    torch.manual_seed(seed)
    with tier(HOST):
        batches = [workload.make_batch(size) for _ in range(micro_batches)]
    torch.manual_seed(seed)  # batches advance the generator of the CPU alone
    runner = model if tuned is None else tuned.model
    sync = None if tuned is None else tuned._context.loop.sync
    order = None if tuned is None else tuned._context.loop.order
    loss = accumulate(
        runner, workload.loss, batches, device, sync=sync or (lambda last: nullcontext()), order=order
    )
    with spent_as_none():  # those that updates inside backward have used
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        remote = None if tuned is None else tuned._context.placement.remote_parameters
        if remote is not None:  # the gradient of a placeholder is a norm
            found = {name: remote.full_value(name, each) for name, each in found.items()}
        gradients = {name: on_host(each) for name, each in found.items()}
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return on_host(loss), gradients


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a tensor that may be a DTensor."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach()


def on_host(tensor: Tensor) -> Tensor:
    """Return a copy of the full tensor in host memory."""
    return full_tensor(tensor).to(CPU, copy=True)


def differences(got: Run, wanted: Run, tolerance: float = 0.0) -> list[str]:
    """Return the differences, one line each.

    Args:
        got: A run with techniques.
        wanted: The run of the plain model.
        tolerance: Largest difference relative to the largest value of the tensor; 0 requires equal bits.
    """
    found = []
    for step, (one, other) in enumerate(zip(got.losses, wanted.losses, strict=True)):
        if not _equal(one, other, tolerance):
            found.append(f"loss of step {step}: {one.item()!r} against {other.item()!r}")
    for step, (mine, theirs) in enumerate(zip(got.gradients, wanted.gradients, strict=True)):
        found += _named(f"gradient of step {step}", mine, theirs, tolerance)
    return found + _named("after the last step", got.weights, wanted.weights, tolerance)


def _named(
    what: str, mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor], tolerance: float
) -> list[str]:
    if set(mine) != set(theirs):
        return [f"{what}: only one of the two has {sorted(set(mine) ^ set(theirs))[:3]}"]
    return [f"{what}: {name}" for name in theirs if not _equal(mine[name], theirs[name], tolerance)]


def _equal(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if tolerance == 0 or not one.is_floating_point():
        return torch.equal(one, other)
    scale = float(other.abs().max()) if other.numel() else 0.0
    return one.shape == other.shape and bool(((one - other).abs() <= tolerance * max(scale, 1e-30)).all())
