"""Recompute is refused, with the reason, if it could free nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from memtune import hardware
from memtune.search_spaces import find
from memtune.technique import Target
from memtune.testing.drift_check import plain_program

MODEL = """
import torch
from torch import nn

def model():
    return nn.Sequential(*[{block} for _ in range(3)])

def batch(size):
    return torch.randn(size, 8)

def loss(model, batch):
    return model(batch).square().mean()
"""
KINDS = ("full", "every_nth", "selective")


@pytest.mark.parametrize(
    ("block", "refused"),
    [
        ("nn.Linear(8, 8)", {"full", "every_nth", "selective"}),
        ("nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))", {"selective"}),
        ("nn.Sequential(nn.Linear(8, 8), nn.GELU())", {"selective"}),
        ("nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU())", set()),
    ],
)
def test_blocks_that_save_nothing_of_their_own_are_refused(
    block: str, refused: set[str], tmp_path: Path
) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL.format(block=block))
    program = plain_program(path)
    assert len(program.step.blocks) == 3
    found = {
        kind: find("recompute", kind)(kind=kind).fits(program, Target(hardware.find("a100-80g")))
        for kind in KINDS
    }  # type: ignore[call-arg]
    assert {kind for kind, reason in found.items() if reason} == refused
    assert all("nothing inside the blocks" in str(found[kind]) for kind in refused)


TALKS = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._functional_collectives import all_reduce
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x).exp()[:, None, None]
        y = F.scaled_dot_product_attention(y, y, y)[:, 0, 0]
        scale = y.detach().mean()
        scale = all_reduce(scale, "sum", dist.group.WORLD)
        return x + y.sin() * scale

def model():
    return nn.Sequential(*[Block() for _ in range(3)])

def batch(size):
    return torch.randn(size, 8)

def loss(model, batch):
    return model(batch).square().mean()
"""
AGAIN = (
    *("full", "every_nth", "selective", "balanced", "planned", "attention_output"),
    *("attention_boundary", "checkmate", "dtr", "megtaichi", "coop"),
)
"""Kinds that run ops of blocks again; compiled graphs (`memory_budget`) keep the outputs of collectives."""


@pytest.mark.parametrize(
    "call", ['scale = all_reduce(scale, "sum", dist.group.WORLD)', "dist.all_reduce(scale)"]
)
def test_collective_inside_a_block_is_refused_by_name(call: str, tmp_path: Path) -> None:
    path = tmp_path / "talks.py"
    path.write_text(TALKS.replace('scale = all_reduce(scale, "sum", dist.group.WORLD)', call))
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        program = plain_program(path)
    finally:
        torch.distributed.destroy_process_group()
    target = Target(hardware.find("a100-80g"))
    found = {kind: str(find("recompute", kind)(kind=kind).fits(program, target)) for kind in AGAIN}  # type: ignore[call-arg]
    assert {
        kind: reason
        for kind, reason in found.items()
        if "allreduce_" not in reason.replace("all_reduce.", "allreduce_")
    } == {}
    assert find("recompute", "none")(kind="none").fits(program, target) is None  # type: ignore[call-arg]
