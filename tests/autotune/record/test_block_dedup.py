"""Deduplicated recordings of equal blocks equal the full recording column by column, or are made in full with
a reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.zoo_paths import ZOO

from memtune.autotune.record.block_dedup import MIN_EQUAL_BLOCKS, BlockDedup
from memtune.autotune.record.recording_session import (
    Session,
    Trace,
    _with_dedup,
    start_session,
)
from memtune.workload.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")
DEEP = (("64, 4, 4\n", "64, 4, {n}\n"), ("num_hidden_layers=3", "num_hidden_layers={n}"))
"""Text in a file of the zoo that sets the number of blocks, and its replacement for n blocks."""

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number, self.p = number, 0.1
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.p)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block(i) for i in range(10))
        blocks, odd = self.blocks, self.blocks[4]
        {change}

    def forward(self, x):
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            x = {call}
        return self.head(x)

def model():
    return Net()

def batch(size):
    return torch.ones(size, 3, 8)

def loss(model, batch):
    return model(batch).square().mean()
"""


def write_model(tmp_path: Path, change: str = "pass", call: str = "block(x)") -> Path:
    path = tmp_path / "model.py"
    path.write_text(MODEL.replace("{change}", change).replace("{call}", call))
    return path


def with_ten_blocks(path: Path, folder: Path) -> Path:
    """Write the workload with ten blocks instead of three or four."""
    text = re.sub(r"(Block|Layer)\(\) for _ in range\(\d\)", r"\1() for _ in range(10)", path.read_text())
    text = text.replace(
        "Sequential(Residual(16, 16, 1), Residual(16, 16, 1))",
        "Sequential(*(Residual(16, 16, 1) for _ in range(10)))",
    )
    for old, new in DEEP:
        text = text.replace(old, new.format(n=10))
    assert text != path.read_text()
    (folder / path.name).write_text(text)
    return folder / path.name


def session_of(path: Path) -> Session:
    """Return a session that has its optimizer state and deduplicates."""
    session = _with_dedup(start_session(Workload.load(path), "fake"))
    session.warm_up(2)
    return session


def in_full(path: Path) -> Trace:
    """Return the recording at micro-batch 2 in which all blocks run, in the warm-up too."""
    session = replace(_with_dedup(start_session(Workload.load(path), "fake")), block_dedup=None)
    session.warm_up(2)
    return session.traced(2)


def assert_same(one: Trace, other: Trace) -> None:
    """Check that all columns and hints are equal; autograd's node numbers up to an offset."""
    others = other.step.values()
    for name, mine in one.step.values().items():
        theirs = others[name]
        if name == "ops.sequence_nr":
            mine, theirs = (np.unique(each, return_inverse=True)[1] for each in (mine, theirs))
        assert np.array_equal(mine, theirs) if isinstance(mine, np.ndarray) else mine == theirs, name
    assert one.hints.signatures == other.hints.signatures
    assert one.hints.step_counters == other.hints.step_counters
    for mine, theirs in zip(one.hints.calls, other.hints.calls, strict=True):
        assert (mine.ops, mine.saves, mine.inputs, mine.output, mine.shapes) == (
            theirs.ops,
            theirs.saves,
            theirs.inputs,
            theirs.output,
            theirs.shapes,
        )
        assert (mine.kind, mine.dtype, dict(mine.options)) == (
            theirs.kind,
            theirs.dtype,
            dict(theirs.options),
        )
        in_mine, in_theirs = (
            np.flatnonzero(
                (each.step.ops.sequence_nr >= call.nodes[0]) & (each.step.ops.sequence_nr < call.nodes[1])
            )
            for each, call in ((one, mine), (other, theirs))
        )
        assert np.array_equal(in_mine, in_theirs)  # the same backward ops


def n_expanded(session: Session, sizes: tuple[int, ...]) -> int:
    """Count the `sizes` that were expanded rather than recorded in full; all are compared with full
    recordings.
    """
    dedup, count = session.block_dedup, 0
    assert dedup is not None
    session.traced(2)
    for size in sizes:
        full: list[int] = []
        plain = Session._record_full

        def counted(
            self: Session,
            size: int,
            plain: Callable[..., Trace] = plain,
            full: list[int] = full,
            **more: int,
        ) -> Trace:
            full.append(size)
            return plain(self, size, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Session, "_record_full", counted)
            mine = session.traced(size)
        count += not full
        assert_same(mine, session._record_full(size))
    return count


