"""`zero_infinity` with `tiles` on several ranks: replicated weights with DDP, a share of each rank's rows
with FSDP.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.gloo import run_ranks
from support.ranks.block_offload_on_ranks import candidate, check_on_ranks, started

from memtune.errors import ApplyError
from memtune.program.parameter_columns import columns_of
from memtune.program.step import Kind, Resource, Step, Tier
from memtune.search_spaces.offload.states.optimizer_cpu import OptimizerCpu
from memtune.search_spaces.offload.states.zero_infinity import ZeroInfinity
from memtune.search_spaces.recompute.full import Full
from memtune.search_spaces.sharding.states.ddp import Ddp
from memtune.search_spaces.sharding.states.fsdp import Fsdp
from memtune.technique import Technique
from memtune.testing.training import settings_of

ON_HOST = ZeroInfinity(kind="zero_infinity", parameters="host", tiles=4)
ON_SSD = ON_HOST.model_copy(update={"parameters": "ssd", "tiles": 3})
WAYS = {"host": ON_HOST, "ssd": ON_SSD, "gradients": ON_SSD.model_copy(update={"gradients": "ssd"})}
REPLICAS, DIVIDED = Ddp(), Fsdp(kind="fsdp")
NATIVE = OptimizerCpu(update="native")
LARGE = ("qkv.weight", "mlp.0.weight", "mlp.2.weight")
"""Large weights of a block of the chain; each has 3 · 32 · 32 elements."""
WEIGHT_BYTES = 3 * 32 * 32 * 4
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.usefixtures("ssd")]
both = pytest.mark.parametrize("states", [REPLICAS, DIVIDED], ids=lambda each: each.kind)


@cache
def predicted(states: Technique, technique: ZeroInfinity, parts: int = 1) -> Step:
    return candidate((states, technique), parts, 2).program.step


def most_of(step: Step, parameter: int, kind: Kind, *, least_bytes: int) -> int:
    """Return the most bytes of a weight, or of its gradient, on the device at once, in pieces of at least
    `least` bytes.
    """
    mine = (
        (step.storages.owner == parameter)
        & (step.storages.kind == kind)
        & (step.storages.tier == Tier.DEVICE)
        & (step.storages.bytes >= least_bytes)
    )
    mine &= step.storages.producer >= 0
    started, ended = (
        np.bincount(at[mine], step.storages.bytes[mine], step.ops.n + 1)
        for at in (step.storages.producer, step.freed_after + 1)
    )
    return int(np.cumsum(started - ended).max())


@both
@pytest.mark.parametrize("parts", [1, 3])
def test_at_most_two_tiles_of_a_weight_are_on_the_device(states: Technique, parts: int) -> None:
    """Of a weight and of its gradient: with FSDP a tile is as large, and a rank loads its share of it."""
    step, whole = (
        predicted(states, ON_HOST, parts),
        predicted(states, ON_HOST.model_copy(update={"tiles": 1}), parts),
    )
    step.validate()
    columns = columns_of(step.parameters)
    tile_bytes, seen = WEIGHT_BYTES // 4, 0
    for p, name in enumerate(columns.names):
        if name.endswith(LARGE):
            seen += 1
            for kind in (Kind.COMMUNICATION, Kind.TEMPORARY):
                assert 0 < most_of(step, p, kind, least_bytes=tile_bytes) <= 2 * tile_bytes
    assert seen == 3 * 6
    assert step.peak_bytes() < whole.peak_bytes()


@both
def test_links_carry_the_bytes_of_untiled_weights(states: Technique) -> None:
    """A weight that is resident between the passes is loaded, or gathered, once more; offloads and averages
    are the same.
    """
    step, whole = predicted(states, ON_HOST), predicted(states, ON_HOST.model_copy(update={"tiles": 1}))
    share = WEIGHT_BYTES // (2 if states is DIVIDED else 1)
    for link, more in (
        (Resource.HOST_TO_DEVICE, 2 * len(LARGE) * share),
        (Resource.DEVICE_TO_HOST, 0),
        (Resource.INTRA_LINK, 0),
    ):
        mine, theirs = (
            int(each.ops.traffic_bytes[each.ops.resource == link].sum()) for each in (step, whole)
        )
        assert mine == theirs + more, link.name


def test_next_tile_is_gathered_while_one_computes() -> None:
    step = predicted(DIVIDED, ON_HOST)
    names = [step.names[i] for i in step.ops.name]
    first = names.index("aten.copy_.default", names.index("aten.new_empty.default")) - 1
    gather = ["aten.empty.memory_format", "memtune.copy_to_device_.default", "aten.new_empty.default"]
    assert names[first - 8 : first] == [*gather, "memtune.all_gather_into_.default"] * 2


def under(states: Technique, *names: str) -> dict[str, tuple[Technique, Technique, Technique]]:
    return {name: (states, WAYS[name], NATIVE) for name in names or WAYS}


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 3])
@both
def test_tiles_train_as_one_rank(tmp_path: Path, states: Technique, parts: int) -> None:
    """Up to rounding, since the input's gradient is a sum over tiles; peak and bytes on each link are as
    predicted.
    """
    check_on_ranks(under(states), tmp_path, parts=parts, bitwise=False)


@pytest.mark.slow
@both
def test_tiles_with_recomputed_blocks(tmp_path: Path, states: Technique) -> None:
    check_on_ranks(under(states, "host"), tmp_path, bitwise=False, other_slots=(Full(),))


@pytest.mark.slow
def test_tiles_with_state_on_the_host(tmp_path: Path) -> None:
    on_host = ON_HOST.model_copy(update={"optimizer": "host"})
    check_on_ranks({"host": (DIVIDED, on_host, NATIVE)}, tmp_path, bitwise=False)


def test_weight_with_uneven_rows_is_not_tiled() -> None:
    """96 rows are three times 32; 32 are not."""
    names = candidate((DIVIDED, ON_HOST), 1, 3).plans["offload.states"].tiled
    assert {name.split(".", 2)[2] for name in names} == {"qkv.weight", "mlp.0.weight"}


@pytest.mark.slow
@both
def test_tiles_on_three_ranks(tmp_path: Path, states: Technique) -> None:
    """In two tiles, whose messages three ranks divide without a remainder."""
    halves = WAYS["gradients"].model_copy(update={"tiles": 2})
    check_on_ranks({"gradients": (states, halves, NATIVE)}, tmp_path, ranks=3, bitwise=False)


def refusals() -> list[str]:
    """Return the errors of `apply` for plans of other ranks or another model."""
    found = []
    for names in (["h.0.out.weight"], ["h.0.mlp.weight"], ["h.0.experts.1.up.weight"]):
        try:
            started({"settings": settings_of(DIVIDED, ON_HOST), "plan": {"offload.states": {"tiled": names}}})
        except ApplyError as refused:
            found.append(str(refused))
    return found


@pytest.mark.slow
def test_apply_refuses_tiles_that_ranks_cannot_share() -> None:
    for said in run_ranks(refusals, 3):
        assert "do not divide evenly" in said[0]
        assert "plain nn.Linear" in said[1]
        assert "use different experts" in said[2]
