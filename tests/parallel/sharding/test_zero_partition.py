"""ZeRO 1 and 2 on real gloo ranks against one rank that takes all samples: three steps, sums, clipping,
zeroed gradients.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from support.gloo import run_ranks
from support.ranks import data_parallel_steps
from support.ranks.data_parallel_steps import (
    DIM,
    SAMPLES,
    TiedNet,
    alone,
    check,
    loss,
    on_this_rank,
)
from torch import Tensor, nn

from memtune.api import apply
from memtune.errors import ApplyError
from memtune.offload.gradients import uncleared

KINDS = ("zero1", "zero2")
CLEARERS = ("optimizer", "model")
CASES = [(kind, parts, clip) for kind in KINDS for parts in (1, 4) for clip in (0.0, 0.05)]


class Net(TiedNet):
    """Also with parameters that no sample or only some samples use."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.sometimes = nn.Linear(DIM, 3), nn.Linear(DIM, DIM)

    def extra(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x + self.sometimes(x) if tokens[0, 0] == 0 else x


build = functools.partial(data_parallel_steps.build, Net)


def batches(step: int) -> list[Tensor]:
    """Four parts; the second half of the samples, which the last ranks take, uses `sometimes`."""
    tokens = torch.randint(1, 11, (SAMPLES, 5), generator=torch.Generator().manual_seed(step))
    tokens[SAMPLES // 2 :, 0] = 0
    return list(tokens.chunk(SAMPLES))


def trained(kind: str, parts: int, clip: float) -> dict[str, Any]:
    """Also whose the parameters are."""
    model, optimizer = build()
    before = dict(model.named_parameters())
    settings = {"sharding": {"states": {"kind": kind}}}
    tuned = apply(model, optimizer, {"settings": settings}, loss=loss, strict=False)
    found = on_this_rank(model, optimizer, tuned, batches, parts, clip)
    same = all(parameter is before[name] for name, parameter in model.named_parameters())
    return found | {"audit": tuned.audit(), "same": same}


def plain(clip: float) -> dict[str, Any]:
    return alone(*build(), batches, clip)


# -- gradients that are zeroed, kept or summed in other ways -------------------------------------------------


def gradients(kind: str, how: str) -> dict[str, Tensor]:
    """The whole gradients after some way of calling backward without `Tuned.step`."""
    model, optimizer = build()
    settings = {"sharding": {"states": {"kind": kind}}}
    apply(model, optimizer, {"settings": settings}, loss=loss, strict=False)
    first, second = (torch.cat(batches(step)[8:]) for step in (0, 1))  # the same samples on both ranks
    loss(model, first).backward()
    if how == "optimizer zeroes":
        optimizer.zero_grad()
    elif how == "model zeroes":
        model.zero_grad()
    elif how == "zeroes in place":
        optimizer.zero_grad(set_to_none=False)
    loss(model, second).backward()
    return {name: p.grad.full_tensor().clone() for name, p in model.named_parameters() if p.grad is not None}


def losses(kind: str, assigned: bool) -> list[float]:
    """Losses of four steps; `assigned`: the user gives the weights other memory after two of them."""
    model, optimizer = build()
    settings = {"sharding": {"states": {"kind": kind}}}
    tuned = apply(model, optimizer, {"settings": settings}, loss=loss, strict=False)
    found = []
    for step in range(4):
        if assigned and step == 2:
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        found.append(float(tuned.step([torch.cat(batches(step)[8:])])))
    return found


def cleared_by(kind: str, clear: str) -> dict[str, Any]:
    """Warnings of three steps whose gradients `clear` clears, and gradients left after the last of them."""
    model, optimizer = build()
    apply(model, optimizer, {"settings": {"sharding": {"states": {"kind": kind}}}}, loss=loss, strict=False)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for step in range(3):
            loss(model, torch.cat(batches(step)[8:])).backward()
            optimizer.step()
            if clear == "model":
                model.zero_grad()
            elif clear == "optimizer":
                optimizer.zero_grad()
    shards = [p for group in optimizer.param_groups for p in group["params"]]
    left = sum(p.grad is not None for p in (*shards, *model.parameters()))
    return {"warned": sum(uncleared.TEXT in str(each.message) for each in found), "left": left}


def after_model_move() -> str:
    model, optimizer = build()
    tuned = apply(
        model, optimizer, {"settings": {"sharding": {"states": {"kind": "zero1"}}}}, loss=loss, strict=False
    )
    model.double()
    try:
        tuned.audit()
    except ApplyError as error:
        return str(error)
    return "no error"


def everything() -> dict[str, Any]:
    ways = ("sums", "optimizer zeroes", "model zeroes", "zeroes in place")
    return {
        "trained": {case: trained(*case) for case in CASES},
        "gradients": {(kind, how): gradients(kind, how) for kind in KINDS for how in ways},
        "losses": {(kind, how): losses(kind, how) for kind in KINDS for how in (False, True)},
        "cleared": {(kind, how): cleared_by(kind, how) for kind in KINDS for how in ("never", *CLEARERS)},
        "moved": after_model_move(),
    }


def on_four() -> dict[Any, Any]:
    return {case: trained(*case) for case in CASES if case[2] and case[1] == 4}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(everything, 2)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_zero_partition_trains_like_one_rank(ranks: list[Any], case: tuple[str, int, float]) -> None:
    check([rank["trained"][case] for rank in ranks], plain(case[2]))
    assert all(rank["trained"][case]["same"] for rank in ranks)


@pytest.mark.slow
def test_zero_partition_on_four_ranks_equals_one_rank() -> None:
    found = run_ranks(on_four, 4)
    for case in found[0]:
        check([rank[case] for rank in found], plain(case[2]))


@pytest.mark.parametrize("kind", KINDS)
def test_zero_partition_does_not_update_unused_parameter(ranks: list[Any], kind: str) -> None:
    model, _ = build()
    for rank in ranks:
        weights = rank["trained"][kind, 1, 0.0]["weights"]
        assert torch.equal(weights["unused.weight"], model.unused.weight)
        assert not torch.equal(weights["sometimes.weight"], model.sometimes.weight)


def test_zero_partition_rank_holds_half_of_state(ranks: list[Any]) -> None:
    facts = ranks[0]["trained"]["zero1", 1, 0.0]["audit"]["sharding.states"]
    rows = 6 * 6 + 3 * (4 * 6 + 4 + 3 * 7 + 3) + 6 + (2 * 6 + 2) + (3 * 6 + 3)
    assert facts == {"ranks": 2, "buckets": 1, "shard_bytes": 4 * rows}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["sums", "optimizer zeroes", "model zeroes", "zeroes in place"])
def test_zero_partition_sums_gradients_until_zeroed(ranks: list[Any], kind: str, how: str) -> None:
    model, _ = build()
    for step in (0, 1) if how == "sums" else (1,):
        loss(model, torch.cat(batches(step)[8:])).backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for rank in ranks:
        got = rank["gradients"][kind, how]
        assert got.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert torch.allclose(got[name], gradient, rtol=0, atol=1e-6), name


@pytest.mark.parametrize("kind", KINDS)
def test_zero_partition_gathers_into_memory_that_the_user_assigned(ranks: list[Any], kind: str) -> None:
    for rank in ranks:
        assert rank["losses"][kind, True] == rank["losses"][kind, False]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", CLEARERS)
def test_zero_grad_of_optimizer_and_model_free_shards(ranks: list[Any], kind: str, how: str) -> None:
    assert all(rank["cleared"][kind, how] == {"warned": 0, "left": 0} for rank in ranks)


@pytest.mark.parametrize("kind", KINDS)
def test_loop_without_zero_grad_is_warned_once(ranks: list[Any], kind: str) -> None:
    assert all(rank["cleared"][kind, "never"]["warned"] == 1 for rank in ranks)


def test_zero_partition_audit_detects_moved_model(ranks: list[Any]) -> None:
    assert all("no longer share memory" in rank["moved"] for rank in ranks)
