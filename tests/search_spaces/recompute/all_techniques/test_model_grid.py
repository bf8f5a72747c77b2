"""Every recompute technique on every kind of model: the plain model's gradients to the bit, or a refusal with
its reason.

The models cover: autocast, BatchNorm (cnn_bn, several_forwards), dropout (gpt), in-place ops and views
(inplace_views), tied weights, routing (moe), custom autograd functions and several forwards per backward
(several_forwards), weights without a gradient (lora), recurrent kernels (lstm). All steps accumulate over two
micro-batches; each run ends with an evaluation.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gloo import run_ranks
from support.zoo_paths import ZOO
from torch import Tensor

from memtune.api import apply
from memtune.search_spaces import find
from memtune.search_spaces.sharding.states.fsdp import Fsdp
from memtune.technique import Technique
from memtune.testing.drift_check import plain_program, target_of
from memtune.testing.training import SEED, build, config_of, differences, one_step, train

MODELS = {name: ZOO[name] for name in sorted(ZOO)} | {
    "several_forwards": Path(__file__).parents[3] / "support" / "models" / "recompute" / "several_forwards.py"
}
KINDS: dict[str, dict[str, Any]] = {
    **{
        kind: {}
        for kind in ("full", "every_nth", "selective", "attention_output", "attention_boundary", "balanced")
    },
    "checkmate": {"share": 0.5},
    **{kind: {"ratio": 0.6} for kind in ("dtr", "megtaichi", "coop")},
    "online": {"ratio": 0.7, "online": True},
    "planned": {"share": 0.4, "by_schedule": False},
}
"""Settings by kind; `online` is dtr."""

BY_OPS = frozenset(("checkmate", "dtr", "megtaichi", "coop", "online"))
LARGE = 16
"""Samples in a micro-batch of these models: saved tensors must dominate the peak, else there is nothing to
decide.
"""
_BY_ATTENTION = ("attention_output", "attention_boundary")
_NO_ATTENTION = ("autocast", "cnn_bn", "inplace_views", "lora", "lstm", "several_forwards", "tied", "tobf16")
REFUSED = (
    (_NO_ATTENTION, _BY_ATTENTION, "no attention runs inside the blocks"),
    (("moe",), _BY_ATTENTION, "attention is not fused in the blocks"),
    (("moe",), ("every_nth",), "n=2 would recompute one of 2 blocks"),
    (("moe",), ("checkmate",), "aten.nonzero.default runs in the model"),
    (("cnn_bn",), ("balanced",), "no norm or activation function in the blocks"),
    (("several_forwards",), BY_OPS, "the model's forward runs 2 times in a step"),
)
"""Models, kinds, and texts of refusals; all other pairs train."""


def technique_of(name: str) -> Technique:
    kind = "dtr" if name == "online" else name
    return find("recompute", kind)(kind=kind, **KINDS[name])


def trained(path: Path, technique: Technique | None, size: int) -> list[Tensor]:
    """Losses and gradients of two steps of two micro-batches, all weights and buffers, and an evaluation's
    loss.
    """
    workload, model, optimizer = build(path)
    tuned = (
        None
        if technique is None
        else apply(model, optimizer, config_of(path, technique, micro_batch=size), strict=False)
    )
    found: list[Tensor] = []
    for step in range(2):
        loss, gradients = one_step(workload, model, optimizer, tuned, seed=SEED + step, size=size)
        found += [loss, *gradients.values()]
    if tuned is not None:
        tuned.audit()
    model.eval()
    torch.manual_seed(SEED)
    with torch.no_grad():
        found.append(workload.loss(model if tuned is None else tuned.model, workload.make_batch(size)))
    return found + [value.detach().clone() for value in model.state_dict().values()]


@cache
def plain(path: Path, size: int) -> list[Tensor]:
    return trained(path, None, size)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_trains_as_without_or_says_why_not(name: str, kind: str) -> None:
    path, technique, size = MODELS[name], technique_of(kind), LARGE if kind in BY_OPS else 2
    reason = technique.fits(plain_program(path, size), target_of(technique))
    expected = next((why for models, kinds, why in REFUSED if name in models and kind in kinds), "")
    assert (expected in str(reason)) if expected else reason is None, reason
    if reason is not None:
        return
    wanted, got = plain(path, size), trained(path, technique, size)
    assert len(got) == len(wanted)
    assert [
        i for i, (one, other) in enumerate(zip(got, wanted, strict=True)) if not torch.equal(one, other)
    ] == []


def over_fsdp(path: Path, names: tuple[str, ...]) -> list[list[str]]:
    """Return, on a rank, the differences from FSDP2 alone, by technique."""
    alone = train(path, Fsdp(), steps=1)
    return [differences(train(path, Fsdp(), technique_of(name), steps=1), alone) for name in names]


BY_BLOCKS = ("full", "every_nth", "selective", "attention_output", "balanced", "planned")


@pytest.mark.drawn(1)
@pytest.mark.parametrize("model", ["gpt", "autocast"])
def test_techniques_train_under_fsdp2(model: str) -> None:
    for found in run_ranks(over_fsdp, 2, ZOO[model], BY_BLOCKS, deadline_s=300):
        assert found == [[]] * len(BY_BLOCKS)
