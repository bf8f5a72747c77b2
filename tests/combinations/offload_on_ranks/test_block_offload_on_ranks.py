"""Offloaded blocks on several ranks: weights, bytes on links, peaks, checkpoints, and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gloo import run_ranks
from support.ranks.block_offload_on_ranks import candidate, check_on_ranks, started
from support.suites.block_offload_suite import block_bytes, total
from support.suites.layer_major_suite import CHAIN

from memtune.errors import ApplyError
from memtune.offload.gradients.block_grad_ready_pass import weights_are_free
from memtune.program.parameter_columns import columns_of
from memtune.program.residency import order_of_use, window_residency
from memtune.program.shard_columns import gathers_of
from memtune.program.step import Kind, Resource, Tier
from memtune.search_spaces import find
from memtune.search_spaces.offload.activations.copy_out import CopyOut
from memtune.search_spaces.offload.states import patrickstar
from memtune.search_spaces.offload.states.elixir import Elixir
from memtune.search_spaces.offload.states.l2l import L2L
from memtune.search_spaces.offload.states.optimizer_cpu import OptimizerCpu
from memtune.search_spaces.offload.states.patrickstar import PatrickStar
from memtune.search_spaces.offload.states.stronghold import Stronghold
from memtune.search_spaces.recompute.full import Full
from memtune.search_spaces.recompute.planned import Planned
from memtune.search_spaces.recompute.selective import Selective
from memtune.search_spaces.sharding.states.ddp import Ddp
from memtune.search_spaces.sharding.states.fsdp import Fsdp
from memtune.technique import Technique
from memtune.testing.drift_check import plain_program, rewritten, target_of
from memtune.testing.training import settings_of

RANKS, AMPLE_BYTES = 2, 1_000_000
LAYERS, CHUNKS = OptimizerCpu(update="native"), OptimizerCpu()
REPLICAS, DIVIDED = Ddp(), Fsdp(kind="fsdp")
STORES: dict[str, tuple[Technique, Technique]] = {
    "l2l": (L2L(), LAYERS),
    "stronghold": (Stronghold(window=2, deferred=(0, 1)), LAYERS),
    "patrickstar": (PatrickStar(), CHUNKS),
    "elixir": (Elixir(), CHUNKS),
}
pytestmark = pytest.mark.usefixtures("one_thread")


def under(states: Technique, *names: str) -> dict[str, tuple[Technique, Technique, Technique]]:
    return {name: (states, *STORES[name]) for name in names}


def test_layers_train_as_one_rank(tmp_path: Path) -> None:
    """Replicas copy the bytes of one rank, and average each gradient once; sharded ranks copy their rows,
    half of it.
    """
    steps = check_on_ranks(
        {states.kind: (states, *STORES["l2l"]) for states in (REPLICAS, DIVIDED)}, tmp_path
    )
    plain = rewritten(CHAIN)
    batch = total(plain, Resource.HOST_TO_DEVICE)
    for states, step in steps.items():
        columns = columns_of(
            plain.parameters if states == "ddp" else step.parameters
        )  # there those of a rank's rows
        sizes = columns.numel * columns.itemsize
        blocks = [int(sizes[columns.block == block].sum()) for block in range(len(step.blocks))]
        assert sum(block_bytes(plain)) == (1 if states == "ddp" else RANKS) * sum(blocks)
        outside = int(sizes[columns.block < 0].sum())
        assert total(step, Resource.HOST_TO_DEVICE) == 2 * sum(blocks) - blocks[-1] + outside + batch
        assert total(step, Resource.DEVICE_TO_HOST) == sum(blocks) + outside
    assert total(steps["ddp"], Resource.INTRA_LINK) == total(steps["ddp"], Resource.DEVICE_TO_HOST)
    whole = candidate((DIVIDED,), 1, RANKS).program.step
    assert total(steps["fsdp"], Resource.INTRA_LINK) == total(whole, Resource.INTRA_LINK)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 3])
def test_offloaders_train_replicas_as_one_rank(tmp_path: Path, parts: int) -> None:
    """With accumulation a gradient is averaged in each micro-batch, before it is summed: another order of the
    same sum.
    """
    check_on_ranks(under(REPLICAS, *STORES), tmp_path, parts=parts, bitwise=parts == 1)


@pytest.mark.slow
@pytest.mark.parametrize("states", [REPLICAS, DIVIDED], ids=lambda each: each.kind)
def test_three_ranks_pad_rows(tmp_path: Path, states: Technique) -> None:
    """Three ranks do not divide the rows: those of the last rank are padded."""
    check_on_ranks(under(states, "stronghold", "patrickstar"), tmp_path, ranks=3, bitwise=False)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 3])
def test_offloaders_train_sharded_blocks_as_one_rank(tmp_path: Path, parts: int) -> None:
    """Bitwise as FSDP2 with the optimizer on the host, also with accumulation: the host sums in the same
    order.
    """
    check_on_ranks(under(DIVIDED, *STORES), tmp_path, parts=parts)


@pytest.mark.slow
@pytest.mark.parametrize("states", [REPLICAS, DIVIDED], ids=lambda each: each.kind)
@pytest.mark.parametrize(
    "other_slots", [Full(), Selective(), CopyOut(min_bytes=0)], ids=lambda each: each.kind
)
def test_training_with_recompute_and_offloaded_activations(
    tmp_path: Path, states: Technique, other_slots: Technique
) -> None:
    check_on_ranks(under(states, "stronghold", "elixir"), tmp_path, other_slots=(other_slots,))


@pytest.mark.slow
def test_training_with_planned_recompute(tmp_path: Path) -> None:
    """The plan includes the offloaded blocks, for a budget that neither no recompute nor full recompute
    meets.
    """
    low, high = (
        candidate((DIVIDED, L2L(), *others), 1, RANKS).program.step.peak_bytes() for others in ((Full(),), ())
    )
    budget = (low + high) // 2
    step = check_on_ranks(under(DIVIDED, "l2l"), tmp_path, other_slots=(Planned(),), budget_bytes=budget)[
        "l2l"
    ]
    assert low < step.peak_bytes() <= budget < high


def test_gradients_of_resident_chunks_are_averaged_on_the_device() -> None:
    """Replicas average each gradient once for any place of its update, and offload none of resident
    chunks.
    """
    for technique in (PatrickStar(), Elixir()):
        steps = {budget: candidate((REPLICAS, technique), 1, RANKS, budget) for budget in (None, AMPLE_BYTES)}
        host, there = (each.program.step for each in steps.values())
        assert steps[AMPLE_BYTES].plans["offload.states"].resident_parameters > 0
        assert (
            total(there, Resource.INTRA_LINK)
            == total(host, Resource.INTRA_LINK)
            == total(host, Resource.DEVICE_TO_HOST)
        )
        assert total(there, Resource.DEVICE_TO_HOST) < total(host, Resource.DEVICE_TO_HOST)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("states", [REPLICAS, DIVIDED], ids=lambda each: each.kind)
def test_resident_chunks_are_updated_on_the_device(tmp_path: Path, states: Technique, parts: int) -> None:
    bitwise = parts == 1 or states is DIVIDED
    cases = under(states, "patrickstar", "elixir")
    for step in check_on_ranks(
        cases, tmp_path, parts=parts, bitwise=bitwise, budget_bytes=AMPLE_BYTES
    ).values():
        state = (step.storages.kind == Kind.OPTIMIZER) & (step.storages.bytes > 4)
        assert (
            0
            < int(step.storages.bytes[state & (step.storages.tier == Tier.DEVICE)].sum())
            < int(step.storages.bytes[state].sum())
        )
        assert step.peak_bytes() <= AMPLE_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 3])
def test_replicas_average_gradients_before_they_are_in_place(
    tmp_path: Path, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if no moment gains by it."""
    monkeypatch.setattr(patrickstar, "_leaves_more_room", lambda program: weights_are_free(program.step))
    found = candidate((REPLICAS, PatrickStar()), parts, RANKS).plans["offload.states"].document()
    assert found["gradients"] == "in_place"
    check_on_ranks(under(REPLICAS, "patrickstar"), tmp_path, parts=parts, bitwise=parts == 1)


