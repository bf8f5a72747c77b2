"""The effect of one mispredicted trial on its techniques."""

from __future__ import annotations

import math
import random

import pytest

from memtune.autotune.space.candidates import Choice
from memtune.autotune.space.technique_effects import effects, kinds


def choice(**settings: object) -> Choice:
    return Choice.from_document({"execution": {"micro_batch": 4}, **settings})


PLAIN = choice()
FULL = choice(recompute={"kind": "full"})
STORE = choice(offload={"states": {"kind": "l2l"}})
BOTH = choice(recompute={"kind": "full"}, offload={"states": {"kind": "l2l"}})


def test_effect_of_single_trial_counts_half() -> None:
    told = effects([(kinds(PLAIN), 0.5), (kinds(PLAIN), 0.5), (kinds(PLAIN), 0.5), (kinds(STORE), 2.0)])
    # Minimum of 3 (c - log 0.5)² + (c + e - log 2)² + e²: 3 (c - log 0.5) = e, so e (1 + 1 + 1/3) = log 4.
    assert told.of(STORE) == pytest.approx(4 ** (3 / 7))
    assert told.of(BOTH) == pytest.approx(told.of(STORE)), "nothing is known of the other technique"
    assert told.of(PLAIN) == 1


def test_effects_recover_technique_among_others_and_noise() -> None:
    draw = random.Random(0)
    rows = [
        (kinds(each), 1.3 * (2.0 if each in (STORE, BOTH) else 1.0) * math.exp(draw.gauss(0, 0.02)))
        for each in (PLAIN, FULL, STORE, BOTH)
        for _ in range(25)
    ]
    told = effects(rows)
    assert told.of(STORE) == pytest.approx(2.0, rel=0.05)
    assert told.of(FULL) == pytest.approx(1.0, rel=0.05)
    assert told.of(BOTH) == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("rows", [[], [(kinds(STORE), 7.0)], [(kinds(PLAIN), 1.0), (kinds(PLAIN), 3.0)]])
def test_effects_are_neutral_with_too_few_trials(
    rows: list[tuple[frozenset[tuple[str, str]], float]],
) -> None:
    assert effects(rows).of(BOTH) == 1


def test_effects_are_clipped_to_factor_four() -> None:
    told = effects([(kinds(PLAIN), 1.0)] * 50 + [(kinds(STORE), 1e6)] * 50)
    assert told.of(STORE) == 4
