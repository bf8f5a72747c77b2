"""Recordings of partitioned models: code between the divided layers treats every feature alike."""

from __future__ import annotations

from functools import cache, partial

import pytest
from support.ranks.model_parallel_runs import MODELS

from memtune.autotune.record.recorder import record
from memtune.autotune.record_parallel.fake_process_group import fake_ranks
from memtune.autotune.record_parallel.sharded_recording import chosen_pairs, cut_session, partition_difference
from memtune.program.step import Recording
from memtune.technique import Reason
from memtune.workload.linear_pairs import Pair
from memtune.workload.workload import Workload


@cache
def between() -> tuple[Recording, Recording, dict[str, Pair]]:
    """Return the plain step, the divided one, and the pair of each MLP, by the code between its layers."""
    workload = Workload.load(MODELS / "between.py")
    plain = record(workload)
    pairs = chosen_pairs(plain.step, 2, "mlp")
    assert not isinstance(pairs, Reason)
    with fake_ranks(2):
        cut = record(workload, change=partial(cut_session, pairs=pairs, degree=2))
    names = [module.name for module in workload.build_model()]
    return plain, cut, dict(zip(names, pairs, strict=True))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("tanh", None),
        ("mean", "works along what was divided"),
        ("softmax", "works along what was divided"),
        ("dropout", "draws random numbers"),
        ("size", "is given another number"),
        ("cumsum", "is not known to treat"),
        ("products", "sums over what was divided"),
    ],
)
def test_partition_difference_refuses_code_that_mixes_features(name: str, reason: str | None) -> None:
    plain, cut, pairs = between()
    found = partition_difference(plain, cut, [pairs[name]], 2)
    assert found is None if reason is None else reason in str(found)
