"""A loop that never clears gradients is warned where a config frees them, and nowhere else."""

from __future__ import annotations

import warnings

import pytest
import torch
from support.zoo_paths import ZOO

from memtune.api import apply
from memtune.errors import ApplyError
from memtune.offload.gradients import uncleared
from memtune.search_spaces.execution.order import roam
from memtune.search_spaces.offload.states import elixir, optimizer_cpu, zero_offload
from memtune.search_spaces.recompute import full
from memtune.technique import Technique
from memtune.testing.training import build, config_of

FREES = (optimizer_cpu.OptimizerCpu(), zero_offload.ZeroOffload(), elixir.Elixir(), roam.Roam())


def warned(technique: Technique, clear: str) -> list[str]:
    """Train four steps in a custom loop; return the warnings of uncleared gradients."""
    workload, model, optimizer = build(ZOO["gpt"])
    tuned = apply(model, optimizer, config_of(ZOO["gpt"], technique), strict=False)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(4):
            with tuned.micro_batch(last=True):
                loss = workload.loss(model, workload.make_batch(2))
                if clear == "before backward":
                    optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if clear == "model":
                model.zero_grad()
    return [str(each.message) for each in found if uncleared.TEXT in str(each.message)]


@pytest.mark.parametrize("technique", FREES, ids=lambda each: each.kind)
def test_loop_without_zero_grad_is_warned_once(technique: Technique) -> None:
    assert len(warned(technique, "never")) == 1


@pytest.mark.parametrize("clear", ["before backward", "model"])
@pytest.mark.parametrize("technique", FREES, ids=lambda each: each.kind)
def test_loop_that_clears_is_not_warned(technique: Technique, clear: str) -> None:
    assert warned(technique, clear) == []


def test_config_that_keeps_gradients_is_not_warned() -> None:
    assert warned(full.Full(), "never") == []


@pytest.mark.parametrize("technique", [*FREES, full.Full()], ids=lambda each: each.kind)
def test_second_optimizer_of_freed_gradients_is_refused(technique: Technique) -> None:
    """It would find no gradients, and its updates would be missing silently."""
    workload, model, optimizer = build(ZOO["gpt"])
    tuned = apply(model, optimizer, config_of(ZOO["gpt"], technique), strict=False)
    own = torch.nn.Linear(4, 4)
    foreign = torch.optim.SGD(own.parameters(), 0.1)
    second = torch.optim.SGD(list(model.parameters())[:2], 0.1)
    with tuned.micro_batch(last=True):
        loss = workload.loss(model, workload.make_batch(2))
        loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    foreign.step()
    if technique.kind == "full":
        before = second.param_groups[0]["params"][0].detach().clone()
        second.step()
        assert not torch.equal(before, second.param_groups[0]["params"][0])
    else:
        with pytest.raises(ApplyError, match="Another optimizer steps 2 parameters"):
            second.step()
