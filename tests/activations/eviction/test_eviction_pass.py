"""Bytes that the online runtime keeps in addition to a schedule's; added at the peak of model and
backward.
"""

from __future__ import annotations

import pytest
from support.synthetic_steps import make_step

from memtune.activations.eviction.eviction_pass import with_peak
from memtune.program.step import Phase, Step

MODEL = 4
"""Ops of forward and backward; two of the optimizer follow."""


def step() -> Step:
    """Return a step with live bytes 10, 30, 10, 10 in model and backward and 100 in the optimizer's
    two ops.
    """
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


def test_with_peak_raises_the_peak_of_forward_and_backward() -> None:
    before = step().live_bytes().tolist()
    assert before == [10, 30, 10, 10, 100, 100]
    assert with_peak(step(), 70).live_bytes().tolist() == [10, 70, 10, 10, 100, 100]


@pytest.mark.parametrize("peak_bytes", [0, 29, 30])
def test_with_peak_keeps_a_sufficient_peak(peak_bytes: int) -> None:
    plain = step()
    assert with_peak(plain, peak_bytes) is plain
