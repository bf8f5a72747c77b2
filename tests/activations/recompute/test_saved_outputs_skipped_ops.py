"""Calls that a region's second run skips: never a wrong gradient, whatever the plan."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from memtune.activations.recompute.activation_table import ActivationTable
from memtune.program.op_addresses import OpAddresses

MM, TANH, MUL, DROP, COS = (
    f"aten.{name}"
    for name in ("mm.default", "tanh.default", "mul.Tensor", "native_dropout.default", "cos.default")
)
PLANS = {
    "nothing": OpAddresses(),
    "products kept": OpAddresses(kept=frozenset({(MM, 0), (MM, 1)})),
    "what nothing needs": OpAddresses(kept=frozenset({(MUL, 0)}), skipped=frozenset({(MM, 0), (COS, 0)})),
    "what autograd saved": OpAddresses(
        kept=frozenset({(MUL, 0)}), skipped=frozenset({(MM, 0), (COS, 0), (DROP, 0)})
    ),
    "what runs again needs": OpAddresses(skipped=frozenset({(MM, 0)})),
    "what decides": OpAddresses(
        kept=frozenset({(MUL, 0)}), skipped=frozenset({(MM, 0), (COS, 0), (TANH, 0)})
    ),
    "all": OpAddresses(
        skipped=frozenset(
            (name, n) for name in (MM, TANH, MUL, DROP, COS, "aten.sum.default") for n in range(3)
        )
    ),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x).cos() * x
        h = torch.native_dropout(h, 0.5, True)[0]
        h = torch.tanh(h)
        if h.sum() > 1e6:
            h = h + 1
        return nn.functional.dropout(self.two(h), 0.5).sin()


def gradients(calls: OpAddresses | None) -> list[Tensor]:
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(), Block()), torch.randn(4, 8, requires_grad=True)
    if calls is not None:
        table = ActivationTable(model, ["0", "1"])
        for index in range(2):
            table.claim_recompute(index, calls)
        table.install()
    torch.manual_seed(1)
    model(x).square().sum().backward()
    return [p.grad for p in model.parameters()] + [x.grad]


@pytest.mark.parametrize("calls", PLANS.values(), ids=PLANS)
def test_gradients_are_equal_to_the_bit(calls: OpAddresses) -> None:
    assert all(torch.equal(one, two) for one, two in zip(gradients(calls), gradients(None), strict=True))


def test_plan_round_trips_as_plain_data() -> None:
    assert all(OpAddresses.from_plain(calls.to_plain()) == calls for calls in PLANS.values())
