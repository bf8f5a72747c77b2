"""The picture of the README's searches."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from demo_picture import drawn


def test_picture_has_a_mark_for_each_gain_and_says_the_range():
    picture = drawn(
        [
            {"times_as_fast_as": {"full recompute": 1.25, "plain fsdp": 2.0}},
            {"times_as_fast_as": {"full recompute": 0.75, "plain fsdp": 1.5}},
        ]
    )
    assert "0.75 to 1.25 times as fast as full recompute" in picture.description
    assert picture.svg.count("<circle") == 3  # two searches and the legend
    assert "search 2: 0.75 × full recompute" in picture.svg
