"""Guards find every change of data that the code of a captured module can read, and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from memtune.activations.capture.guards import Guards

FLAG = 1.0
UNREAD = [1]


def helped(x: Tensor) -> Tensor:
    return x * FLAG


class Config:
    def __init__(self) -> None:
        self.rates = {"up": [1.0]}


class Block(nn.Module):
    scale = 1.0
    z: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.c.weight = self.b.weight
        self.register_buffer("z", None)
        self.cfg, self.scales, self.act, self.config = {"scale": 1.0}, [1, 1], torch.tanh, Config()
        self.kinds = {"a"}
        self.history: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        y = (
            self.c(self.b(self.act(self.helper(x))))
            * self.cfg["scale"]
            * self.scales[0]
            * self.config.rates["up"][0]
        )
        y = y + len(self.kinds) + (0.0 if getattr(self, "shift", None) is None else 1.0)
        return y if self.z is None else y * self.z

    def helper(self, x: Tensor) -> Tensor:
        return helped(self.a(x)) * self.scale


def untie(block: Block) -> None:
    block.c.weight = nn.Parameter(block.b.weight.detach().clone())


def transpose(block: Block) -> None:
    block.a.weight.data = block.a.weight.data.t().contiguous().t()


def replace_weight(block: Block) -> None:
    computed = block.a.weight * 2
    del block.a._parameters["weight"]
    block.a._parameters["weight"] = computed  # type: ignore[assignment]  # as functional_call does


CHANGES: dict[str, Callable[[Block], Any]] = {
    "dict": lambda block: block.cfg.update(scale=2.0),
    "list": lambda block: block.scales.__setitem__(1, 2),
    "type in a list": lambda block: block.scales.__setitem__(0, 1.0),
    "set": lambda block: block.kinds.add("b"),
    "deep in a config": lambda block: block.config.rates["up"].append(1.0),
    "another config": lambda block: setattr(block, "config", Config()),
    "over a class attribute": lambda block: setattr(block, "scale", 1.0),
    "asked for by getattr": lambda block: setattr(block, "shift", 1),
    "function": lambda block: setattr(block, "act", torch.sigmoid),
    "forward of a child": lambda block: setattr(block.a, "forward", torch.tanh),
    "buffer in place of None": lambda block: setattr(block, "z", torch.ones(4)),
    "untied": untie,
    "strides": transpose,
    "not a leaf": replace_weight,
    "child": lambda block: setattr(block, "a", nn.Linear(4, 4)),
    "class": lambda block: setattr(block.a, "__class__", type("Other", (nn.Linear,), {})),
    "mode": lambda block: block.eval(),
    "frozen": lambda block: block.a.requires_grad_(False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_guards_report_each_change(change: str) -> None:
    block = Block()
    guards = Guards(block)
    assert guards.changed() == ""
    CHANGES[change](block)
    assert guards.changed() != ""


@pytest.mark.parametrize("on", ["global", "class", "method"])
def test_guards_cover_globals_of_helpers_and_classes(on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    guards = Guards(Block())
    if on == "global":
        monkeypatch.setitem(globals(), "FLAG", 2.0)
    else:
        monkeypatch.setattr(Block, *(("scale", 2.0) if on == "class" else ("helper", lambda self, x: x)))
    assert guards.changed() != ""
    monkeypatch.undo()
    assert guards.changed() == ""


def test_guards_cover_global_hooks() -> None:
    guards = Guards(Block())
    hook = register_module_forward_hook(lambda module, given, out: None)
    try:
        assert "hook" in guards.changed()
    finally:
        hook.remove()
    assert guards.changed() == ""


def test_guards_ignore_data_that_no_code_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block()
    guards = Guards(block)
    block.history.append(1)
    block.seen_loss = torch.ones(())
    block.load_state_dict({name: value * 2 for name, value in block.state_dict().items()}, assign=True)
    block.c.weight = block.b.weight
    monkeypatch.setitem(globals(), "UNREAD", [2])
    block.cfg = {"scale": 1.0}
    assert guards.changed() == ""
    block.cfg["scale"] = 3.0  # the new one is looked into as well
    assert guards.changed() != ""
