"""Steps of forward and backward only: equal live bytes, and equal options of the block planner."""

from __future__ import annotations

import numpy as np
import pytest
from support.zoo_paths import ZOO

from memtune import hardware
from memtune.program.step import Phase, forward_and_backward
from memtune.search_spaces.recompute._block_planner import measured_options
from memtune.testing.drift_check import plain_program


@pytest.mark.parametrize("model", ["gpt", "cnn_bn"])
def test_forward_and_backward_keeps_bytes_and_options(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cpu = plain_program(ZOO[model]).step, hardware.detect("cpu")
    first = forward_and_backward(whole)
    first.validate()
    assert first.ops.n < whole.ops.n / 2
    assert (first.ops.phase > Phase.BACKWARD).sum() == 1
    assert np.array_equal(first.live_bytes(), whole.live_bytes()[: first.ops.n])
    mine = measured_options.levels.__wrapped__(whole, cpu, 1, True)
    monkeypatch.setattr(measured_options, "forward_and_backward", lambda step: step)
    theirs = measured_options.levels.__wrapped__(whole, cpu, 1, True)
    for name in ("held_bytes", "forward_bytes", "backward_bytes", "seconds", "after_bytes", "uniform"):
        assert np.array_equal(getattr(mine, name), getattr(theirs, name)), name