SLOWER = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("autocast", "cnn_bn", "hf_llama", "inplace_views", "tied")
]


@pytest.mark.parametrize("model", [pytest.param("gpt", marks=pytest.mark.slow), "lora", *SLOWER])
def test_block_dedup_equals_full_recording_of_zoo(model: str, tmp_path: Path) -> None:
    path = with_ten_blocks(ZOO[model], tmp_path)
    session = session_of(path)
    assert session.block_dedup is not None
    assert session.block_dedup.lent  # the warm-up skipped blocks
    assert_same(session.traced(2), in_full(path))
    assert n_expanded(session, (4, 1)) == 2, session.block_dedup.disabled_reason
    assert session.block_dedup.disabled_reason == ""
    assert len(session.block_dedup.skipped) == 5


@pytest.mark.parametrize(
    "change",
    [
        "odd.p = 0.0",
        "odd.to(torch.bfloat16)",
        "odd.up.requires_grad_(False)",
        "odd.down.bias = None",
        "odd.up = nn.Linear(8, 32); odd.down = nn.Linear(32, 8)",
        "odd.register_forward_hook(lambda *_: None)",
        "odd.up.weight.register_hook(lambda grad: grad * 2)",
        "odd.forward = lambda x: x",
        "odd.number = 7",
        "odd.eval()",
    ],
)
def test_block_dedup_is_disabled_if_modules_differ(change: str, tmp_path: Path) -> None:
    model = Workload.load(write_model(tmp_path, change)).build_model()
    dedup = BlockDedup(model, [f"blocks.{i}" for i in range(10)])
    assert dedup.disabled_reason == f"there are no {MIN_EQUAL_BLOCKS} equal blocks in a row"
    assert not dedup.skipped


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    ("change", "call", "reason"),
    [
        ("odd.up.weight = blocks[2].up.weight", "block(x)", "blocks have different numbers of parameters"),
        ("pass", "block(x * 2)", "blocks have different numbers of ops"),
        ("pass", "block(x * 2 if i == 1 else x)", ""),
        ("pass", "block(x * 2 if i == 6 else x)", "blocks have different numbers of ops"),
        ("pass", "x if i == 5 else block(x)", "blocks have gradients of other shapes or dtypes, or none"),
        ("pass", "block(x.detach()) if i == 5 else block(x)", "blocks are called with other arguments"),
        ("pass", "checkpoint(block, x, use_reentrant=False)", "blocks are recomputed in backward"),
    ],
)
def test_block_dedup_is_disabled_if_blocks_are_called_differently(
    change: str, call: str, reason: str, tmp_path: Path
) -> None:
    path = write_model(tmp_path, change, call)
    session = session_of(path)
    assert session.block_dedup is not None
    assert_same(session.traced(2), in_full(path))
    assert session.block_dedup.disabled_reason.startswith(reason)
    assert session.block_dedup.verified == (not reason)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "other",
    [
        "x * 2",
        "x.double().float()",
        "setattr(self, 'last', x) or x",
        "x if hasattr(self, 'seen') else setattr(self, 'seen', x.new_ones(9)) or x",  # at the first step only
    ],
)
def test_block_dedup_is_disabled_if_full_recording_differs(other: str, tmp_path: Path) -> None:
    path = write_model(tmp_path)
    path.write_text(
        path.read_text().replace("return x +", f"x = {other} if self.number == 5 else x\n        return x +")
    )
    session = session_of(path)
    assert_same(session.traced(2), in_full(path))
    assert session.block_dedup is not None
    assert session.block_dedup.disabled_reason.startswith(
        "the expanded recording differs from the full one in"
    )


def test_block_dedup_records_in_full_only_micro_batches_at_which_blocks_differ(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    path.write_text(
        path.read_text().replace(
            "return x +", "x = x * 2 if len(x) == 3 and self.number == 2 else x\n        return x +"
        )
    )
    session = session_of(path)
    assert n_expanded(session, (3, 4)) == 1
    assert session.block_dedup is not None
    assert session.block_dedup.disabled_reason == ""