def test_rows_are_loaded_before_their_gather() -> None:
    """The mechanism: in backward one block earlier. At every moment a window's rows are resident, including
    the gathered ones.
    """
    for slots in (1, 2, 6):
        residency = window_residency(6, slots, gathered=True)
        for used, there in zip(order_of_use(6, gathered=True), residency.resident(), strict=False):
            assert len(there) == slots
            assert used in there or used < 0
        assert residency.moves == 12 - slots


@pytest.mark.parametrize("slots", [1, 3])
def test_gathers_read_resident_rows(slots: int) -> None:
    """Each all-gather of a block reads the rows loaded for it, after their H2D copy."""
    step = candidate((DIVIDED, Stronghold(window=slots)), 1, RANKS).program.step
    gathers = gathers_of(step)
    assert gathers is not None
    for rows in (gathers.forward, gathers.backward):
        for block, gather in enumerate(rows.tolist()):
            read = step.uses.storage[step.uses.op == gather]
            owners = step.storages.owner[read]
            mine = read[(owners >= 0) & (step.storages.kind[read] == Kind.COMMUNICATION)]
            assert set(columns_of(step.parameters).block[step.storages.owner[mine]]) == {block}
            copies = step.uses.op[np.isin(step.uses.storage, mine) & (step.uses.op < gather)]
            assert (step.ops.resource[copies] == Resource.HOST_TO_DEVICE).sum() == len(mine)


