"""Model state divided over groups of gloo ranks against one rank that takes all samples: three steps, sums,
clipping, bytes.
"""

from __future__ import annotations

import logging
import os
from dataclasses import astuple
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from support.gloo import run_ranks
from support.ranks.data_parallel_steps import (
    DIM,
    STEPS,
    TiedNet,
    alone,
    batches,
    build,
    check,
    loss,
    on_this_rank,
)
from support.ranks.model_parallel_runs import MODELS, measured, rewriter
from support.sharding_programs import step
from torch import nn

from memtune import hardware
from memtune.api import apply
from memtune.autotune.predict.simulation import simulate
from memtune.autotune.space.candidates import Candidate, Choice
from memtune.errors import MemtuneError
from memtune.parallel.sharding import sharded_buckets
from memtune.parallel.sharding.factors import Bytes, Factors, Schedule, all_factors, traffic
from memtune.parallel.sharding.nested_sharding_pass import Division, divide_states
from memtune.parallel.sharding.zero_partition import Hop
from memtune.runtime.transfer import COUNTERS

EVEN = 64
WIDE = MODELS.parent / "wide_blocks.py"
REDUCE_SCATTER = "memtune.reduce_scatter_into_.default"
MICS = {"kind": "mics", "group": 2}
Case = tuple[str, int, float]
STATES: dict[str, dict[str, Any]] = {
    "mics": MICS,
    "mics, kept, by two": MICS | {"reshard_after_forward": False, "blocks_per_unit": 2},
    "fsdp of two": {"kind": "fsdp", "degree": 2},
    "zero3": {"kind": "zero3"},
    **{
        f"paro {letters}": {"kind": "paro", "strategy": letters, "group": 2}
        for letters in ("NII", "NIG", "IIG", "IGG", "INI", "ING")
    },
}
AMSP = {
    f"amsp {p}, {g}, {o}": {"kind": "amsp", "parameters": p, "gradients": g, "optimizer": o}
    for p, g, o in (astuple(each) for each in all_factors(4))
    if o > 1
}
OFTEN = ["mics", "mics, kept, by two", "fsdp of two", "zero3", "paro NIG", "paro IIG", "paro ING"]
"""One of each way; the others are in the grid, which is slow."""
CASES: list[Case] = [(name, 4, 0.05) for name in OFTEN]
CASES += [(name, parts, 0.0) for name in ("mics", "fsdp of two") for parts in (1, 4)]
SENT = [astuple(each) for each in all_factors(4) if each.optimizer > 1]
GRID: list[Case] = [
    (name, parts, clip) for name in (*AMSP, *STATES) for parts in (1, 4) for clip in (0.0, 0.05)
]


def settings(states: dict[str, Any]) -> dict[str, Any]:
    return {"settings": {"sharding": {"states": states}}}


def trained(name: str, parts: int, clip: float, *, says_last: bool = True) -> dict[str, Any]:
    model, optimizer = build()
    tuned = apply(model, optimizer, settings((STATES | AMSP)[name]), loss=loss, strict=False)
    return on_this_rank(model, optimizer, tuned, batches, parts, clip, says_last) | {"audit": tuned.audit()}


def plain(clip: float) -> dict[str, Any]:
    return alone(*build(), batches, clip)


def refused(states: dict[str, Any]) -> str:
    model, optimizer = build()
    before = [(id(p), type(m)) for m in model.modules() for p in m.parameters()]
    try:
        apply(model, optimizer, settings(states), loss=loss, strict=False)
    except MemtuneError as error:
        assert [(id(p), type(m)) for m in model.modules() for p in m.parameters()] == before
        return str(error)
    return "no error"


class Warnings(logging.Handler):
    """Return torch's warnings about tensors sharded over meshes."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        logging.getLogger("torch.distributed.tensor").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


class Branches(nn.Module):
    """Has a layer that only a second call uses."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.other = nn.Linear(DIM, 7), nn.Linear(7, DIM), nn.Linear(7, DIM)

    def forward(self, x: torch.Tensor, *, again: bool = False) -> torch.Tensor:
        made: torch.Tensor = (self.other if again else self.down)(self.up(x).tanh())
        return made


