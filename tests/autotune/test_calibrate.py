"""The chance of running out of memory follows from the trials so far, and is not given without them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memtune.autotune.calibrate import oom_probability
from memtune.autotune.simulate import Calibration

RATIOS = st.lists(st.floats(0.5, 2.0), min_size=3, max_size=30)


def test_without_trials_nothing_is_said() -> None:
    assert oom_probability(Calibration(), 100, 200) is None
    assert oom_probability(Calibration((1.0, 1.1), (1.0, 1.0)), 100, 200) is None
    assert oom_probability(Calibration(), 100, None) == 0.0


def test_the_share_of_trials_that_would_not_have_fitted() -> None:
    calibration = Calibration((0.9, 1.0, 1.1, 1.3))
    assert oom_probability(calibration, 100, 120) == 1.5 / 5
    assert oom_probability(calibration, 100, 200) == 0.5 / 5
    assert oom_probability(calibration, 100, 50) == 4.5 / 5


@given(RATIOS, st.integers(1, 10**6), st.integers(1, 10**6), st.integers(0, 10**6))
def test_more_budget_is_never_a_greater_risk(ratios: list[float], peak: int, budget: int, more: int) -> None:
    calibration = Calibration(tuple(ratios))
    tight, loose = (oom_probability(calibration, peak, each) for each in (budget, budget + more))
    assert tight is not None
    assert loose is not None
    assert 0 < loose <= tight < 1
