"""Pages of weights on replicas, and of rows under FSDP2: weights, bytes, peaks, checkpoints, clipping, and
refusals.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gloo import run_ranks
from support.ranks import optimizer_offload_on_ranks
from support.ranks.block_offload_on_ranks import (
    candidate,
    check_on_ranks,
    config_of,
    share_of,
    started,
    weights_of,
)
from support.suites.block_offload_suite import total
from support.suites.layer_major_suite import CHAIN

from memtune.errors import ApplyError
from memtune.offload.core.parameter_layout import Pages, paged, timeline
from memtune.offload.parameters.parameter_offload_pass import sizes_in_blocks
from memtune.program.parameter_columns import columns_of
from memtune.program.shard_columns import gathers_of
from memtune.program.step import Kind, Resource, Step
from memtune.runtime import transfer
from memtune.search_spaces._support import excludes
from memtune.search_spaces.offload.states.angel_ptm import AngelPtm
from memtune.search_spaces.offload.states.optimizer_cpu import OptimizerCpu
from memtune.search_spaces.recompute.full import Full
from memtune.search_spaces.recompute.selective import Selective
from memtune.search_spaces.sharding.states.ddp import Ddp
from memtune.search_spaces.sharding.states.fsdp import Fsdp
from memtune.search_spaces.sharding.states.zero1 import Zero1
from memtune.search_spaces.sharding.states.zero3 import Zero3
from memtune.technique import Exactness, Technique
from memtune.testing.drift_check import plain_program, rewritten, target_of

RANKS, REPLICAS, DIVIDED, OWN = 2, Ddp(kind="ddp"), Fsdp(kind="fsdp"), OptimizerCpu(kind="optimizer_cpu")
PAGES = AngelPtm(kind="angel_ptm", page_mib=0.004)
ON_SSD = PAGES.model_copy(update={"optimizer": "ssd"})
LOCK_FREE = PAGES.model_copy(update={"lock_free": True, "max_staleness": 2})
LOCK_FREE_ON_SSD = LOCK_FREE.model_copy(update={"optimizer": "ssd"})
NATIVE = OptimizerCpu(kind="optimizer_cpu", update="native")
BUDGET_BYTES, AMPLE_BYTES = 600_000, 1_000_000
pytestmark = pytest.mark.usefixtures("one_thread")


def cases(
    states: Technique = REPLICAS, **techniques: Technique
) -> dict[str, tuple[Technique, Technique, Technique]]:
    return {name: (states, each, NATIVE if each is ON_SSD else OWN) for name, each in techniques.items()}


def pages_of(states: Technique, budget_bytes: int | None = None) -> tuple[Step, Pages, int]:
    """Return the step of pages on ranks, the pages, and the loaded bytes."""
    decisions = candidate((states, PAGES), 1, RANKS, budget_bytes).plans["offload.states"].document()
    divided = candidate((states,), 1, RANKS).program.step
    cached = decisions.get("cached", 0)
    sizes = (each[cached:] for each in sizes_in_blocks(divided))
    pages = paged(*sizes, decisions["page_bytes"], decisions["frames"], gathers_of(divided) is not None)
    moved = sum(
        pages.filled[page] for comes in timeline(pages, tuple(decisions["prefetch"])).loads for page in comes
    )
    return divided, pages, moved


def test_ranks_train_as_one(tmp_path: Path) -> None:
    """The mechanism: replicas average each gradient once before its offload; sharded ranks load the pages of
    their rows.
    """
    both = {each.kind: (each, PAGES, OWN) for each in (REPLICAS, DIVIDED)}
    steps = check_on_ranks(both, tmp_path)
    alone, plain = rewritten(CHAIN, PAGES), rewritten(CHAIN)
    gradients = sum(int(plain.storages.bytes[p.gradient]) for p in plain.parameters if p.gradient >= 0)
    for link in (Resource.HOST_TO_DEVICE, Resource.DEVICE_TO_HOST):
        assert total(steps["ddp"], link) == total(alone, link)
    assert (
        total(steps["ddp"], Resource.DEVICE_TO_HOST) == total(steps["ddp"], Resource.INTRA_LINK) == gradients
    )
    step, batch = steps["fsdp"], total(plain, Resource.HOST_TO_DEVICE)
    divided, pages, moved = pages_of(DIVIDED)
    columns = columns_of(divided.parameters)
    outside = int((columns.numel * columns.itemsize)[columns.block < 0].sum())
    assert sum(pages.filled) < moved < 2 * sum(pages.filled)
    assert total(step, Resource.HOST_TO_DEVICE) == moved + outside + batch
    assert total(step, Resource.DEVICE_TO_HOST) == int((columns.numel * columns.itemsize).sum()) < gradients
    assert total(step, Resource.INTRA_LINK) == total(divided, Resource.INTRA_LINK)


@pytest.mark.slow
@pytest.mark.usefixtures("ssd")
@pytest.mark.parametrize("parts", [1, 3])
def test_replicas_with_the_optimizer_on_ssd_and_accumulation(tmp_path: Path, parts: int) -> None:
    check_on_ranks(cases(ssd=ON_SSD, pages=PAGES), tmp_path, parts=parts, bitwise=parts == 1)


@pytest.mark.slow
@pytest.mark.usefixtures("ssd")
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("states", [DIVIDED, Zero3(kind="zero3")], ids=lambda each: each.kind)
def test_sharded_ranks_with_the_optimizer_on_ssd_and_accumulation(
    tmp_path: Path, states: Technique, parts: int
) -> None:
    """Bitwise: the host sums in the order of FSDP2."""
    check_on_ranks(cases(states, ssd=ON_SSD, pages=PAGES), tmp_path, parts=parts)


@pytest.mark.slow
@pytest.mark.usefixtures("ssd")
@pytest.mark.parametrize("parts", [1, 3])
def test_host_and_drive_hold_the_predicted_bytes(tmp_path: Path, parts: int) -> None:
    """Adam on the zoo's gpt: bytes of every link, including SSD, and the peaks of both tiers."""
    optimizer_offload_on_ranks.check_on_ranks(tmp_path, PAGES, DIVIDED, OWN, host_rel=0.02, parts=parts)
    optimizer_offload_on_ranks.check_on_ranks(tmp_path, ON_SSD, DIVIDED, NATIVE, host_rel=0.02, parts=parts)


