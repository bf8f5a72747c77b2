"""The optimizer's step recorded once per parameter signature equals the full recording row for row, or is
recorded in full with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.zoo_paths import ZOO
from torch import Tensor

from memtune.autotune.record.optimizer_dedup import OptimizerDedup
from memtune.autotune.record.recording_session import Session, Trace, start_session
from memtune.program.step import Step
from memtune.workload.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")
Make = Callable[[list[Tensor]], torch.optim.Optimizer]

MODEL = """
import torch
from torch import nn

def model():
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4, bias=i > 1)) for i in range(5)))

def batch(size):
    return torch.ones(size, 4)

def loss(model, batch):
    return model(batch).mean()
"""  # noqa: E501


def assert_same(one: Step | None, other: Step | None) -> None:
    """Check that all columns are equal; autograd's node numbers up to an offset."""
    if one is None or other is None:
        assert one is other
        return
    others = other.values()
    for name, mine in one.values().items():
        theirs = others[name]
        if name == "ops.sequence_nr":
            mine, theirs = (np.unique(each, return_inverse=True)[1] for each in (mine, theirs))
        assert np.array_equal(mine, theirs) if isinstance(mine, np.ndarray) else mine == theirs, name


def traced(session: Session, sizes: Sequence[int]) -> list[Trace]:
    session.warm_up(2)
    return [session.traced(size) for size in sizes]


def session_of(path: Any, make: Make | None = None, *, dedup: bool) -> Session:
    workload = Workload.load(path)
    if make is not None:
        object.__setattr__(workload, "make_optimizer", lambda model: make(list(model.parameters())))
    session = replace(start_session(workload, "fake"), target="cuda")
    return (
        replace(session, optimizer_dedup=OptimizerDedup(session.model, session.optimizer, session.blocks))
        if dedup
        else session
    )


def assert_dedup_matches_full_recording(
    path: Any, make: Make | None = None, sizes: Sequence[int] = (2, 4)
) -> str:
    """Check that both recordings are equal; return why deduplication was disabled, or an empty string."""
    deduplicated = session_of(path, make, dedup=True)
    for mine, theirs in zip(
        traced(deduplicated, sizes), traced(session_of(path, make, dedup=False), sizes), strict=True
    ):
        assert_same(mine.step, theirs.step)
        assert_same(mine.hints.foreach, theirs.hints.foreach)
        assert mine.hints.signatures == theirs.hints.signatures
        assert mine.hints.step_counters == theirs.hints.step_counters
    assert deduplicated.optimizer_dedup is not None
    assert bool(deduplicated.optimizer_dedup._segments) != bool(deduplicated.optimizer_dedup.disabled_reason)
    return deduplicated.optimizer_dedup.disabled_reason


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(name, marks=() if name in ("gpt", "lora", "tied") else pytest.mark.slow)
        for name in ZOO
        if name not in ("moe", "tobf16")
    ],
)
def test_optimizer_dedup_equals_full_recording_of_zoo(model: str) -> None:
    assert assert_dedup_matches_full_recording(ZOO[model], sizes=[2]) == ""


@pytest.fixture
def tiny(tmp_path: Any) -> Any:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    "make",
    [
        torch.optim.SGD,
        lambda params: torch.optim.SGD(params, momentum=0.9, weight_decay=0.1, nesterov=True, maximize=True),
        lambda params: torch.optim.Adam(params, amsgrad=True, weight_decay=0.1),
        lambda params: torch.optim.AdamW(
            [{"params": params[2:], "lr": 0.1}, {"params": params[:2], "amsgrad": True}]
        ),
        lambda params: torch.optim.RMSprop(params, centered=True, momentum=0.9),
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.ASGD,
        torch.optim.Rprop,
    ],
)
def test_optimizer_dedup_equals_full_recording_of_torch_optimizers(tiny: Any, make: Make) -> None:
    assert assert_dedup_matches_full_recording(tiny, make) == ""


class Own(torch.optim.SGD):
    """A user's optimizer."""


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (torch.optim.RAdam, "RAdam is not among"),
        (Own, "Own is not among"),
        (lambda params: torch.optim.Adam(params, foreach=True), "many parameters at once"),
        (lambda params: torch.optim.Adam(params, lr=torch.tensor(0.1)), "one of its settings is a tensor"),
    ],
)
def test_optimizer_dedup_is_disabled_with_reason(tiny: Any, make: Make, reason: str) -> None:
    assert reason in assert_dedup_matches_full_recording(tiny, make)


def test_optimizer_dedup_is_disabled_by_step_hooks(tiny: Any) -> None:
    seen: list[int] = []

    def hooked(params: list[Tensor]) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(params)
        optimizer.register_step_post_hook(lambda *_: seen.append(len(optimizer.param_groups[0]["params"])))
        return optimizer

    assert assert_dedup_matches_full_recording(tiny, hooked) == "hooks or a replaced step() run with it"
    assert set(seen) == {18}  # two weights and a bias in each of five layers, and three biases more


def test_optimizer_dedup_is_disabled_if_updates_read_other_parameters(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = torch.optim.SGD.step

    def step(self: torch.optim.SGD, closure: Any = None) -> Any:
        group = [each for each in self.param_groups[0]["params"] if each.grad is not None]
        total = sum(each.grad.sum() for each in group)
        for each in group:
            each.grad.mul_(total)
        return plain(self, closure)

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    assert "parameters are not updated one after the other" in assert_dedup_matches_full_recording(
        tiny, torch.optim.SGD
    )
