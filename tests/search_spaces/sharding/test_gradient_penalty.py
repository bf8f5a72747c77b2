"""Sharding under a loss that differentiates gradients: no second derivative is left out in silence."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from fixed_cpu import CPU

from memtune.autotune.record import record
from memtune.autotune.record_parallel import ShardedRecordings
from memtune.autotune.space import Candidate, Choice, Rewriter
from memtune.parallel.model import (
    context_parallel,
    sequence_parallel_layers,
    sequence_sharding,
    tensor_parallel,
    weight_rotation,
)
from memtune.program import Phase, is_differentiated_again
from memtune.technique import Target
from memtune.workload import Workload

MODELS = Path(__file__).parents[2] / "support" / "models" / "recompute"
LAYERS = (context_parallel, sequence_parallel_layers, sequence_sharding, tensor_parallel, weight_rotation)


@pytest.fixture(scope="module")
def rewriter() -> Rewriter:
    workload = Workload.load(MODELS / "gradient_penalty.py")
    plain = record(workload)
    return Rewriter(plain, Target(CPU, 2, 1 << 30, sharded=ShardedRecordings(workload, plain)))


@pytest.mark.parametrize(
    ("slot", "kind", "fits"),
    [
        ("states", "zero1", True),
        ("states", "fsdp", False),
        ("parallel", "tensor", False),
        ("parallel", "rtp", False),
    ],
)
def test_differentiated_gradients_refuse_sharded_weights(
    rewriter: Rewriter, slot: str, kind: str, fits: bool
) -> None:
    document: dict[str, Any] = {"execution": {"micro_batch": 2}, "sharding": {slot: {"kind": kind}}}
    found = rewriter.candidate(Choice.from_document(document))
    assert isinstance(found, Candidate) if fits else "create_graph" in str(found)


def test_own_checkpoints_differentiate_nothing_again(tmp_path: Path) -> None:
    text = (MODELS / "gradient_penalty.py").read_text()
    text = text.replace(
        "x = layer(x)", "x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)"
    )
    text = (
        text[: text.index("def loss")] + "def loss(model, batch):\n    return model(batch).square().mean()\n"
    )
    (tmp_path / "model.py").write_text(text.replace("import torch\n", "import torch.utils.checkpoint\n"))
    step = record(Workload.load(tmp_path / "model.py")).at(2)
    assert (step.ops.phase == Phase.RECOMPUTE).any()
    assert not is_differentiated_again(step)


def test_functions_of_shared_layers_raise_under_second_derivative() -> None:
    functions = [
        each
        for module in LAYERS
        for each in vars(module).values()
        if inspect.isclass(each) and issubclass(each, torch.autograd.Function)
    ]
    assert len(functions) == 11
    for each in functions:
        assert hasattr(each.backward, "__wrapped__"), each  # once_differentiable
