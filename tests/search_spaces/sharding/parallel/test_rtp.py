"""Rotated tensor parallelism: which weights may go round, what a rank holds and sends, and that gloo ranks train as one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from gloo import run_ranks
from sharded_suite import ShardedSuite
from shared_layers import SEPARATE, assert_trained_as_one, config, trained

from memtune.search_spaces.sharding.parallel.rtp import Rtp

KIND = "rtp"


def test_two_ranks_train_as_one_with_clipping() -> None:
    found = run_ranks(trained, 2, 2, config(KIND), True)
    assert_trained_as_one(found, trained(2, None, True))
    assert found[0]["audit"]["sharding.parallel"] == {"degree": 2, "layers": 15, "rotated_bytes": 54272}


@pytest.mark.slow
@pytest.mark.parametrize("knobs", [{}, {"degree": 2}, {"in_place": True}], ids=str)
def test_four_ranks_train_as_one(knobs: dict[str, Any]) -> None:
    assert_trained_as_one(run_ranks(trained, 4, 4, config(KIND, 4, **knobs), True), trained(4, None, True), atol=1e-5)


class TestRtp(ShardedSuite):
    technique = Rtp
    models: ClassVar[dict[str, Path]] = {"separate": SEPARATE}
    variants = (Rtp(), Rtp(in_place=True))
    accumulate, peak_rel, briefly = 2, 0.02, False