def test_gradients_of_blocks_bypass_ddp_buckets() -> None:
    """The mechanism: a block is averaged, offloaded and updated before the backward of the block before it
    computes.
    """
    step = candidate((REPLICAS, L2L()), 1, RANKS).program.step
    names = step.names
    average = names.index("memtune.all_reduce_.default")
    assert int((step.ops.name == average).sum()) == len(step.blocks)
    update = names.index("memtune.host_update_.default")
    first = {
        name: min(row for row in range(step.ops.n) if step.ops.name[row] == name)
        for name in (average, update)
    }
    computes = [row for row in range(step.ops.n) if step.ops.block[row] == 0 and row > first[average]]
    assert first[average] < first[update] < computes[0]


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize(
    ("slot", "kind", "why"),
    [
        ("sharding.states", "zero1", "whole on each, or gathered from all"),
        ("sharding.states", "none", "whole on each, or gathered from all"),
        ("sharding.parallel", "tensor", "whole on each rank"),
    ],
)
def test_other_ways_to_use_ranks_are_refused(name: str, slot: str, kind: str, why: str) -> None:
    mine, other = STORES[name][0], find(slot, kind)(kind=kind)
    target = replace(target_of(mine, REPLICAS, other), ranks=RANKS)
    assert why in str(mine.fits(plain_program(CHAIN), target))


@pytest.mark.parametrize(
    ("knobs", "sent", "why"),
    [
        ({"reshard_after_forward": False}, None, "reshard_after_forward"),
        ({"blocks_per_unit": 2}, None, "blocks_per_unit"),
        ({"prefetch": 1}, None, "prefetch"),
        ({"degree": 2}, None, "all ranks share a copy"),
        ({}, "hierarchical", "as hierarchical does"),
    ],
)
def test_other_ways_to_gather_are_refused(knobs: dict[str, Any], sent: str | None, why: str) -> None:
    others = [find("sharding.communication", sent)(kind=sent)] if sent else []
    states = Fsdp(kind="fsdp", **knobs)
    target = replace(target_of(L2L(), states, *others), ranks=4)
    assert why in str(L2L().fits(plain_program(CHAIN), target))


@pytest.mark.parametrize("name", STORES)
def test_replicas_with_unused_parameters_are_refused(name: str) -> None:
    """Gradients of blocks are averaged when ready: a rank that lacks one would average it with
    another.
    """
    mine, some = STORES[name][0], Ddp(find_unused_parameters=True)
    assert mine.fits(plain_program(CHAIN), replace(target_of(mine, REPLICAS), ranks=RANKS)) is None
    said = str(mine.fits(plain_program(CHAIN), replace(target_of(mine, some), ranks=RANKS)))
    assert "every rank must have all of them" in said
    assert "find_unused_parameters: false" in said


KNOBS: list[dict[str, Any]] = [{"blocks_per_unit": 2}, {"prefetch": 1}, {"reshard_after_forward": False}]


def refusals(names: list[str]) -> list[str]:
    """Return the errors of `apply` for offloaders with ZeRO-1, and for one with other gathers."""
    wrong = [({"kind": "zero1"}, name) for name in names]
    wrong += [({"kind": "fsdp", **knobs}, "l2l") for knobs in KNOBS]
    found = []
    for states, name in wrong:
        settings = {"sharding": {"states": states}, "offload": settings_of(STORES[name][0])["offload"]}
        try:
            started({"settings": settings})
        except ApplyError as refused:
            found.append(str(refused))
    return found


@pytest.mark.slow
def test_apply_refuses_them_by_name() -> None:
    for said in run_ranks(refusals, RANKS, list(STORES)):
        assert ["gathered from all" in each for _, each in zip(STORES, said, strict=False)] == [True] * len(
            STORES
        )
        for knob, each in zip(KNOBS, said[len(STORES) :], strict=True):
            assert f"default gathers, not with {next(iter(knob))}" in each
