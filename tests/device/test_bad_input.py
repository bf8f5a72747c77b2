"""Devices that cannot be used as asked, and a device lost in the middle of a step: one message each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memtune import apply
from memtune.device import accelerator
from memtune.errors import ApplyError, EnvironmentFault, MemtuneError


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)), nn.Linear(8, 8))
    return model, torch.optim.AdamW(model.parameters(), 0.1)


@pytest.mark.parametrize(
    ("device", "code", "message"),
    [
        ("tpux", "MT131", "has no device type tpux"),
        ("cuda", "MT104", "torch sees no CUDA device"),
        ("xpu:1", "MT104", "There is no device xpu:1: this process sees 1"),
    ],
)
def test_device_that_is_not_there_is_one_message(
    device: str, code: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "device_type", lambda: "xpu")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    model, optimizer = built()
    with pytest.raises(MemtuneError, match=message) as caught:
        apply(model, optimizer, {"settings": {}}, device=device)
    assert caught.value.code == code
    assert caught.value.fix
    assert all(each.device.type == "cpu" for each in model.parameters())


def test_model_on_two_devices_is_refused() -> None:
    model, optimizer = built()
    model.register_buffer("mask", torch.ones(3, device="meta"))
    with pytest.raises(ApplyError, match="on 2 devices: cpu and meta") as caught:
        apply(model, optimizer, {"settings": {}})
    assert caught.value.code == "MT134"
    assert "0.0.weight, 0.0.bias and 6 more on cpu; mask on meta" in caught.value.evidence
    assert caught.value.fix
    del model.mask
    apply(model, optimizer, {"settings": {}})  # nothing was left behind


def test_optimizer_state_on_another_device_is_refused() -> None:
    model, optimizer = built()
    first = next(model.parameters())
    optimizer.state[first] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros_like(first, device="meta")}
    with pytest.raises(ApplyError, match="state is on another device") as caught:
        apply(model, optimizer, {"settings": {}})
    assert caught.value.code == "MT135"
    assert "exp_avg of 0.0.weight on meta" in caught.value.evidence


def test_loss_with_a_tensor_on_another_device_names_the_fix() -> None:
    model, optimizer = built()
    elsewhere = torch.ones(4, 8, device="meta")
    tuned = apply(model, optimizer, {"settings": {}}, loss=lambda m, x: (m(x) + elsewhere).sum())
    with pytest.raises(ApplyError, match="on another device than the model's, cpu") as caught:
        tuned.step([torch.ones(4, 8)])
    assert caught.value.code == "MT135"
    assert "torch: " in caught.value.evidence


class Lost(torch.autograd.Function):
    """Identity whose backward finds no device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure\nmore")


@pytest.mark.parametrize(
    "states",
    [{"kind": "none"}, {"kind": "zero_offload"}, {"kind": "stronghold", "window": 1}],
    ids=lambda each: each["kind"],
)
def test_device_lost_in_a_step_leaves_the_state_on_the_host(states: dict[str, Any]) -> None:
    model, optimizer = built()
    is_lost = False

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        out = m[1](m[0](x))  # type: ignore[index]
        return m[3](m[2](Lost.apply(out) if is_lost else out)).square().sum()  # type: ignore[index, no-untyped-call, no-any-return]

    config = {"settings": {"offload": {"states": states}}}
    tuned = apply(model, optimizer, config, loss=loss)
    tuned.step([torch.ones(2, 8)])
    before = flat(tuned.state_dict())
    is_lost = True
    with pytest.raises(EnvironmentFault, match="was lost in the middle of a training step") as caught:
        tuned.step([torch.ones(2, 8)])
    assert (caught.value.code, caught.value.exit_code) == ("MT133", 3)
    assert "unspecified launch failure" in caught.value.evidence
    after = flat(tuned.state_dict())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def flat(document: Any, path: str = "") -> dict[str, Tensor]:
    """Return copies of the tensors in nested dictionaries and lists, by path."""
    if isinstance(document, Tensor):
        return {path: document.detach().clone()}
    parts = document.items() if isinstance(document, dict) else ()
    parts = enumerate(document) if isinstance(document, list) else parts
    return {name: each for key, part in parts for name, each in flat(part, f"{path}/{key}").items()}
