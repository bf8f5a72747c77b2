"""`execution: {autocast_cache: false}`: the bits of training, the bytes of recomputed blocks, and when a
search chooses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.search import prepared_search
from support.zoo_paths import ZOO

from memtune.autotune.record import record, start_session
from memtune.autotune.search.dry_runs import traced_under
from memtune.autotune.search.preparation import prepare
from memtune.autotune.space import PlanOptions
from memtune.config import Settings, TunedConfig
from memtune.program import Phase, Program, RankClass, Step
from memtune.search_spaces import find
from memtune.search_spaces.execution import Execution
from memtune.testing.drift_check import compare, target_of
from memtune.testing.training import differences, plain, train_under
from memtune.workload import Workload

FILE = ZOO["autocast"]
WITHOUT = Execution(autocast_cache=False)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.is_autocast_cache_enabled()
    yield
    torch.set_autocast_cache_enabled(before)


@pytest.mark.parametrize("kind", ["none", "full", "selective"])
def test_training_without_the_cache_is_bitwise(kind: str) -> None:
    settings = {"execution": {"autocast_cache": False}, "recompute": {"kind": kind}}
    run = train_under(FILE, {"settings": settings})
    assert not torch.is_autocast_cache_enabled()
    assert differences(run, plain(FILE)) == []


def recomputed(*, cached: bool) -> tuple[Step, Step]:
    """Return the predicted and the recorded step with all blocks recomputed."""
    workload = replace(Workload.load(FILE), autocast_cache=cached)
    full, execution = find("recompute", "full")(kind="full"), Execution(autocast_cache=cached)
    program = Program((RankClass(1, record(workload).at(4)),), 4)
    target = target_of(full)
    config = TunedConfig(settings=Settings.of(execution, {"recompute": full}))
    trace = traced_under(start_session(workload, "fake"), config, 4)
    return full.rewrite(program, full.plan(program, target), target).step, trace.step  # type: ignore[union-attr]


def test_recomputed_blocks_free_their_casts() -> None:
    found = []
    for cached in (True, False):
        predicted, real = recomputed(cached=cached)
        assert compare(predicted, real) == ""
        found.append(int(predicted.live_bytes()[np.flatnonzero(predicted.ops.phase == Phase.FORWARD)].max()))
    assert torch.is_autocast_cache_enabled()  # a dry run leaves the process as it was
    weights = sum(each.numel() for each in Workload.load(FILE).build_model().parameters())
    assert found[0] - found[1] > weights  # two bytes for each, of two of three blocks at least


TWICE = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(DIM, DIM)

    def forward(self, x):
        return x + self.up(F.gelu(self.up(x)))


class Net(nn.Module):"""


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("name", "cached"), [("autocast", False), ("weights used twice", True), ("mlp", True)]
)
def test_search_turns_the_cache_off_where_one_op_uses_each_weight(
    name: str, cached: bool, tmp_path: Path
) -> None:
    file = ZOO.get(name, tmp_path / "model.py")
    if name not in ZOO:
        file.write_text(FILE.read_text().replace("\nclass Net(nn.Module):", TWICE))
    setup = prepare(
        PlanOptions(workload=str(file), device="cpu", axes=("recompute",)),
        for_trials=False,
        begun=prepared_search.Probed(),  # type: ignore[arg-type]
    )
    assert setup.recording.autocast_cache is cached
    executions = {each.choice.execution for each in setup.score(0).by_key.values()}
    assert executions
    assert {each.autocast_cache for each in executions} == {cached}
