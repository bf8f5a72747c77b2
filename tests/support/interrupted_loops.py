"""A net of four blocks under each technique that moves states, for tests of interrupted or irregular
loops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from memtune.api import Tuned, apply
from memtune.testing.training import device_under_test

SLIDING = {"slots": 2, "deferred": []}
STORES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "l2l": ({"kind": "l2l"}, {}),
    "stronghold": ({"kind": "stronghold", "window": 2}, SLIDING),
    "late": ({"kind": "stronghold", "window": 2, "deferred": [0, 2]}, SLIDING | {"deferred": [0, 2]}),
    "zero_infinity": ({"kind": "zero_infinity", "parameters": "host"}, {}),
    "gradients on SSD": ({"kind": "zero_infinity", "parameters": "host", "gradients": "ssd"}, {}),
    "all else on SSD": (
        {"kind": "zero_infinity", "optimizer": "host", "parameters": "ssd", "gradients": "ssd"},
        {},
    ),
    "patrickstar": ({"kind": "patrickstar"}, {"chunk_bytes": 2048, "slots": [2] * 8}),
    "elixir": ({"kind": "elixir"}, {"chunk_bytes": 1024, "slots": [6] * 8}),
    "angel_ptm": ({"kind": "angel_ptm"}, {"page_bytes": 512, "frames": 6, "prefetch": [2] * 8}),
}
DOWN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero_offload": ({"kind": "zero_offload"}, {}),
    "ratio": ({"kind": "zero_offload", "ratio": 0.5}, {}),
    "per_gradient": ({"kind": "optimizer_cpu", "update": "native", "trigger": "per_gradient"}, {}),
    "lohan": ({"kind": "lohan"}, {}),
    "one by one": ({"kind": "lohan", "bucket_mib": 0}, {}),
}
ALL = STORES | DOWN
AT_END: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "optimizer_cpu": ({"kind": "optimizer_cpu"}, {}),
    "native": ({"kind": "optimizer_cpu", "update": "native"}, {}),
    "SSD alone": ({"kind": "zero_infinity"}, {}),
    "smart_infinity": ({"kind": "smart_infinity", "domains": 1}, {}),
}
"""Under which gradients stay on the device until the step."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        if self.fails:
            raise RuntimeError("forward raised")
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.last = (
            nn.Linear(8, 8),
            nn.ModuleList(Block() for _ in range(4)),
            nn.Linear(8, 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def batch(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def build() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Net().to(device_under_test())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def made(name: str) -> tuple[Net, torch.optim.Optimizer, Tuned]:
    model, optimizer = build()
    settings, plan = (ALL | AT_END)[name]
    config = {"settings": {"offload": {"states": settings}}, "plan": {"offload.states": plan} if plan else {}}
    return model, optimizer, apply(model, optimizer, config, loss=loss, strict=False)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
    optimizer.zero_grad()
    loss(model, batch(index).to(device_under_test())).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def plain(steps: int) -> dict[str, Tensor]:
    model, optimizer = build()
    for index in range(steps):
        step(model, optimizer, index)
    return weights(model)


def assert_equal(mine: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    assert [name for name in others if not torch.equal(mine[name], others[name])] == []
