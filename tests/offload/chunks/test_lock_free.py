"""Lock-free updates in host memory and from SSD: order of delivery, bytes, faults, checkpoints."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from support.suites.block_offload_suite import NATIVE, total
from support.zoo_paths import ZOO
from torch import Tensor, nn

from memtune.api import Tuned, apply
from memtune.errors import ApplyError, EnvironmentFault
from memtune.memory.ledger import Ledger
from memtune.offload.optimizer import async_updates as sweeps
from memtune.offload.optimizer.async_updates import AsyncUpdates, Gradients
from memtune.offload.ssd_states.ssd_optimizer import SsdOptimizer
from memtune.program.step import Kind, Phase, Resource, Step, Tier
from memtune.runtime import transfer
from memtune.runtime.memory_tiers import HOST, tier
from memtune.runtime.training_step import accumulate
from memtune.search_spaces.offload.states.angel_ptm import AngelPtm
from memtune.ssd import ssd_tensors
from memtune.technique import Exactness
from memtune.testing import rewritten
from memtune.testing.drift_check import drift
from memtune.testing.training import SEED, build, config_of, one_step, train

SMALL = AngelPtm(kind="angel_ptm", page_mib=0.01)
ON_HOST = SMALL.model_copy(update={"lock_free": True, "max_staleness": 2})
ON_SSD = ON_HOST.model_copy(update={"optimizer": "ssd"})
BOTH = pytest.mark.parametrize("technique", [ON_HOST, ON_SSD], ids=["host", "ssd"])
pytestmark = pytest.mark.usefixtures("ssd", "one_thread")


@dataclass
class Seen:
    """Results of training and of its sweeps."""

    step: int = 0
    sweeps: list[int] = field(default_factory=list)
    """Number of steps in each sweep."""
    began: list[int] = field(default_factory=list)
    """The step in which each sweep began."""


@contextmanager
def observed(gated: bool) -> Iterator[Seen]:
    """Observe training inside this context; `gated`: no sweep ends before training waits for it."""
    gate, seen = threading.Event(), Seen()
    make, adopt = AsyncUpdates.__init__, AsyncUpdates._adopt

    def made(
        self: AsyncUpdates,
        bound: int,
        partial_step: Any,
        prepare: Callable[[Gradients], Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        def prepared(gradients: Gradients) -> Callable[[], None]:
            seen.sweeps.append(self._n_in_sweep)
            seen.began.append(seen.step)
            run = prepare(gradients)
            return lambda: run() if not gated or gate.wait(60) else None

        make(self, bound, partial_step, prepared, *args, **kwargs)

    def opening(self: AsyncUpdates, *, wait: bool) -> None:
        if wait:
            gate.set()
        adopt(self, wait=wait)
        gate.clear()

    with patch.object(AsyncUpdates, "__init__", made), patch.object(AsyncUpdates, "_adopt", opening):
        yield seen


def begun(technique: AngelPtm = ON_SSD) -> tuple[Any, nn.Module, Any, Tuned]:
    workload, model, optimizer = build(ZOO["tied"])
    return (
        workload,
        model,
        optimizer,
        apply(model, optimizer, config_of(ZOO["tied"], technique), strict=False),
    )


def _run(steps: int, workload: Any, model: nn.Module, optimizer: Any, tuned: Tuned) -> None:
    for step in range(steps):
        one_step(workload, model, optimizer, tuned, seed=SEED + step)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def numel_of(step: Step) -> int:
    return sum(int(step.storages.bytes[each.gradient]) // 4 for each in step.parameters)


def gradients_at(weights: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return the gradients of one step of the plain model with these weights."""
    workload, model, _ = build(ZOO["tied"])
    model.load_state_dict(weights)
    torch.manual_seed(seed)
    accumulate(model, workload.loss, [workload.make_batch(2) for _ in range(2)], torch.device("cpu"))
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def sum_of(gradients: list[Tensor]) -> Tensor | None:
    """Return the sum of `gradients`, added in the order of delivery."""
    together = gradients[0].clone() if gradients else None
    for each in gradients[1:]:
        assert together is not None
        together.add_(each)
    return together


def rate_of(step: int) -> float:
    """Return the learning rate of a schedule, which changes while sweeps run."""
    return 1e-2 / (1 + step)


def by_hand(seen: Seen, used: list[int]) -> dict[str, Tensor]:
    """Return weights of Adam on the gradients in the order of delivery.

    `used`: the version that each step trained with.
    """
    _, reference, optimizer = build(ZOO["tied"])
    apply(reference, optimizer, config_of(ZOO["tied"], NATIVE), strict=False)
    versions, delivered, taken = [snapshot(reference)], [], seen.sweeps
    for step in range(len(used) + 1):
        while len(versions) <= (used[step] if step < len(used) else len(taken)):
            done = sum(taken[: len(versions) - 1])
            together = delivered[done : done + taken[len(versions) - 1]]
            for name, parameter in reference.named_parameters():
                parameter.grad = sum_of([each[name] for each in together if name in each])
            optimizer.param_groups[0]["lr"] = rate_of(seen.began[len(versions) - 1])
            optimizer.step()
            optimizer.zero_grad()
            versions.append(snapshot(reference))
        if step < len(used):
            assert step - sum(taken[: used[step]]) <= ON_SSD.max_staleness
            delivered.append(gradients_at(versions[used[step]], SEED + step))
    return versions[-1]


