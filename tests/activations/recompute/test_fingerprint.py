"""Quick fingerprints of a region whose two runs were equal in full."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from memtune.activations.recompute.activation_table import ActivationTable
from memtune.errors import ApplyError


class Branches(nn.Module):
    """Takes the branch named by `again` when it runs inside backward."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.again = nn.Linear(8, 8), nn.Linear(8, 8), ""

    def forward(self, x: Tensor) -> Tensor:
        branch = self.again if torch._C._current_autograd_node() is not None else ""
        x = (self.other if branch == "weight" else self.one)(torch.tanh(x))
        if branch == "node":
            x = x + 0.0
        return torch.sigmoid(x) if branch == "op" else torch.tanh(x)


@pytest.mark.parametrize(
    ("again", "named"),
    [("weight", r"other\.weight"), ("node", "nodes up to TanhBackward0"), ("op", "SigmoidBackward0")],
)
def test_later_second_run_that_differs_raises(again: str, named: str) -> None:
    model = nn.Sequential(Branches())
    table = ActivationTable(model, ["0"])
    table.claim_recompute(0)
    table.install()
    for step in range(3):
        assert table.regions[0].is_quick == (step > 0)
        model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    model[0].again = again
    with pytest.raises(ApplyError, match=f"MT307 .*{named}"):
        model(torch.randn(4, 8, requires_grad=True)).sum().backward()


def test_modules_put_in_place_later_are_compared_by_their_own_parameters() -> None:
    model = nn.Sequential(Branches())
    table = ActivationTable(model, ["0"])
    table.claim_recompute(0)
    table.install()
    for _ in range(2):
        model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    model[0].one = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert set(table.regions[0].contract.names().values()) >= {"one.0.weight", "one.1.bias"}
