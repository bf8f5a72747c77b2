"""Bytes that the online runtime keeps beyond a schedule.

They are put where model and backward peak, not where the optimizer does.
"""

from __future__ import annotations

import pytest
from support.synthetic_steps import make_step

from memtune.activations.eviction.eviction_pass import with_peak
from memtune.program.step import Phase, Step

MODEL = 4
"""Ops of forward and backward; two of the optimizer follow."""


def step() -> Step:
    """Live bytes 10, 30, 10, 10 in model and backward and 100 in the optimizer's two ops."""
    return make_step(
        6,
        3,
        ops_phase=[
            Phase.FORWARD,
            Phase.FORWARD,
            Phase.BACKWARD,
            Phase.BACKWARD,
            Phase.OPTIMIZER,
            Phase.OPTIMIZER,
        ],
        storages_bytes=[10, 20, 90],
        storages_producer=[-1, 1, 4],
        storages_held_until=[5, 1, 5],
    )


def test_the_peak_of_model_and_backward_is_raised_although_the_optimizer_has_the_larger_one() -> None:
    before = step().live_bytes().tolist()
    assert before == [10, 30, 10, 10, 100, 100]
    assert with_peak(step(), 70).live_bytes().tolist() == [10, 70, 10, 10, 100, 100]


@pytest.mark.parametrize("peak_bytes", [0, 29, 30])
def test_what_is_there_anyway_adds_nothing(peak_bytes: int) -> None:
    plain = step()
    assert with_peak(plain, peak_bytes) is plain