@pytest.mark.slow
def test_three_ranks_pad_rows(tmp_path: Path) -> None:
    """Three ranks do not divide the rows: pages hold them padded."""
    check_on_ranks(cases(DIVIDED, pages=PAGES), tmp_path, ranks=3, bitwise=False)


@pytest.mark.slow
@pytest.mark.parametrize("other_slots", [Full(), Selective()], ids=lambda each: each.kind)
def test_training_with_recompute(tmp_path: Path, other_slots: Technique) -> None:
    check_on_ranks(cases(DIVIDED, pages=PAGES), tmp_path, other_slots=(other_slots,))


@pytest.mark.slow
@pytest.mark.parametrize(("budget_bytes", "parts"), [(BUDGET_BYTES, 1), (AMPLE_BYTES, 1), (AMPLE_BYTES, 3)])
def test_training_within_a_budget(tmp_path: Path, budget_bytes: int, parts: int) -> None:
    """Below FSDP2's own peak in the first case; in the others it holds optimizer state of some parameters of
    a block.
    """
    step = check_on_ranks(cases(DIVIDED, pages=PAGES), tmp_path, budget_bytes=budget_bytes, parts=parts)[
        "pages"
    ]
    assert step.peak_bytes() <= budget_bytes
    if parts > 1:
        return
    divided, _, moved = pages_of(DIVIDED, budget_bytes)
    state = (step.storages.kind == Kind.OPTIMIZER) & (step.storages.bytes > 4)
    on_device = int(step.storages.bytes[state & (step.storages.tier == 0)].sum())
    assert (budget_bytes < divided.peak_bytes()) == (on_device == 0)
    assert total(step, Resource.HOST_TO_DEVICE) > moved


def test_frames_fill_the_rest_of_the_budget() -> None:
    """FSDP2's own buffers cannot be evicted; if they counted as chunks, frames would exceed the budget."""
    frames = []
    for budget_bytes in (BUDGET_BYTES, BUDGET_BYTES + 20 * 4096):
        found = candidate((DIVIDED, PAGES), 1, RANKS, budget_bytes)
        frames.append(found.plans["offload.states"].frames)
        assert budget_bytes - 2 * 4096 < found.program.step.peak_bytes() <= budget_bytes
    assert frames[0] < frames[1]


