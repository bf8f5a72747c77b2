"""`zero_infinity` with `tiles`: weights of large linear layers are loaded row by row (memory-centric
tiling).
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.suites.layer_major_suite import CHAIN
from support.zoo_paths import ZOO

from memtune.api import apply
from memtune.autotune.record_parallel.fake_process_group import fake_ranks
from memtune.errors import ApplyError
from memtune.memory.ledger import Ledger
from memtune.offload.tiles.tiled_weights_pass import split_rows, tileable
from memtune.program.parameter_columns import columns_of
from memtune.program.step import Kind, Resource, Step, Tier
from memtune.runtime.memory_tiers import HOST, tier
from memtune.search_spaces.offload.states.zero_infinity import ZeroInfinity
from memtune.search_spaces.recompute.attention_boundary import AttentionBoundary
from memtune.search_spaces.recompute.full import Full
from memtune.technique import Technique
from memtune.testing import drift, rewritten, train
from memtune.testing.drift_check import plain_program, planned, target_of
from memtune.testing.training import build, config_of

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.usefixtures("ssd")]
WHOLE = ZeroInfinity(kind="zero_infinity", parameters="host")
TILED = WHOLE.model_copy(update={"tiles": 4})
ON_SSD = TILED.model_copy(update={"parameters": "ssd", "tiles": 3})
ALL_ON_SSD = ON_SSD.model_copy(update={"gradients": "ssd"})


@given(st.integers(1, 300), st.integers(1, 80))
def test_tiles_cover_every_row_once(count: int, parts: int) -> None:
    rows = split_rows(count, parts)
    assert [i for each in rows for i in range(each.start, each.stop)] == list(range(count))
    sizes = [each.stop - each.start for each in rows]
    assert max(sizes) - min(sizes) <= 1
    assert len(rows) == min(parts, count)


def most_of(step: Step, parameter: int) -> tuple[int, int]:
    """Return the most bytes of a weight, and of its gradient in one micro-batch, that are on the device at
    once.
    """
    found = []
    for kind in (Kind.COMMUNICATION, Kind.TEMPORARY):
        mine = np.flatnonzero(
            (step.storages.owner == parameter)
            & (step.storages.kind == kind)
            & (step.storages.tier == Tier.DEVICE)
            & (step.storages.bytes > 0)
        )
        at = [
            step.storages.bytes[
                mine[(step.storages.producer[mine] <= op) & (step.freed_after[mine] >= op)]
            ].sum()
            for op in range(step.ops.n)
        ]
        found.append(int(max(at)))
    return found[0], found[1]


@pytest.mark.parametrize(
    ("model", "technique"),
    [
        ("tied", TILED),
        ("tied", ON_SSD),
        ("tied", ALL_ON_SSD),
        pytest.param("gpt", ALL_ON_SSD, marks=pytest.mark.slow),
    ],
    ids=["host", "ssd", "gradients", "gpt"],
)
def test_at_most_two_tiles_are_on_the_device(model: str, technique: ZeroInfinity) -> None:
    """The mechanism: of each large weight, and of its gradient, two tiles at most; every op and byte is as
    recorded.
    """
    assert drift(ZOO[model], technique) == ""
    plain = plain_program(ZOO[model]).step
    columns, tiled = columns_of(plain.parameters), tileable(plain, technique.tiles)
    assert tiled
    step, whole = (
        rewritten(ZOO[model], each) for each in (technique, technique.model_copy(update={"tiles": 1}))
    )
    for p in tiled:
        wide, deep = columns.shapes[p]
        tile_bytes = -(-wide // technique.tiles) * deep * int(columns.itemsize[p])
        assert max(most_of(step, p)) <= 2 * tile_bytes
        assert min(most_of(whole, p)) == wide * deep * columns.itemsize[p]
    assert step.peak_bytes() < whole.peak_bytes()
    stays = sum(
        int(
            whole.storages.bytes[whole.storages.kind == Kind.COMMUNICATION][
                whole.storages.owner[whole.storages.kind == Kind.COMMUNICATION] == p
            ].sum()
        )
        for p in tiled
    )
    weights = sum(int(columns.numel[p] * columns.itemsize[p]) for p in tiled)
    for link, more in (
        (Resource.HOST_TO_DEVICE, 2 * weights - stays),
        (Resource.DEVICE_TO_HOST, 0),
        (Resource.SSD_READ, 0),
        (Resource.SSD_WRITE, 0),
    ):
        mine, theirs = (
            int(each.ops.traffic_bytes[each.ops.resource == link].sum()) for each in (step, whole)
        )
        assert mine == theirs + more, (
            "every weight comes up once a pass, also one whose block stays between the two"
        )


def test_next_tile_is_prefetched_while_one_computes() -> None:
    step = rewritten(ZOO["tied"], TILED)
    names = [step.names[i] for i in step.ops.name]
    first = names.index("aten.addmm.out")
    assert names[first - 4 : first] == ["aten.empty.memory_format", "memtune.copy_to_device_.default"] * 2
    assert (step.ops.stream[first - 3], step.ops.prefetch[first - 1]) == (1, 1), (
        "the first is waited for, the second is ahead"
    )


@pytest.mark.parametrize(("technique", "micro_batches"), [(TILED, 1), (ON_SSD, 3), (ALL_ON_SSD, 3)])
def test_five_steps_equal_those_of_untiled_weights(technique: ZeroInfinity, micro_batches: int) -> None:
    """Up to rounding: the input's gradient is a sum over tiles."""
    found, wanted = (
        train(ZOO["gpt"], each, steps=5, micro_batches=micro_batches)
        for each in (technique, technique.model_copy(update={"tiles": 1}))
    )
    assert torch.allclose(torch.stack(found.losses), torch.stack(wanted.losses), rtol=1e-5)
    assert all(torch.allclose(found.weights[name], each, atol=1e-3) for name, each in wanted.weights.items())
    assert (
        max(float((found.weights[name] - each).abs().mean()) for name, each in wanted.weights.items()) < 1e-5
    )