class TwiceNet(TiedNet):
    """Its first block runs again at the end, so FSDP2 reduces it twice, some gradients each time."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Branches() for _ in range(3))

    def extra(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.h[0](x, again=True)
        return made


SMALL: dict[str, tuple[type[TiedNet], str, bool]] = {
    "of sums": (TiedNet, "amsp 2, 2, 4", True),
    "of whole gradients": (TiedNet, "amsp 2, 1, 4", True),
    "after each micro-batch": (TiedNet, "amsp 2, 2, 4", False),
    "of a block that is reduced twice": (TwiceNet, "amsp 2, 2, 4", True),
}
"""Model, division, and whether the loop marks the last micro-batch."""


def trained_in_small_buckets(kind: type[TiedNet], name: str, says_last: bool) -> dict[str, Any]:
    """Train with buckets of single parameters; count those reduced before each backward ended, of all."""
    counts, filled, reduce_sums = list[tuple[int, int]](), sharded_buckets._filled, Hop.reduce_sums

    def noted(hop: Hop) -> None:
        counts.append((hop._next, len(hop)))
        reduce_sums(hop)

    with (
        patch.object(sharded_buckets, "_filled", lambda inputs, cap_bytes: filled(inputs, 1)),
        patch.object(Hop, "reduce_sums", noted),
    ):
        model, optimizer = build(kind)
        tuned = apply(model, optimizer, settings((STATES | AMSP)[name]), loss=loss, strict=False)
        return on_this_rank(model, optimizer, tuned, batches, 4, 0.05, says_last) | {"counts": counts}


def everything() -> dict[str, Any]:
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # two nodes of two ranks
    warnings = Warnings()
    return {
        "trained": {case: trained(*case) for case in CASES},
        "warnings": warnings.said,
        "silent": {
            name: trained(name, 4, 0.05, says_last=False) for name in ("mics", "paro IIG", "paro NIG")
        },
        "small": {name: trained_in_small_buckets(*each) for name, each in SMALL.items()},
        "sent": {(each, parts): sent(settings(amsp(each)), parts) for each in SENT for parts in (1, 3)},
        "refused": {each: refused({"kind": "mics", "group": each}) for each in (3, 8)}
        | {"none": refused({"kind": "mics"})}
        | {f"copy of {each}": refused({"kind": "fsdp", "reshard_after_forward": each}) for each in (3, 4, 8)},
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(everything, 4, deadline_s=600)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nested_sharding_trains_like_one_rank(ranks: list[Any], case: Case) -> None:
    check([rank["trained"][case] for rank in ranks], plain(case[2]))


@pytest.mark.parametrize("name", SMALL)
def test_hops_overlap_with_backward_from_the_second_step_on(ranks: list[Any], name: str) -> None:
    """The first step shows whether a unit is reduced twice; its sums would be incomplete before the end."""
    kind, _, says_last = SMALL[name]
    check([rank["small"][name] for rank in ranks], alone(*build(kind), batches, 0.05))
    # All buckets but those of the unit that is reduced last, with what is outside of the blocks.
    overlapping = 0 if kind is TwiceNet else 12
    for rank in ranks:
        reduced = [early for early, _ in rank["small"][name]["counts"]]
        assert reduced == [0, *[overlapping] * (STEPS * (1 if says_last else 4) - 1)]


@pytest.mark.slow
@pytest.mark.native_ledger
def test_hops_during_backward_have_the_predicted_peak() -> None:
    asked, predicted = dict[str, Any](), dict[str, int]()
    for p, g, o, accumulate in ((2, 2, 4, 1), (2, 2, 4, 2), (2, 1, 4, 2)):
        states = amsp((p, g, o)) | {"bucket_cap_mb": 1}
        document = {"execution": {"micro_batch": 2, "accumulate": accumulate}, "sharding": {"states": states}}
        made = rewriter(WIDE, 4).candidate(Choice.from_document(document))
        assert isinstance(made, Candidate), made
        name = f"{p}, {g}, {o}, {accumulate}"
        plan = {slot: plan.document() for slot, plan in made.plans.items()}
        asked[name] = {"settings": document, "plan": plan}
        predicted[name] = simulate(made.program, hardware.detect("cpu")).peak_allocated_bytes
    for rank in run_ranks(measured, 4, asked, 2, WIDE):
        for name, expected in predicted.items():
            assert rank[name][0] == pytest.approx(expected, rel=0.005), name


def test_hops_are_predicted_to_overlap_with_backward() -> None:
    division = Division(Factors(2, 2, 4), 8, 4, 1, bucket_bytes=4096)
    before = step("gpt")
    after = divide_states(before, division)
    after.validate()
    hops = np.flatnonzero((after.ops.group == 2) & (after.ops.name == after.names.index(REDUCE_SCATTER)))
    backward = hops[hops <= after.backward_end]
    units = len(before.blocks) + 1
    assert len(hops) > 2 * units
    assert len(backward) - units > 0.6 * (len(hops) - units)


def test_nested_collectives_do_not_warn(ranks: list[Any]) -> None:
    assert [rank["warnings"] for rank in ranks] == [[], [], [], []]


def test_nested_sharding_in_unmarked_loop_trains_equally(ranks: list[Any]) -> None:
    for name in ranks[0]["silent"]:
        check([rank["silent"][name] for rank in ranks], plain(0.05))


def the_grid() -> dict[Case, Any]:
    return {case: trained(*case) for case in GRID}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nested_sharding_of_every_division_equals_one_rank() -> None:
    found = run_ranks(the_grid, 4, deadline_s=3500)
    for case in GRID:
        check([rank[case] for rank in found], plain(case[2]))


def amsp(factors: tuple[int, int, int]) -> dict[str, Any]:
    return {"kind": "amsp", **Factors(*factors).document()}


def sent(config: dict[str, Any], parts: int) -> dict[str, int]:
    """Bytes per step of three blocks whose rows four ranks divide."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(EVEN, EVEN), nn.Tanh()) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tuned = apply(model, optimizer, config, loss=lambda model, x: model(x).square().mean(), strict=False)
    COUNTERS.take()
    tuned.step([torch.ones(2, EVEN)] * parts)
    return COUNTERS.take()