def test_cached_parameters_have_averaged_gradients() -> None:
    """Replicas cache none, since no component averages their gradients on the device; FSDP2 reduces those of
    rows.
    """
    ample = 1 << 30
    assert candidate((PAGES,), 1, 1, ample).plans["offload.states"].cached > 0
    assert candidate((DIVIDED, PAGES), 1, RANKS, ample).plans["offload.states"].cached > 0
    assert "cached" not in candidate((REPLICAS, PAGES), 1, RANKS, ample).plans["offload.states"].document()


# -- lock-free -----------------------------------------------------------------------------------------------


def swept(config: dict[str, Any], waits: bool) -> dict[str, Any]:
    """Return weights after five steps, and the audit; `waits`: wait after each step for all asynchronous
    updates.
    """
    transfer.COUNTERS.take()
    workload, tuned = started(config)
    for step in range(5):
        tuned.step(share_of(workload, step, 1, RANKS))
        weights = weights_of(tuned) if waits else {}
    audit = tuned.audit().get("offload.states", {})
    if waits:  # there is no sweep under way
        audit["ssd_read"] = transfer.COUNTERS.take().get("ssd_read", 0)
    return {"weights": weights or weights_of(tuned), "audit": audit}


@pytest.mark.slow
@pytest.mark.usefixtures("ssd")
@pytest.mark.parametrize("technique", [LOCK_FREE, LOCK_FREE_ON_SSD], ids=["host", "ssd"])
def test_lock_free_rows_are_updated_by_their_rank(tmp_path: Path, technique: AngelPtm) -> None:
    """With waits, updates have the bits of the native update; without, ranks have the same weights, within
    the bound.
    """
    found = candidate((DIVIDED, technique), 1, RANKS)
    config = config_of(found, (DIVIDED, technique))
    native = config_of(candidate((DIVIDED, NATIVE), 1, RANKS), (DIVIDED, NATIVE))
    waited, free, wanted = (
        run_ranks(swept, RANKS, *each) for each in ((config, True), (config, False), (native, True))
    )
    for rank in range(RANKS):
        assert waited[rank]["audit"]["version"] == 5
        assert 0 < free[rank]["audit"]["version"] <= 5
        assert free[rank]["audit"]["largest_staleness"] <= LOCK_FREE.max_staleness
        for name, weight in wanted[0]["weights"].items():
            assert torch.equal(waited[rank]["weights"][name], weight), name
            assert torch.equal(free[rank]["weights"][name], free[0]["weights"][name]), name
    n_bytes = 5 * total(found.program.step, Resource.SSD_READ)  # of the rank with the most rows
    assert (
        max(each["audit"]["ssd_read"] for each in waited) * 3 == n_bytes * 2
    )  # SGD has one moment of Adam's two
    assert technique.exactly() is Exactness.LOSSY


# -- what is refused -----------------------------------------------------------------------------------------


def test_fits_refuses_by_name() -> None:
    program, whole = plain_program(CHAIN), replace(target_of(Zero1(kind="zero1")), ranks=RANKS)
    for lock_free in (LOCK_FREE, LOCK_FREE_ON_SSD):
        assert "weights of replicas would differ" in str(excludes(lock_free, REPLICAS, RANKS))
    assert "whole on each, or gathered from all" in str(PAGES.fits(program, whole))
    assert "whole on each, or gathered from all" in str(LOCK_FREE.fits(program, whole))


def refusals(configs: list[dict[str, Any]]) -> list[str]:
    found = []
    for config in configs:
        try:
            started(config)
        except ApplyError as refused:
            found.append(str(refused))
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("ssd")
def test_apply_refuses_by_name() -> None:
    plan = config_of(candidate((REPLICAS, PAGES), 1, RANKS), (REPLICAS, PAGES))
    alone = config_of(candidate((PAGES,), 1, 1, 1 << 30), (REPLICAS, PAGES))
    gathered = Fsdp(kind="fsdp", reshard_after_forward=False)
    others = (
        (Zero1(kind="zero1"), PAGES),
        (REPLICAS, LOCK_FREE),
        (REPLICAS, LOCK_FREE_ON_SSD),
        (gathered, PAGES),
    )
    configs = [
        {**plan, "settings": config_of(candidate((REPLICAS, PAGES), 1, RANKS), each)["settings"]}
        for each in others
    ]
    wanted = (
        "gathered from all",
        "replicas would differ",
        "replicas would differ",
        "not with reshard_after_forward",
        "needs a plan for this model",
    )
    for said in run_ranks(refusals, RANKS, [*configs, alone]):
        assert [part in each for part, each in zip(wanted, said, strict=True)] == [True] * 5, said
