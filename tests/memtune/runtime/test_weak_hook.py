"""Whom a gradient hook calls goes with its model: the collector sees no cycle through a tensor's hooks."""

from __future__ import annotations

import gc
import weakref

import pytest
from zoo_paths import ZOO

from memtune._apply import apply
from memtune.testing.training import SEED, build, one_step

LANDED = {"offload": {"states": {"kind": "zero_offload", "update": "native"}}}
COMPLETE = {"execution": {"order": {"kind": "roam"}}}


@pytest.mark.parametrize("settings", [LANDED, COMPLETE], ids=["gradients_down", "update_at_gradient"])
def test_nothing_outlives_the_optimizer(settings: dict[str, object]) -> None:
    workload, model, optimizer = build(ZOO["tied"])
    tuned = apply(model, optimizer, {"settings": settings}, strict=False)
    one_step(workload, model, optimizer, tuned, seed=SEED)
    gone = [weakref.ref(each) for each in (model, optimizer, next(model.parameters()))]
    del workload, model, optimizer, tuned
    gc.collect()
    assert [each() for each in gone] == [None] * 3
