"""Replicas of hot experts: which are chosen, and how rows are divided among hosts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from memtune.autotune.record_parallel.fake_process_group import fake_ranks
from memtune.parallel.model.expert_replicas import (
    Boundaries,
    Guests,
    ReplicaRule,
    ReplicatedLayer,
    choose_guests,
)


def loads(counts: list[int], ranks: int, guests: Guests) -> list[float]:
    """Return the rows of each rank."""
    mine = len(counts) // ranks
    hosts = [
        [expert // mine, *(rank for rank in range(ranks) if expert in guests[rank])]
        for expert in range(len(counts))
    ]
    return [
        sum(count / len(at) for count, at in zip(counts, hosts, strict=True) if rank in at)
        for rank in range(ranks)
    ]


@settings(max_examples=100, deadline=None)
@given(
    counts=st.lists(st.integers(0, 1000), min_size=8, max_size=8),
    ranks=st.sampled_from([2, 4, 8]),
    most=st.integers(0, 3),
    worth=st.integers(0, 200),
)
def test_guests_never_give_the_busiest_rank_more_rows(
    counts: list[int], ranks: int, most: int, worth: int
) -> None:
    guests = choose_guests(counts, ranks, ReplicaRule(most, worth))
    assert all(len(mine) <= most and list(mine) == sorted(set(mine)) for mine in guests)
    mine = len(counts) // ranks
    assert not any(expert // mine == rank for rank, held in enumerate(guests) for expert in held)
    before, after = (max(loads(counts, ranks, each)) for each in (((),) * ranks, guests))
    assert after <= before + 1e-6
    if worth >= max(counts):
        assert not any(guests)


@pytest.mark.parametrize(("worth", "guests"), [(10, ((), (0,))), (29, ((), (0,))), (30, ((), ()))])
def test_replica_must_take_the_rows_that_it_is_worth(worth: int, guests: Guests) -> None:
    assert choose_guests([100, 0, 10, 10], 2, ReplicaRule(1, worth)) == guests
    assert loads([100, 0, 10, 10], 2, ((), (0,))) == [50, 70]


def test_rows_of_a_replicated_expert_go_to_its_hosts_in_turn() -> None:
    index = torch.tensor([0, 0, 1, 0, 3, 0, 0])
    with fake_ranks(2):
        layer = ReplicatedLayer(4, "0", 2, 0, ReplicaRule(1), is_recorded=True)
        slots = layer.slots_of(index)
    assert layer.guests == ((), (0,))
    # Slots of rank 0: its experts and a place; 5 is rank 1's place.
    assert slots.tolist() == [0, 5, 1, 0, 4, 5, 0]


def test_layers_choose_again_after_every_few_steps() -> None:
    with fake_ranks(2):
        layer = ReplicatedLayer(4, "0", 2, 0, ReplicaRule(1, every=2), is_recorded=True)
        boundaries = Boundaries([layer])
        found = []
        for hot in (0, 3, 3, 3):
            layer.slots_of(torch.tensor([hot] * 8))
            found.append(layer.guests)
            boundaries.step()
    assert found == [((), (0,)), ((), (0,)), ((3,), ()), ((3,), ())]