@pytest.mark.parametrize("parts", [1, 3])
def test_nested_sharding_link_bytes_equal_formula(ranks: list[Any], parts: int) -> None:
    whole = 3 * 4 * (EVEN * EVEN + EVEN)
    for factors in SENT:
        wanted = traffic(Factors(*factors), Bytes(whole, whole, 0), Schedule(4, 2, parts))
        for rank in ranks:
            counted = rank["sent"][factors, parts]
            flags = 6 * 4 * 8 * parts  # a number for each of six parameters, in few messages
            assert wanted.intra_bytes <= counted.get("intra_link", 0) <= wanted.intra_bytes + flags, factors
            assert wanted.inter_bytes <= counted.get("inter_link", 0) <= wanted.inter_bytes + flags, factors


def rows(*shapes: tuple[int, int], over: int = 2) -> int:
    """Bytes of one shard of these (rows, width), padded."""
    return sum(4 * -(-n // over) * width for n, width in shapes)


BLOCK, ROOT, FROZEN = ((7, 6), (7, 1), (6, 7), (6, 1)), ((11, 6), (1, 6)), ((6, 6), (6, 1))


@pytest.mark.parametrize("parts", [1, 4])
def test_mics_sends_one_shard_between_nodes_per_step(ranks: list[Any], parts: int) -> None:
    shard = 3 * rows(*BLOCK) + rows(*ROOT)
    gathered = 2 * 3 * rows(*BLOCK) + rows(*ROOT) + rows(*FROZEN)
    for rank in ranks:
        counted = rank["trained"]["mics", parts, 0.0]["counted"]
        assert counted["inter_link"] == STEPS * shard  # 2·(copies - 1)/copies of it
        assert counted["intra_link"] == STEPS * parts * (gathered + shard)
        often = rank["trained"]["fsdp of two", parts, 0.0]["counted"]
        assert often["inter_link"] == parts * counted["inter_link"]
        assert often["intra_link"] == counted["intra_link"]


def test_nested_sharding_refuses_invalid_groups(ranks: list[Any]) -> None:
    for rank in ranks:
        assert "degree=3 must divide the 4 ranks" in rank["refused"][3]
        assert "degree=8 is more than the 4 ranks" in rank["refused"][8]
        assert "has no number of ranks" in rank["refused"]["none"]
        copies = (rank["refused"][f"copy of {each}"] for each in (3, 4, 8))
        assert all("are no smaller equal groups of the 4 ranks that share a copy" in text for text in copies)
