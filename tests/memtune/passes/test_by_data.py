"""Which ops make the ones after them depend on data."""

from __future__ import annotations

import pytest
from zoo_paths import ZOO

from memtune.passes.by_data import depends_on_data
from memtune.passes.region import Region, region_of
from memtune.testing.drift import recording_of


@pytest.mark.parametrize(("name", "op"), [("hf_llama", ""), ("lstm", ""), ("gpt", ""), ("moe", "aten.nonzero.default")])
def test_a_mask_made_from_positions_is_no_data(name: str, op: str) -> None:
    step = recording_of(ZOO[name]).at(2)
    region = region_of(step)
    assert isinstance(region, Region)
    assert ("aten.all.default" in region.graph.names) == (name == "hf_llama")
    assert depends_on_data(step, region) == op
