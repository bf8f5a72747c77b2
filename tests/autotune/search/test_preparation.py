"""Preparation of a search: which recordings it may make."""

from __future__ import annotations

from typing import Any

import pytest
from support.zoo_paths import ZOO

from memtune.autotune.search.preparation import prepare
from memtune.autotune.space.search_options import PlanOptions

EXPERTS, OTHER = str(ZOO["moe"]), str(ZOO["tied"])


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("path", "asked", "kinds"),
    [
        (EXPERTS, {"nodes": 2}, {"none", "expert_parallel"}),
        (EXPERTS, {}, {"none"}),
        (OTHER, {"nodes": 2}, {"none"}),
    ],
)
def test_experts_on_several_nodes_are_divided_without_request(
    path: str, asked: dict[str, Any], kinds: set[str]
) -> None:
    """Other divisions, and all of other models, take recordings that must be requested."""
    options = PlanOptions(workload=path, gpu_type="h100-80g", ranks=4, global_batch=4, **asked)
    space = prepare(options, for_trials=False).space
    assert {each.kind for each in space.slots["sharding.parallel"]} == kinds
    assert "--axes sharding.parallel" in str(space.unfit["sharding.parallel: tensor"])
