"""A replaced `step` works with learning rate schedulers, hooks, and GradScaler's inspection of its
signature.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from support import interrupted_loops
from support.interrupted_loops import Net
from support.zoo_paths import ZOO
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LinearLR

from memtune.api import apply
from memtune.errors import ApplyError
from memtune.search_spaces.offload.states.optimizer_cpu import OptimizerCpu
from memtune.search_spaces.offload.states.smart_infinity import SmartInfinity
from memtune.search_spaces.offload.states.zero_infinity import ZeroInfinity
from memtune.technique import Technique
from memtune.testing.training import SEED, build, config_of, one_step

STATES: list[Technique] = [
    OptimizerCpu(kind="optimizer_cpu"),
    OptimizerCpu(kind="optimizer_cpu", update="native"),
    ZeroInfinity(kind="zero_infinity"),
    SmartInfinity(kind="smart_infinity", domains=1),
]


def _rates(states: Technique, before: bool) -> tuple[list[float], int, int]:
    """Return the rates of three steps under a scheduler built before or after `apply`, and the scheduler's
    step count.
    """
    workload, model, optimizer = build(ZOO["tied"])

    def schedule() -> LinearLR:
        return LinearLR(optimizer, start_factor=1.0, end_factor=0.25, total_iters=3)

    first = schedule() if before else None
    tuned = apply(model, optimizer, config_of(ZOO["tied"], states), strict=False)
    scheduler = first or schedule()
    used, calls = [], 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    optimizer.register_step_post_hook(count)
    for turn in range(3):
        used.append(float(optimizer.param_groups[0]["lr"]))
        one_step(workload, model, optimizer, tuned, seed=SEED + turn)
        scheduler.step()
    return [rate / used[0] for rate in used], scheduler.last_epoch, calls


@pytest.mark.usefixtures("ssd", "one_thread")
@pytest.mark.drawn(3)
@pytest.mark.parametrize("before", [True, False], ids=["scheduler first", "apply first"])
@pytest.mark.parametrize("states", STATES, ids=["own", "native", "ssd", "updaters"])
def test_scheduler_counts_steps_without_a_warning(states: Technique, before: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rates, epoch, calls = _rates(states, before)
    assert rates == pytest.approx([1.0, 0.75, 0.5])
    assert (epoch, calls) == (3, 3)


@pytest.mark.usefixtures("one_thread")
def test_scheduler_that_steps_first_still_warns(recwarn: pytest.WarningsRecorder) -> None:
    """The mark on `step` must not hide torch's warning about a scheduler that steps first."""
    _, model, optimizer = build(ZOO["tied"])
    scheduler = LinearLR(optimizer)
    apply(model, optimizer, config_of(ZOO["tied"], STATES[1]), strict=False)
    scheduler.step()
    assert any("before `optimizer.step()`" in str(each.message) for each in recwarn)


@pytest.mark.usefixtures("one_thread")
def test_replaced_step_has_the_optimizers_signature() -> None:
    _, model, optimizer = build(ZOO["tied"])
    wanted = inspect.signature(optimizer.step)
    apply(model, optimizer, config_of(ZOO["tied"], STATES[1]), strict=False)
    assert inspect.signature(optimizer.step) == wanted
    assert str(inspect.signature(AdamW([nn.Parameter(torch.zeros(1))]).step)) == str(wanted)


def _clips(model: Net, optimizer: Optimizer, by_groups: bool) -> None:
    def clip(*_: Any) -> None:
        of_groups = [each for group in optimizer.param_groups for each in group["params"]]
        nn.utils.clip_grad_norm_(of_groups if by_groups else list(model.parameters()), 0.05)

    optimizer.register_step_pre_hook(clip)


def _clipped(name: str, when: str, by_groups: bool = False) -> dict[str, torch.Tensor]:
    """Return the weights after two steps whose gradients a user's hook clips, registered before or after
    `apply`.
    """
    model, optimizer = interrupted_loops.build()
    if when == "before":
        _clips(model, optimizer, by_groups)
    settings, plan = (
        (interrupted_loops.ALL | interrupted_loops.AT_END)[name] if name else ({"kind": "none"}, {})
    )
    config = {"settings": {"offload": {"states": settings}}, "plan": {"offload.states": plan} if plan else {}}
    tuned = apply(model, optimizer, config, loss=interrupted_loops.loss, strict=False)
    if when == "after":
        _clips(model, optimizer, by_groups)
    for index in range(2):
        interrupted_loops.step(model, optimizer, index)
    weights: dict[str, torch.Tensor] = tuned.state_dict()["model"]
    return weights


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.usefixtures("ssd", "one_thread")
@pytest.mark.parametrize("name", ["optimizer_cpu", "native", "SSD alone", "l2l", "zero_offload", "lohan"])
def test_clipping_pre_hook_sees_all_gradients(name: str, when: str) -> None:
    """The hook runs after some gradients are offloaded, whenever it was registered."""
    interrupted_loops.assert_equal(_clipped(name, when), _clipped("", "before"))
    interrupted_loops.assert_equal(
        _clipped(name, when, by_groups=True), _clipped("", "before", by_groups=True)
    )


@pytest.mark.usefixtures("one_thread")
def test_change_of_gradients_after_early_updates_raises() -> None:
    """An early update has already used the other gradients."""
    model, optimizer = interrupted_loops.build()
    config = {"settings": {"execution": {"order": {"kind": "roam"}}}}
    tuned = apply(model, optimizer, config, loss=interrupted_loops.loss, strict=False)
    _clips(model, optimizer, by_groups=False)
    with pytest.raises(ApplyError, match="MT364 clipping cannot change gradients that have been used"):
        tuned.step([interrupted_loops.batch(0)])