@BOTH
@pytest.mark.parametrize("gated", [True, False])
def test_sweeps_equal_adam_in_the_order_of_delivery(technique: AngelPtm, gated: bool) -> None:
    """Each sweep applies the sum of the delivered gradients; training uses the latest adopted version."""
    transfer.COUNTERS.take()
    with observed(gated) as seen:
        workload, model, optimizer, tuned = begun(technique)
        used = []
        for step in range(7):
            used.append(tuned.audit()["offload.states"]["version"])
            seen.step, optimizer.param_groups[0]["lr"] = step, rate_of(step)
            one_step(workload, model, optimizer, tuned, seed=SEED + step)
        largest = tuned.audit()["offload.states"]["largest_staleness"]
        tuned.finish()
        read = transfer.COUNTERS.take().get("ssd_read", 0)
        found = tuned.state_dict()["model"]
    wanted, taken = by_hand(seen, used), seen.sweeps
    assert sum(taken) == 7
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert not gated or (largest == technique.max_staleness and max(taken) > 1)
    numel = numel_of(rewritten(ZOO["tied"]))
    assert read == (
        12 * numel * len(taken) if technique is ON_SSD else 0
    )  # per sweep, of which there are no more than steps


@pytest.mark.parametrize(
    ("model", "technique"),
    [
        ("tied", ON_HOST),
        ("tied", ON_SSD),
        pytest.param("gpt", ON_HOST, marks=pytest.mark.slow),
        pytest.param("gpt", ON_SSD, marks=pytest.mark.slow),
    ],
)
def test_sweep_overlaps_with_the_next_step(model: str, technique: AngelPtm) -> None:
    assert not drift(ZOO[model], technique)
    step = rewritten(ZOO[model], technique)
    updates = np.flatnonzero(step.ops.name == step.names.index("memtune.host_update_.default"))
    assert len(updates)
    assert updates[-1] < np.flatnonzero(step.ops.phase == Phase.FORWARD)[0]
    assert (technique.exactly(), SMALL.exactly()) == (Exactness.LOSSY, Exactness.REORDERED)


def test_ssd_and_host_bytes_equal_the_formula() -> None:
    """One sweep per step, the maximum: 12 bytes per parameter each way; weights twice in pages, once of all
    others.
    """
    plain, step, waits = (
        rewritten(ZOO["tied"], *each)
        for each in ([], [ON_SSD], [SMALL.model_copy(update={"optimizer": "ssd"})])
    )
    numel = numel_of(plain)
    assert (
        total(step, Resource.SSD_READ)
        == total(step, Resource.SSD_WRITE)
        == step.peak_bytes(Tier.SSD)
        == 12 * numel
    )
    assert step.peak_bytes() == waits.peak_bytes()
    for link in (Resource.HOST_TO_DEVICE, Resource.DEVICE_TO_HOST):
        assert total(step, link) == total(waits, link)
    there = (step.storages.tier == Tier.HOST) & (step.storages.producer < 0)
    pages = int(
        waits.storages.bytes[
            (waits.storages.tier == Tier.HOST)
            & (waits.storages.producer < 0)
            & (waits.storages.kind == Kind.PARAMETER)
        ].sum()
    )
    outside = sum(int(plain.storages.bytes[p.storage]) for p in plain.parameters if p.block < 0)
    assert (
        int(step.storages.bytes[there & (step.storages.kind == Kind.PARAMETER)].sum()) == 2 * pages + outside
    )
    assert int(step.storages.bytes[there & (step.storages.kind == Kind.GRADIENT)].sum()) == 4 * numel


def test_checkpoints_lack_no_step_and_training_starts_from_loaded_weights() -> None:
    """State dicts and loads (of the model, or by `Tuned`) wait; later sweeps start from loaded weights."""
    workload, model, optimizer, tuned = begun()
    _run(3, workload, model, optimizer, tuned)
    kept = deepcopy(tuned.state_dict())
    after = [_after(workload, model, optimizer, tuned)]
    one_step(workload, model, optimizer, tuned, seed=1)
    tuned.load_state_dict(kept)
    after.append(_after(workload, model, optimizer, tuned))
    one_step(workload, model, optimizer, tuned, seed=1)
    model.load_state_dict(kept["model"])
    tuned.load_state_dict({"model": model.state_dict(), "optimizer": kept["optimizer"]})
    after.append(_after(workload, model, optimizer, tuned))
    for name, value in after[0].items():
        assert all(torch.equal(value, each[name]) for each in after[1:]), name
        assert name in kept["model"]
    assert any(not torch.equal(value, kept["model"][name]) for name, value in after[0].items())


