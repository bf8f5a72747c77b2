"""Blocks that come and go on several ranks: weights, bytes on links, peaks, checkpoints, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gloo import run_ranks
from layers_suite import block_bytes, total
from packs_suite import CHAIN
from stores_on_ranks import candidate, check_on_ranks, started

from memtune.errors import ApplyError
from memtune.parameters import columns_of
from memtune.program import Resource
from memtune.search_spaces import find
from memtune.search_spaces.offload.states.elixir import Elixir
from memtune.search_spaces.offload.states.l2l import L2L
from memtune.search_spaces.offload.states.optimizer_cpu import OptimizerCpu
from memtune.search_spaces.offload.states.patrickstar import PatrickStar
from memtune.search_spaces.offload.states.stronghold import Stronghold
from memtune.search_spaces.sharding.states.ddp import Ddp
from memtune.technique import Technique
from memtune.testing.drift import plain_program, rewritten, target_of
from memtune.testing.training import settings_of

RANKS = 2
LAYERS, CHUNKS = OptimizerCpu(update="native"), OptimizerCpu()
REPLICAS = Ddp()
STORES: dict[str, tuple[Technique, Technique]] = {
    "l2l": (L2L(), LAYERS),
    "stronghold": (Stronghold(window=2), LAYERS),
    "patrickstar": (PatrickStar(), CHUNKS),
    "elixir": (Elixir(), CHUNKS),
}
pytestmark = pytest.mark.usefixtures("one_thread")


def under(states: Technique, *names: str) -> dict[str, tuple[Technique, Technique, Technique]]:
    return {name: (states, *STORES[name]) for name in names}


def test_replicas_train_as_one_rank(tmp_path: Path) -> None:
    """Each with a host copy of its own: what goes up is what it is on one rank, and each gradient is averaged once."""
    step = check_on_ranks(under(REPLICAS, "l2l"), tmp_path)["l2l"]
    plain = rewritten(CHAIN)
    sizes, columns = block_bytes(plain), columns_of(plain.parameters)
    outside = int((columns.numel * columns.itemsize)[columns.block < 0].sum())
    batch = total(plain, Resource.HOST_TO_DEVICE)
    assert total(step, Resource.HOST_TO_DEVICE) == 2 * sum(sizes) - sizes[-1] + outside + batch
    assert total(step, Resource.DEVICE_TO_HOST) == total(step, Resource.INTRA_LINK) == sum(sizes) + outside


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 3])
def test_every_store_trains_replicas_as_one_rank(tmp_path: Path, parts: int) -> None:
    """With accumulation a gradient is averaged in each micro-batch, before it is added up: another order of the same sum."""
    check_on_ranks(under(REPLICAS, *STORES), tmp_path, parts=parts, bitwise=parts == 1)


@pytest.mark.slow
def test_four_replicas(tmp_path: Path) -> None:
    check_on_ranks(under(REPLICAS, "stronghold"), tmp_path, ranks=4, bitwise=False)


def test_gradients_of_blocks_are_in_no_bucket_of_ddp() -> None:
    """The mechanism: eager. A block is averaged, sent and updated before the backward of the block before it computes."""
    step = candidate((REPLICAS, L2L()), 1, RANKS).program.step
    names = step.names
    average = names.index("memtune.all_reduce_.default")
    inside = columns_of(step.parameters).block >= 0
    assert int((step.op_name == average).sum()) == int(inside.sum())
    update = names.index("memtune.host_update_.default")
    first = {name: min(row for row in range(step.n_ops) if step.op_name[row] == name) for name in (average, update)}
    computes = [row for row in range(step.n_ops) if step.op_block[row] == 0 and row > first[average]]
    assert first[average] < first[update] < computes[0]


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize(
    ("slot", "kind", "why"),
    [
        ("sharding.states", "zero1", "replicas"),
        ("sharding.states", "none", "replicas"),
        ("sharding.parallel", "tensor", "whole on each rank"),
    ],
)
def test_other_ways_to_use_ranks_are_refused(name: str, slot: str, kind: str, why: str) -> None:
    mine, other = STORES[name][0], find(slot, kind)(kind=kind)
    target = replace(target_of(mine, REPLICAS, other), ranks=RANKS)
    assert why in str(mine.fits(plain_program(CHAIN), target))


def refusals(names: list[str]) -> list[str]:
    """What `apply` says of stores beside ZeRO-1."""
    found = []
    for name in names:
        document: dict[str, Any] = {"settings": settings_of(find("sharding.states", "zero1")(kind="zero1"), STORES[name][0])}
        try:
            started(document)
        except ApplyError as refused:
            found.append(str(refused))
    return found


@pytest.mark.slow
def test_apply_refuses_them_too() -> None:
    for said in run_ranks(refusals, RANKS, list(STORES)):
        assert [f"{name} is for replicas" in each for name, each in zip(STORES, said, strict=True)] == [True] * len(STORES)
