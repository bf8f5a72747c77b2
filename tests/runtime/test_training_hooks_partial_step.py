"""Steps that raise: the user's hook sees and leaves the same state as with the plain optimizer, or training
stops.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import interrupted_loops
from support.gloo import run_ranks
from support.interrupted_loops import Net, assert_equal, batch, loss, made, plain, step, weights
from torch.optim import Optimizer

from memtune.api import Tuned, apply
from memtune.errors import ApplyError
from memtune.offload.core.optimizer_param import OptimizerParameter

pytestmark = pytest.mark.usefixtures("one_thread", "ssd")
ROAM = {"settings": {"execution": {"order": {"kind": "roam"}}}}
PACKS = {
    "settings": {"offload": {"states": {"kind": "harmony"}}},
    "plan": {"offload.states": {"forward": [[0, 2]], "backward": [[0, 2], [2, 4]], "swapped_bytes": 0}},
}
OTHERS: dict[str, dict[str, Any]] = {"roam": ROAM, "harmony": PACKS, "": {"settings": {}}}
EARLY = ("roam", "harmony", "per_gradient", "lohan")
"""Settings with updates inside backward, under `Tuned.step`."""


class Upset(Exception):
    """Error raised by the user's hook."""


def _raises(optimizer: Optimizer, when: str) -> None:
    """Return a hook that raises in the second step."""
    steps = 0

    def hook(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 2:
            raise Upset

    (optimizer.register_step_pre_hook if when == "before" else optimizer.register_step_post_hook)(hook)


def _started(name: str, when: str, *, first: bool) -> tuple[Net, Optimizer, Tuned]:
    model, optimizer = interrupted_loops.build()
    if first:
        _raises(optimizer, when)
    settings, plan = (interrupted_loops.ALL | interrupted_loops.AT_END).get(name, ({}, {}))
    config = {"settings": {"offload": {"states": settings}}, "plan": {"offload.states": plan} if plan else {}}
    tuned = apply(model, optimizer, OTHERS.get(name, config), loss=loss, strict=False)
    if not first:
        _raises(optimizer, when)
    return model, optimizer, tuned


def _trained(name: str, when: str, *, first: bool) -> dict[str, torch.Tensor]:
    _, optimizer, tuned = _started(name, when, first=first)
    for index in range(4):
        try:
            tuned.step([batch(index)])
        except Upset:
            optimizer.zero_grad()
    found: dict[str, torch.Tensor] = tuned.state_dict()["model"]
    return found


@pytest.mark.parametrize("first", [True, False], ids=["hook first", "apply first"])
@pytest.mark.parametrize("name", ["roam", "harmony", "per_gradient", "ratio", "SSD alone"])
def test_raising_post_hook_sees_all_updates(name: str, first: bool) -> None:
    assert_equal(_trained(name, "after", first=first), plain(4))


@pytest.mark.parametrize("name", ["harmony", "per_gradient", "ratio", "SSD alone"])
def test_raising_pre_hook_sees_no_updates_or_stops_training(name: str) -> None:
    if name in EARLY:
        with pytest.raises(ApplyError, match="MT368 A step was begun"):
            _trained(name, "before", first=True)
    else:
        assert_equal(_trained(name, "before", first=True), _trained("", "before", first=True))


@pytest.mark.drawn(9)
@pytest.mark.parametrize("name", [*interrupted_loops.ALL, *interrupted_loops.AT_END])
def test_closure_runs_before_the_step(name: str) -> None:
    """As in a plain loop; Lightning trains this way."""
    model, optimizer, tuned = made(name)
    for index in range(3):

        def closure(index: int = index) -> torch.Tensor:
            optimizer.zero_grad()
            found: torch.Tensor = loss(model, batch(index))
            found.backward()  # type: ignore[no-untyped-call]
            return found

        assert optimizer.step(closure).grad_fn is not None
    assert_equal(tuned.state_dict()["model"], plain(3))


@pytest.mark.parametrize("name", ["ratio", "native", "l2l", "SSD alone", "lohan"])
def test_partial_step_refuses_the_next_step(name: str) -> None:
    """The update refuses a state of wrong size, set by hand, after all others are done."""
    model, optimizer, tuned = made(name)
    step(model, optimizer, 0)
    saved = copy.deepcopy(tuned.state_dict())
    held = [
        each
        for group in optimizer.param_groups
        for each in group["params"]
        if isinstance(each, OptimizerParameter)
    ]
    optimizer.state[held[-1]]["exp_avg"] = torch.zeros(3)
    with pytest.raises((ValueError, RuntimeError), match=r"as many elements|must match the size"):
        step(model, optimizer, 1)
    for _ in range(2):
        with pytest.raises(
            ApplyError, match=r"MT368 optimizer.step\(\) raised in the middle(.|\n)*Tuned.load_state_dict"
        ):
            step(model, optimizer, 1)
    tuned.load_state_dict(saved)
    step(model, optimizer, 1)
    assert_equal(weights(model), plain(2))


# -- on gloo ranks -------------------------------------------------------------------------------------------


def gathered(kind: str) -> bool:
    """Return True if a hook that raises after a step, registered before `apply`, sees the rows that other
    ranks have updated.
    """
    model, optimizer = interrupted_loops.build()
    _raises(optimizer, "after")
    config = {"settings": {"sharding": {"states": {"kind": kind}}}}
    apply(model, optimizer, config, loss=loss, strict=False)
    step(model, optimizer, 0)
    with pytest.raises(Upset):
        step(model, optimizer, 1)
    found, wanted = weights(model), plain(2)
    return all(torch.allclose(found[name], wanted[name], atol=1e-6) for name in wanted)


@pytest.mark.slow
def test_post_hook_sees_the_weights_of_all_ranks() -> None:
    assert run_ranks(gathered, 2, "zero1") == [True, True]