@pytest.mark.parametrize("technique", [TILED, pytest.param(ON_SSD, marks=pytest.mark.slow)])
def test_recomputed_blocks_load_their_tiles_again(technique: ZeroInfinity) -> None:
    assert drift(ZOO["tied"], technique, Full(kind="full")) == ""


def test_tiles_train_where_untiled_weights_are_out_of_memory() -> None:
    """Under a budget between the two predicted peaks; the measured peak is the predicted one, and a step
    leaves no bytes.
    """
    tiled, whole = (planned(ZOO["tied"], each)[0].step.peak_bytes() for each in (TILED, WHOLE))
    budget = (tiled + whole) // 2
    with tier(HOST):
        batches = [build(ZOO["tied"])[0].make_batch(2)]
    seen = []
    for technique in (TILED, WHOLE):
        gc.collect()
        before = Ledger.open("cpu")
        empty = before.live_bytes()
        before.close()
        workload, model, optimizer = build(ZOO["tied"])
        tuned = apply(model, optimizer, config_of(ZOO["tied"], technique), loss=workload.loss, strict=False)
        gc.collect()
        with Ledger.open("cpu", budget_bytes=empty + budget) as ledger:
            if technique is WHOLE:
                with pytest.raises(torch.OutOfMemoryError):
                    tuned.step(batches)
                continue
            for _ in range(4):
                ledger.reset_peak()
                tuned.step(batches)
                seen.append(
                    (ledger.peak_allocated_bytes() - empty, ledger.live_bytes(), ledger.live_bytes(HOST))
                )
        del tuned, model, optimizer
    assert seen[2] == seen[3]
    assert seen[3][0] == pytest.approx(tiled, rel=0.02)


def test_tiled_weights_are_saved_loaded_and_evaluated() -> None:
    workload, model, optimizer = build(ZOO["tied"])
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(0)
    batch = workload.make_batch(2)
    with torch.no_grad():
        wanted = workload.loss(model, batch)
    tuned = apply(model, optimizer, config_of(ZOO["tied"], TILED), loss=workload.loss, strict=False)
    assert all(torch.equal(value, plain[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.allclose(workload.loss(model, batch), wanted)
    tuned.step([batch])
    changed = {name: value.clone() for name, value in tuned.state_dict()["model"].items()}
    assert any(not torch.equal(value, plain[name]) for name, value in changed.items())
    model.load_state_dict(plain)
    assert all(torch.equal(value, plain[name]) for name, value in model.state_dict().items())
    tuned.step([batch])
    assert all(
        torch.allclose(value, changed[name], atol=2e-3) for name, value in tuned.state_dict()["model"].items()
    )


def settings(technique: Technique, **more: Any) -> dict[str, Any]:
    return {
        "settings": {
            "offload": {"states": technique.model_dump(exclude_defaults=True) | {"kind": technique.kind}}
        },
        **more,
    }


@pytest.mark.parametrize("technique", [TILED, ON_SSD], ids=["host", "ssd"])
def test_parameters_of_the_block_itself_are_loaded(technique: ZeroInfinity) -> None:
    """Its modules' tiles are loaded after it, without a second load of the block."""
    workload, model, optimizer = build(ZOO["tied"])
    for name, block in model.layers.named_children():  # type: ignore[operator, union-attr]
        block.scale = torch.nn.Parameter(torch.full((3,), float(name) + 1), requires_grad=False)
    apply(model, optimizer, config_of(ZOO["tied"], technique), loss=workload.loss, strict=False)
    wanted = {name: 2 * value for name, value in model.state_dict().items()}
    model.load_state_dict(wanted)
    assert all(torch.equal(wanted[name], value) for name, value in model.state_dict().items())


def test_fits_refuses_by_name() -> None:
    program, target = plain_program(ZOO["tied"]), target_of(TILED)
    many = WHOLE.model_copy(update={"tiles": 64}).fits(plain_program(ZOO["gpt"]), target)
    assert many is None or "so many outputs" in str(many)
    assert "weights in tiles are offloaded" in str(
        TILED.model_copy(update={"parameters": "device"}).fits(program, target)
    )
    workload, model, optimizer = build(ZOO["tied"])
    with pytest.raises(ApplyError, match="needs a plan"):
        apply(model, optimizer, settings(TILED), loss=workload.loss, strict=False)
    plan = {"offload.states": {"tiled": ["layers.0.norm.weight"]}}
    with pytest.raises(ApplyError, match=r"plain nn\.Linear"):
        apply(model, optimizer, settings(TILED, plan=plan), loss=workload.loss, strict=False)
    with fake_ranks(2), pytest.raises(ApplyError):
        apply(model, optimizer, config_of(ZOO["tied"], TILED), loss=workload.loss, strict=False)


def test_block_schedule_with_tiles_is_refused() -> None:
    """It would run without the schedule, which was not planned."""
    boundary = AttentionBoundary(kind="attention_boundary")
    assert "a schedule runs" in str(TILED.fits(plain_program(CHAIN), target_of(TILED, boundary)))
    workload, model, optimizer = build(CHAIN)
    with pytest.raises(ApplyError, match="products with tiled weights"):
        apply(model, optimizer, config_of(CHAIN, TILED, boundary), loss=workload.loss, strict=False)