def _after(workload: Any, model: nn.Module, optimizer: Any, tuned: Tuned) -> dict[str, Tensor]:
    """Return the weights after a step that the state dict includes."""
    one_step(workload, model, optimizer, tuned, seed=99)
    return {name: value.clone() for name, value in tuned.state_dict()["model"].items()}


@BOTH
def test_weights_loaded_into_the_model_are_in_every_later_version(technique: AngelPtm) -> None:
    """Weights that are not trained are included, which no sweep writes."""
    workload, model, optimizer = build(ZOO["tied"])
    frozen = next(
        name for name, each in model.named_parameters() if each.dim() == 2 and name != "embedding.weight"
    )
    model.get_parameter(frozen).requires_grad_(False)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.0)
    tuned = apply(model, optimizer, config_of(ZOO["tied"], technique), strict=False)
    one_step(workload, model, optimizer, tuned, seed=SEED)
    others = {name: value + 0.5 for name, value in model.state_dict().items()}
    model.load_state_dict(others)
    for step in range(3):
        one_step(workload, model, optimizer, tuned, seed=SEED + step)
        for name, value in tuned.state_dict()["model"].items():
            assert torch.allclose(value, others[name], atol=1e-6), (step, name)


def test_damaged_file_raises_with_the_name_of_the_tensor() -> None:
    workload, model, optimizer, tuned = begun()
    one_step(workload, model, optimizer, tuned, seed=SEED)
    path = ssd_tensors.current().path
    size = path.stat().st_size
    os.truncate(path, 0)
    with pytest.raises(
        EnvironmentFault, match=r"The file with the optimizer state of \S+ on SSD has been truncated"
    ) as caught:
        _run(4, workload, model, optimizer, tuned)
    assert caught.value.code == "MT364"
    os.truncate(path, size)
    with pytest.raises(ApplyError, match="raised in the middle of an update"):
        one_step(workload, model, optimizer, tuned, seed=SEED)
    del caught
    gc.collect()


def test_tensors_dropped_during_a_sweep_are_freed_when_it_ends() -> None:
    gate = threading.Event()
    with patch.object(SsdOptimizer, "update", _slowly(gate)):
        _run(2, *begun())
        gc.collect()
        assert ssd_tensors.current().used_bytes > 0
        gate.set()
        sweeps._thread().submit(int).result()
    gc.collect()
    assert ssd_tensors.current().used_bytes == 0


def _slowly(gate: threading.Event) -> Callable[..., None]:
    found = SsdOptimizer.update

    def update(*args: Any) -> None:
        assert gate.wait(60)
        found(*args)

    return update


def test_last_step_is_not_kept_while_updates_run() -> None:
    with pytest.raises(ValidationError, match="no step is complete while updates continue"):
        AngelPtm(kind="angel_ptm", lock_free=True, optimizer="ssd", resume="last_step")


@contextmanager
def _waits(self: AsyncUpdates, last: bool) -> Iterator[None]:
    """Replace `AsyncUpdates.sync`: begin the step when its sweep has ended, before its version is adopted."""
    if self._sweep is not None:
        self._sweep.result()
    yield


@pytest.mark.slow
@pytest.mark.native_ledger
def test_host_bytes_equal_the_prediction_if_sweeps_keep_pace() -> None:
    """Two further steps' gradients at most, waiting ones and those of the sweep, where sweeps are slower."""
    step = rewritten(ZOO["gpt"], ON_SSD)
    predicted, gradients = step.peak_bytes(Tier.HOST), 4 * numel_of(rewritten(ZOO["gpt"]))
    ledger = Ledger.open("cpu")
    for keeps_pace in (True, False):
        gc.collect()
        empty = ledger.live_bytes(HOST)
        workload, model, optimizer = build(ZOO["gpt"])
        peaks = []
        with patch.object(AsyncUpdates, "sync", _waits) if keeps_pace else observed(gated=True):
            tuned = apply(model, optimizer, config_of(ZOO["gpt"], ON_SSD), loss=workload.loss, strict=False)
            for _ in range(6):
                with tier(HOST):
                    batches = [workload.make_batch(2)]
                ledger.reset_peak()
                tuned.step(batches)
                peaks.append(ledger.peak_allocated_bytes(HOST) - empty)
            tuned.finish()
        if keeps_pace:
            assert peaks[-1] == pytest.approx(predicted, rel=0.02)
        else:
            assert predicted + gradients < max(peaks) <= 1.02 * predicted + 2 * gradients
        del tuned, model, optimizer


@pytest.mark.slow
@BOTH
def test_stale_weights_reach_a_similar_loss(technique: AngelPtm) -> None:
    found, wanted = (train(ZOO["gpt"], each, steps=20).losses for each in (technique, NATIVE))
    assert float(sum(found[-4:])) == pytest.approx(float(sum(wanted[-4:])), rel=0.02)
