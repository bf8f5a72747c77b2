"""The offload pass by itself: the selected tensors, each offloaded and reloaded once at most."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from support.zoo_paths import ZOO

from memtune.activations.offload.activation_offload_pass import move_activations
from memtune.activations.offload.selection_plan import OffloadClaim, select_offloads
from memtune.activations.recompute.recompute_pass import recompute_blocks
from memtune.program.step import Resource, Step, Tier
from memtune.testing.drift_check import plain_program


def step_of(model: str) -> Step:
    return plain_program(ZOO[model]).step


def moved(step: Step, fraction: float, min_bytes: int = 0) -> Step:
    return move_activations(
        step, [OffloadClaim(block, fraction, min_bytes) for block in range(len(step.blocks))]
    )


def traffic(step: Step, resource: Resource) -> list[int]:
    return sorted(step.ops.traffic_bytes[step.ops.resource == resource].tolist())


def test_pass_without_claims_returns_the_step() -> None:
    step = step_of("gpt")
    assert moved(step, 0.0) is step
    assert move_activations(step, []) is step
    assert moved(step, 1.0, min_bytes=1 << 40) is step


@pytest.mark.parametrize("model", ZOO)
def test_storages_are_offloaded_and_reloaded_once(model: str) -> None:
    step = step_of(model)
    new = moved(step, 1.0)
    new.validate()
    down = Counter(traffic(new, Resource.DEVICE_TO_HOST))
    up = Counter(traffic(new, Resource.HOST_TO_DEVICE)) - Counter(traffic(step, Resource.HOST_TO_DEVICE))
    assert not up - down  # some offloaded tensors are never read
    assert new.peak_bytes(Tier.HOST) >= step.peak_bytes(Tier.HOST)
    assert sum(down.values()) == len(np.flatnonzero(new.ops.resource == Resource.DEVICE_TO_HOST))


def test_peak_falls_with_the_offloaded_fraction() -> None:
    step = step_of("gpt")
    bytes_out = [
        sum(traffic(moved(step, fraction), Resource.DEVICE_TO_HOST))
        for fraction in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    assert bytes_out == sorted(bytes_out)
    whole = sum(step.saved_bytes(block) for block in range(4))
    assert bytes_out[-1] == whole
    assert all(
        out == round(fraction * whole)
        for out, fraction in zip(bytes_out, (0.0, 0.25, 0.5, 0.75, 1.0), strict=True)
    )


def test_recomputed_tensors_are_not_offloaded() -> None:
    step = recompute_blocks(step_of("gpt"), [0, 1, 2, 3])
    out = traffic(moved(step, 1.0), Resource.DEVICE_TO_HOST)
    assert out == [2 * 32 * 64 * 4] * 4  # the blocks' inputs alone: (micro-batch, sequence, width) float32


def test_unclaimed_block_keeps_its_saves() -> None:
    step = step_of("gpt")
    new = move_activations(step, [OffloadClaim(1, 1.0)])
    leaves = np.flatnonzero(new.ops.resource == Resource.DEVICE_TO_HOST)
    assert set(new.ops.block[leaves]) == {1}
    assert sum(traffic(new, Resource.DEVICE_TO_HOST)) == step.saved_bytes(1)


def test_unclaimed_blocks_offload_nothing() -> None:
    step = step_of("tied")
    large = step.with_storages(bytes=step.storages.bytes * 2**31)
    out = select_offloads(large, [OffloadClaim(1, 0.5)], None)
    assert set(out.block.tolist()) == {1}
    assert out.n_bytes.sum() == round(0.5 * large.saved_bytes(1))
