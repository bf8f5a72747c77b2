"""`zero_infinity` with `tiles`: weights of large linear layers are loaded row by row (memory-centric
tiling).
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from support.suites.layer_major_suite import CHAIN
from support.zoo_paths import ZOO

from memtune.api import apply
from memtune.autotune.record_parallel.fake_process_group import fake_ranks
from memtune.errors import ApplyError
from memtune.memory.ledger import Ledger
from memtune.runtime.memory_tiers import HOST, tier
from memtune.search_spaces.offload.states.zero_infinity import ZeroInfinity
from memtune.search_spaces.recompute.attention_boundary import AttentionBoundary
from memtune.search_spaces.recompute.full import Full
from memtune.technique import Technique
from memtune.testing import drift, train
from memtune.testing.drift_check import plain_program, planned, target_of
from memtune.testing.training import build, config_of

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.usefixtures("ssd")]
WHOLE = ZeroInfinity(kind="zero_infinity", parameters="host")
TILED = WHOLE.model_copy(update={"tiles": 4})
ON_SSD = TILED.model_copy(update={"parameters": "ssd", "tiles": 3})
ALL_ON_SSD = ON_SSD.model_copy(update={"gradients": "ssd"})


@pytest.mark.drawn(1)
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
