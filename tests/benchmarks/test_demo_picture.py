"""The picture of the README's searches."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from demo import settings_and_measured
from demo_picture import README, RESULT, drawn, readme

from memtune.config import load_config

RUN = {
    "wall_s": 180,
    "winner": "mb 4 · planned",
    "times_as_fast_as": {"full recompute": 1.25, "plain fsdp": 2.0},
}


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


def test_readme_shows_the_committed_result():
    text = README.read_text(encoding="utf-8")
    assert readme(text, json.loads(RESULT.read_text())["runs"]) == text


def test_readme_part_has_the_config_of_the_first_run():
    tuned = settings_and_measured(
        "memtune: 1\nsettings:\n  recompute: {kind: full}  # all\nmeasured: {peak: 1 MiB}  # in processes\n"
    )
    text = README.read_text(encoding="utf-8")
    again = readme(text, [{**RUN, "tuned": tuned}])
    block = again.partition("```yaml\n")[2].partition("```")[0]
    assert block == "settings:\n  recompute: {kind: full}  # all\nmeasured: {peak: 1 MiB}\n"
    assert "The first of them wrote the config above" in " ".join(again.split())
    assert load_config(block).settings.technique("recompute").kind == "full"
