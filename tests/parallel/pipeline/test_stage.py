"""Stages of one model after each other in one process: what they pass on, and what blocks of other stages
return there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memtune.activations.recompute.activation_table import ActivationTable
from memtune.errors import ApplyError
from memtune.parallel.pipeline.stage import Run, become_pieces
from memtune.runtime.context import Context
from memtune.workload.output_structure import structure_of

CPU = torch.device("cpu")
BLOCKS = ["h.0", "h.1", "h.2"]


class Block(nn.Linear):
    """Returns `(x, None)`, as blocks of Hugging Face's models do."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x).relu(), None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.h, self.last = (
            nn.Linear(4, 4),
            nn.ModuleList(Block(4, 4) for _ in BLOCKS),
            nn.Linear(4, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.h:
            x, kept = block(x)
            assert kept is None
        out: Tensor = self.last(x).mean()
        return out


def pieces(outputs: list[str]) -> tuple[nn.Module, Run]:
    torch.manual_seed(0)
    model, run = Net(), Run(len(BLOCKS), outputs)
    context = Context(model, torch.optim.SGD(model.parameters()), BLOCKS, CPU, ActivationTable(model, BLOCKS))
    become_pieces(
        context, BLOCKS, run, frozenset({"first.weight", "first.bias"}), dict(model.named_parameters())
    )
    return model, run


def test_skipped_blocks_return_planned_structure() -> None:
    torch.manual_seed(0)
    plain, batch = Net(), torch.ones(5, 4)
    model, run = pieces([structure_of((batch, None))] * 3)
    assert run.probe(model, lambda model, x: model(x), batch).shape == (5, 4)
    given = None
    for block in range(3):
        given = run.output_of(block, block, given, lambda: model(batch))
    assert given is not None
    assert torch.equal(given, plain(batch))


def test_block_with_changed_output_structure_is_refused() -> None:
    model, run = pieces([""] * 3)
    with pytest.raises(
        ApplyError, match=r"block 0 returns \{.*null\]\}, and a tensor when the config was made"
    ):
        run.output_of(0, 0, None, lambda: model(torch.ones(5, 4)))
