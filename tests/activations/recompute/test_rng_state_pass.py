"""Random states on the host; `TechniqueSuite` compares them, op by op, with a recording of the runtime."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.zoo_paths import ZOO

from memtune.activations.recompute.recompute_pass import recompute_blocks
from memtune.activations.recompute.rng_state_pass import STATE_BYTES, states_of
from memtune.program.step import Phase, Step, Tier
from memtune.testing.drift_check import plain_program


def spans(step: Step) -> list[tuple[int, int]]:
    """Return the first and last op of each state."""
    rows = np.flatnonzero((step.storages.bytes == STATE_BYTES) & (step.storages.tier == Tier.HOST))
    return sorted(zip(step.storages.producer[rows].tolist(), step.freed_after[rows].tolist(), strict=True))


def test_state_bytes_equal_torchs() -> None:
    assert torch.get_rng_state().nbytes == STATE_BYTES


def test_drawing_blocks_keep_one_state_and_save_one() -> None:
    step = recompute_blocks(plain_program(ZOO["gpt"]).step, [1])
    forward, again = (
        np.flatnonzero((step.ops.block == 1) & (step.ops.phase == phase))
        for phase in (Phase.FORWARD, Phase.RECOMPUTE)
    )
    begun, aside = spans(step)
    assert begun[0] == forward[0]
    assert begun[1] > again[-1]
    assert aside == (again[0], again[-1])


def test_kept_ops_keep_the_state_after_them() -> None:
    plain = plain_program(ZOO["gpt"]).step
    drawn = plain.names[plain.ops.name[np.flatnonzero((plain.ops.rng == 1) & (plain.ops.block == 1))[0]]]
    step = recompute_blocks(plain, [1], lambda name: name == drawn)
    drops = np.flatnonzero((step.ops.block == 1) & (step.ops.rng == 1) & (step.ops.phase == Phase.FORWARD))
    assert not (step.ops.rng[step.ops.phase == Phase.RECOMPUTE]).any()
    assert [began for began, _ in spans(step)][1:3] == (drops + 1).tolist()


@pytest.mark.parametrize("model", ["hf_llama", "moe"])
def test_rng_states_are_kept_for_draws_only(model: str) -> None:
    """Attention without dropout has a random op that draws nothing."""
    plain = plain_program(ZOO[model]).step
    assert not plain.ops.rng.any()
    step = recompute_blocks(plain, list(range(len(plain.blocks))))
    assert (step.ops.phase == Phase.RECOMPUTE).any()
    assert not spans(step)


def test_schedule_keeps_a_state_from_first_to_last_run() -> None:
    again, first = np.asarray([0, 0, 1, 0, 1, 1], bool), np.asarray([0, 1, 0, 3, 0, 1], np.int32)
    draws = np.asarray([1, 0, 1, 1, 1, 0], bool)
    found = states_of(draws, again, first)
    assert list(zip(found["producer"].tolist(), found["held_until"].tolist(), strict=True)) == [
        (0, 4),
        (2, 2),
        (4, 4),
    ]
    assert (found["bytes"] == STATE_BYTES).all()
    assert (found["tier"] == Tier.HOST).all()
