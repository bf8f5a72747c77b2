"""A device that is lost in the middle of a step: one message, and what the host holds stays as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.gloo import run_ranks
from support.simulated_device import lose
from support.zoo_paths import ZOO

from memtune.api import apply
from memtune.errors import EnvironmentFault
from memtune.testing.training import build

pytestmark = pytest.mark.device


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "states",
    [{"kind": "zero_offload"}, {"kind": "optimizer_cpu"}, {"kind": "stronghold", "window": 1}],
    ids=lambda each: each["kind"],
)
def test_lost_device_is_one_message_and_leaves_the_host_as_it_was(states: dict[str, Any]) -> None:
    ((code, held, changed),) = run_ranks(step_without_device, 0, states, device="sim")
    assert code == "MT133"
    assert held > 10
    assert changed == []


def step_without_device(states: dict[str, Any]) -> tuple[str, int, list[str]]:
    """Lose the device after a forward; return the error's code, how many tensors the host holds, and which of
    them have changed.
    """
    workload, model, optimizer = build(ZOO["gpt"], torch.device("sim", 0))
    is_last = False

    def loss(m: Any, batch: Any) -> Any:
        found = workload.loss(m, batch)
        if is_last:
            lose()
        return found

    tuned = apply(model, optimizer, {"settings": {"offload": {"states": states}}}, loss=loss, strict=False)

    def on_host() -> dict[str, torch.Tensor]:
        shown = dict(model.named_parameters())
        state = optimizer.state_dict()["state"]
        kept = {f"{key} of {n}": value for n, each in state.items() for key, value in each.items()}
        return {
            name: value.detach()
            for name, value in {**shown, **kept}.items()
            if isinstance(value, torch.Tensor) and value.device.type == "cpu"
        }

    for _ in range(2):
        tuned.step([workload.make_batch(2)])
    torch.accelerator.synchronize()
    held, is_last = on_host(), True
    before = {name: value.clone() for name, value in held.items()}
    with pytest.raises(EnvironmentFault, match="was lost in the middle of a training step") as caught:
        tuned.step([workload.make_batch(2)])
    changed = [name for name, value in before.items() if not torch.equal(value, held[name])]
    return caught.value.code, len(held), changed
