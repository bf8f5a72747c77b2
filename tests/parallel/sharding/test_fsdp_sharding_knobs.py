"""Prefetch, resharding and reduction dtype of `fsdp` on four gloo ranks of two nodes: training, bytes by
class of link.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.gloo import run_ranks
from support.ranks.data_parallel_steps import (
    alone,
    batches,
    build,
    check,
    loss,
    on_this_rank,
)
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from memtune.api import apply
from memtune.runtime.transfer import COUNTERS

RANKS, LOCAL, EVEN, BLOCKS = 4, 2, 64, 3
EXACT: dict[str, dict[str, Any]] = {
    "groups": {"reshard_after_forward": 2},
    "groups of half, two ahead": {"reshard_after_forward": 2, "prefetch": 2, "blocks_per_unit": 2},
    "none ahead, root again": {"prefetch": 0, "keep_root": False},
    "three ahead": {"prefetch": 3, "keep_root": False},
}
SENT: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": {"reshard_after_forward": 2},
    "kept": {"reshard_after_forward": False},
    "two ahead": {"prefetch": 2},
    "root again": {"keep_root": False},
    "bfloat16": {"reduce_dtype": "bfloat16"},
}


def settings(knobs: dict[str, Any]) -> dict[str, Any]:
    return {"settings": {"sharding": {"states": {"kind": "fsdp", **knobs}}}}


def trained(knobs: dict[str, Any]) -> dict[str, Any]:
    model, optimizer = build()
    tuned = apply(model, optimizer, settings(knobs), loss=loss, strict=False)
    return on_this_rank(model, optimizer, tuned, batches, 2, 0.05)


def even() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Blocks and a head whose rows four ranks divide."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(EVEN, EVEN), nn.Tanh()) for _ in range(BLOCKS))
    model = nn.Sequential(nn.Sequential(*blocks), nn.Linear(EVEN, EVEN))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def sent(knobs: dict[str, Any]) -> dict[str, Any]:
    """Bytes of a step, and the head's gradient."""
    model, optimizer = even()
    tuned = apply(model, optimizer, settings(knobs), loss=mean_square, strict=False)
    COUNTERS.take()
    tuned.step([torch.ones(2, EVEN)])
    counted = COUNTERS.take()
    return {"counted": counted, "weight": tuned.state_dict()["model"]["1.weight"].clone()}


def evaluated(knobs: dict[str, Any] | None) -> list[float]:
    """Losses of three steps with an evaluation between each backward and its update; None: of the plain
    model.
    """
    model, optimizer = even()
    if knobs is not None:
        model = apply(model, optimizer, settings(knobs), loss=mean_square, strict=False).model
    found = []
    x = torch.ones(2, EVEN)
    for _ in range(3):
        value = mean_square(model, x)
        value.backward()
        with torch.no_grad():
            mean_square(model, x)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(value.detach()))
    return found


PRECISE: dict[str, dict[str, Any]] = {
    "bfloat16": {"param_dtype": "bfloat16"},
    "sums in float32": {"param_dtype": "bfloat16", "reduce_dtype": "float32", "output_dtype": "float32"},
    "inputs as they are": {"param_dtype": "bfloat16", "cast_forward_inputs": False},
}
"""Settings of FSDP2's MixedPrecisionPolicy."""


def in_precision(knobs: dict[str, Any], plain: bool) -> list[Tensor]:
    """Losses and weights of three steps, with memtune's `apply` or FSDP2 itself."""
    model, optimizer = even()
    dtype = torch.float32 if knobs.get("cast_forward_inputs", True) else torch.bfloat16
    x = torch.linspace(-1, 1, 2 * EVEN, dtype=dtype).view(2, EVEN) * (1 + dist.get_rank())
    if plain:
        names = ("param_dtype", "reduce_dtype", "output_dtype")
        types = [getattr(torch, knobs[name]) if name in knobs else None for name in names]
        policy = MixedPrecisionPolicy(*types, knobs.get("cast_forward_inputs", True))
        for block in model[0]:
            fully_shard(block, mp_policy=replace(policy, output_dtype=None))
        fully_shard(model, mp_policy=policy, reshard_after_forward=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        tuned = apply(model, optimizer, settings(knobs), loss=mean_square, strict=False)
        model, optimizer = tuned.model, tuned.optimizer
    losses = []
    for _ in range(3):
        value = mean_square(model, x)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.detach())
    return [*losses, *(each.to_local().detach().clone() for each in model.parameters())]


def everything() -> dict[str, Any]:
    os.environ["LOCAL_WORLD_SIZE"] = str(LOCAL)
    return {
        "trained": {name: trained(knobs) for name, knobs in EXACT.items()},
        "sent": {name: sent(knobs) for name, knobs in SENT.items()},
        "evaluated": evaluated({"reshard_after_forward": 2}),
        "precise": {
            name: [in_precision(knobs, plain) for plain in (True, False)] for name, knobs in PRECISE.items()
        },
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(everything, RANKS, deadline_s=600)


@pytest.mark.parametrize("name", EXACT)
def test_fsdp_knobs_train_like_one_rank(ranks: list[Any], name: str) -> None:
    check([rank["trained"][name] for rank in ranks], alone(*build(), batches, 0.05))


def test_fsdp_knobs_link_bytes_equal_formula(ranks: list[Any]) -> None:
    one = 4 * (EVEN * EVEN + EVEN)
    blocks = BLOCKS * one
    far = (
        RANKS - 1
    ) / RANKS  # of what all four ranks gather or reduce; one link between nodes makes it one between nodes
    plain = {"inter_link": far * (2 * blocks + one + blocks + one), "intra_link": 0}
    near = (LOCAL - 1) / LOCAL * blocks
    wanted = {
        "plain": plain,
        "two ahead": plain,
        "groups": {"inter_link": plain["inter_link"] - far * blocks, "intra_link": near},
        "kept": {"inter_link": plain["inter_link"] - far * blocks, "intra_link": 0},
        "root again": {"inter_link": plain["inter_link"] + far * one, "intra_link": 0},
        "bfloat16": {"inter_link": plain["inter_link"] - far * (blocks + one) / 2, "intra_link": 0},
    }
    for rank in ranks:
        for name, each in rank["sent"].items():
            assert {link: each["counted"].get(link, 0) for link in ("inter_link", "intra_link")} == wanted[
                name
            ], name


def test_fsdp_bfloat16_reduction_is_close_to_float32(ranks: list[Any]) -> None:
    before = even()[0].state_dict()["1.weight"]
    for rank in ranks:
        exact, rounded = (before - rank["sent"][name]["weight"] for name in ("plain", "bfloat16"))
        assert 0 < (rounded - exact).abs().max() <= (RANKS + 2) * 2**-8 * exact.abs().max()


def test_fsdp_update_after_evaluation_reaches_next_forward(ranks: list[Any]) -> None:
    wanted = evaluated(None)
    assert wanted[2] < wanted[1] < wanted[0]
    assert all(rank["evaluated"] == pytest.approx(wanted, rel=1e-6) for rank in ranks)


@pytest.mark.parametrize("name", PRECISE)
def test_fsdp_mixed_precision_equals_fsdp2_bitwise(ranks: list[Any], name: str) -> None:
    for rank in ranks:
        theirs, ours = rank["precise"][name]
        assert len(theirs) == len(ours) > 3
        assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
