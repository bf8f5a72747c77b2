"""Times of collectives by algorithm against formulas: n ranks, g on a node, k nodes, S bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from memtune import hardware
from memtune.hardware.roofline import Algorithm, algorithm, collective_s, op_s
from memtune.program.step import Resource

LINKS = replace(
    hardware.find("h100-80g"),
    gpus_per_node=4,
    intra_link_bytes_per_s=1e9,
    intra_link_latency_s=1e-3,
    inter_link_bytes_per_s=1e8,
    inter_link_latency_s=1e-2,
)
S = 1e8


def seconds(
    name: str, ranks: int, resource: Resource = Resource.INTRA_LINK, links: hardware.Hardware = LINKS
) -> float:
    row = np.array([0], np.int32), np.array([resource], np.uint8), np.array([float(ranks)]), np.array([S])
    return float(collective_s((name,), *row, links)[0])


@pytest.mark.parametrize(
    ("name", "ranks", "expected"),
    [
        ("memtune.all_gather_into_.default", 4, 3 / 4 * S / 1e9 + 3 * 1e-3),
        ("memtune.all_reduce_.default", 4, 2 * (3 / 4 * S / 1e9 + 3 * 1e-3)),
        ("memtune.all_gather_into_.default", 8, 7 / 8 * S / 4e8 + 7 * 1e-2),  # four network cards a node
        ("memtune.all_gather_into_.default", 1, 0),
        # Over the network 1 of 2 parts of S/4, then 3 of 4 parts of S inside the node.
        (
            "memtune.all_gather_hierarchical_.default",
            8,
            (1 / 2 * S / 4 / 1e8 + 1e-2) + (3 / 4 * S / 1e9 + 3e-3),
        ),
        (
            "memtune.all_reduce_hierarchical_.default",
            8,
            2 * ((1 / 2 * S / 4 / 1e8 + 1e-2) + (3 / 4 * S / 1e9 + 3e-3)),
        ),
        ("memtune.all_gather_hierarchical_.default", 4, 3 / 4 * S / 1e9 + 3e-3),
        # S/8 to each of 4 ranks on the other node, overlapped with the 3 on this one.
        ("memtune.all_to_all_.default", 8, 4 * (S / 8 / 1e8 + 1e-2)),
        ("memtune.all_to_all_.default", 4, 3 * (S / 4 / 1e9 + 1e-3)),
        ("memtune.send.default", 2, S / 1e9 + 1e-3),
        (
            "memtune.send_next_into_.default",
            4,
            S / 1e9 + 1e-3,
        ),  # one step, however many ranks are in the ring
    ],
)
def test_collective_s_equals_formulas(name: str, ranks: int, expected: float) -> None:
    assert seconds(name, ranks) == pytest.approx(expected)


def test_collective_s_over_network_only() -> None:
    assert seconds("memtune.all_reduce_.default", 4, Resource.INTER_LINK) == pytest.approx(
        2 * (3 / 4 * S / 1e8 + 3e-2)
    )
    # One rank per node: all messages use the network, however many devices a node has.
    assert seconds("memtune.all_to_all_into_.default", 4, Resource.INTER_LINK) == pytest.approx(
        3 * (S / 4 / 1e8 + 1e-2)
    )
    assert seconds("memtune.send.default", 2, Resource.INTER_LINK) == pytest.approx(S / 1e8 + 1e-2)


def test_collective_s_counts_the_passes_of_the_backend() -> None:
    gloo = replace(LINKS, all_gather_rounds=1.5, reduce_scatter_rounds=2.5)
    for name, rounds in (
        ("c10d._allgather_base_.default", 1.5),
        ("memtune.reduce_scatter_into_.default", 2.5),
        ("_c10d_functional.all_reduce.default", 1.0),
    ):
        assert seconds(name, 4, links=gloo) == pytest.approx(rounds * seconds(name, 4))


def test_collective_s_treats_cpu_ranks_as_one_node() -> None:
    cpu = replace(LINKS, device="cpu", gpus_per_node=1)
    assert seconds("memtune.all_to_all_.default", 8, links=cpu) == pytest.approx(7 * (S / 8 / 1e9 + 1e-3))
    assert seconds("memtune.all_gather_into_.default", 8, links=cpu) == pytest.approx(7 / 8 * S / 1e9 + 7e-3)


def test_algorithm_by_name() -> None:
    assert algorithm("c10d.alltoall_base_.default") is Algorithm.ALL_TO_ALL
    assert algorithm("memtune.reduce_scatter_into_.default") is Algorithm.RING


def test_products_off_tensor_cores_reach_the_share_of_float32() -> None:
    volta, ampere = hardware.find("v100"), hardware.find("a100-80g")
    assert volta.matmul_share("tf32") == volta.matmul_share("float32") == volta.fp32_matmul_efficiency
    assert volta.matmul_share("float16") == volta.matmul_efficiency
    assert ampere.matmul_share("tf32") == ampere.matmul_efficiency
    at_peak_s, expected_s = op_s("matmul", "float32", 1e12, 0, volta)
    assert expected_s == pytest.approx(at_peak_s / volta.fp32_matmul_efficiency)
