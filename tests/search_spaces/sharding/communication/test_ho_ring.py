"""HO-Ring: overlap in the simulator, and rings of three nodes. Numbers: tests/parallel/collectives.

Distinguishing test: of a unit of M bytes over p ranks, (p/k - 1)·M/p reach a rank between nodes and (k -
1)·M/k inside its own, and if both take equally long, a gather takes little more than one of them; the same
holds for a reduction.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from support.gloo import run_ranks
from support.sharding_programs import program, target
from support.suites.sharded_suite import NOT_AT_THE_PEAK, ShardedSuite
from support.zoo_paths import ZOO

from memtune.autotune.predict.prediction import Prediction
from memtune.autotune.predict.simulation import simulate
from memtune.parallel.collectives.fsdp_comm_hooks import Gather, RingReduction
from memtune.parallel.collectives.message_layout import Communication
from memtune.runtime import node_topology
from memtune.runtime.transfer import COUNTERS
from memtune.search_spaces import find
from memtune.search_spaces.sharding.communication.hierarchical import Hierarchical
from memtune.search_spaces.sharding.communication.ho_ring import HoRing
from memtune.search_spaces.sharding.states.fsdp import Fsdp
from memtune.technique import Exactness, Target, Technique

RANKS, LOCAL, NUMEL = 6, 2, 5
SIMULATED = 16


def gathered() -> tuple[bool, dict[str, int]]:
    """Return whether every rank's shard is in its place, and the counted bytes."""
    node_topology.declare(LOCAL)
    gather = Gather(
        None, Communication(LOCAL, gather="ho_ring"), node_topology.nodes_of("cpu", RANKS, LOCAL), None
    )
    whole, shard = torch.empty(RANKS * NUMEL), torch.arange(NUMEL) + 10.0 * dist.get_rank()
    COUNTERS.take()
    gather._rings(whole, shard)
    wanted = torch.cat([torch.arange(NUMEL) + 10.0 * rank for rank in range(RANKS)])
    return torch.equal(whole, wanted), COUNTERS.take()


def reduced() -> tuple[bool, dict[str, int]]:
    """Return the same for sums and for means over the ranks, counted once."""
    node_topology.declare(LOCAL)
    reduction, mine = RingReduction(node_topology.nodes_of("cpu", RANKS, LOCAL)), torch.empty(NUMEL)
    given = torch.arange(RANKS * NUMEL) + 100.0 * (dist.get_rank() + 1)
    sums = (RANKS * torch.arange(RANKS * NUMEL) + 100.0 * RANKS * (RANKS + 1) / 2).view(RANKS, -1)[
        dist.get_rank()
    ]
    right = []
    for op, wanted in ((dist.ReduceOp.SUM, sums), (dist.ReduceOp.AVG, sums / RANKS)):
        COUNTERS.take()
        reduction(mine, given, dist.distributed_c10d._get_default_group(), op)
        right.append(torch.allclose(mine, wanted, rtol=1e-6))
    return all(right), COUNTERS.take()


def both_ways() -> list[tuple[bool, dict[str, int]]]:
    return [gathered(), reduced()]


def test_rings_over_three_nodes_gather_and_reduce_correctly() -> None:
    shard, each_node = 4 * NUMEL, 4 * NUMEL * (LOCAL - 1)
    for rank in run_ranks(both_ways, RANKS):
        for right, counted in rank:
            assert right
            assert counted["inter_link"] == (RANKS // LOCAL - 1) * shard
            assert counted["intra_link"] == RANKS // LOCAL * each_node


def slow(ranks: int = SIMULATED) -> Target:
    """Return GPUs with links that dominate compute, equally long inside a node of two and between nodes."""
    plain = target(ranks)
    links = {"intra_link_bytes_per_s": 1e6, "inter_link_bytes_per_s": 1e6, "gpus_per_node": LOCAL}
    latency = {"intra_link_latency_s": 0.0, "inter_link_latency_s": 0.0, "link_slowdown": 0.0}
    return replace(plain, hardware=replace(plain.hardware, **links, **latency))


def predicted(how: Technique) -> Prediction:
    on = slow()
    states = Fsdp(reshard_after_forward=False)
    on = replace(on, chosen={"sharding.states": states, "sharding.communication": how})
    made = program(ranks=SIMULATED)
    for each in (states, how):
        assert each.fits(made, on) is None
        made = each.rewrite(made, each.plan(made, on), on)
    made.step.validate()
    return simulate(made, on.hardware, level="events")


def test_gathers_use_both_links_at_once() -> None:
    ring, sequential = predicted(HoRing()), predicted(Hierarchical())
    for link in ("intra_link", "inter_link"):
        assert ring.busy_s[link] == pytest.approx(sequential.busy_s[link])
    # Of eight ring steps, equally long on either link, seven overlap with gathers; reductions take the rest.
    saved_s = sequential.step_s - ring.step_s
    assert 0.75 * ring.busy_s["inter_link"] < saved_s <= ring.busy_s["inter_link"]


def test_ring_reductions_overlap_both_links() -> None:
    flat, rings = predicted(HoRing()), predicted(HoRing(reductions=True))
    assert rings.step_s < 0.8 * flat.step_s
    # A gather and a reduction of every unit, of which seven of eight turns run on both links at once.
    assert rings.step_s == pytest.approx(rings.busy_s["inter_link"] * 8 / 7, rel=0.05)
    assert HoRing(reductions=True).exactly() is Exactness.REORDERED
    assert HoRing().exactly() is Exactness.BITWISE


def test_fits_several_but_not_too_many_nodes() -> None:
    assert find("sharding.communication", "ho_ring") is HoRing
    chosen = {"sharding.states": Fsdp()}
    assert "share a node" in str(HoRing().fits(program(ranks=2), replace(slow(2), chosen=chosen)))
    assert "more than 16" in str(HoRing().fits(program(ranks=64), replace(slow(64), chosen=chosen)))
    assert HoRing().record(slow()) != Hierarchical().record(slow())


class TestHoRing(ShardedSuite):
    technique = HoRing
    ranks, other_slots, briefly = 4, (Fsdp(),), False
    models: ClassVar[dict[str, Path]] = {"lora": ZOO["lora"]}
    # The same bits over other links, received part by part:
    # tests/parallel/collectives/test_fsdp_comm_hooks.py.
    not_shown = (*NOT_AT_THE_PEAK, "rewrite does nothing", "apply does nothing")

    @classmethod
    def default(cls) -> HoRing:
        return HoRing(ranks_per_node=2)
