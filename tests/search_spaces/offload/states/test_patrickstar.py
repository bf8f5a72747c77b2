"""Chunks evicted by next use: number in each moment, eviction order, and bytes on the link.

Distinguishing test: the number of chunks on the device in a moment is as large as the budget then allows, not
one number for the step; no eviction rule copies less and no chunk size wastes less (brute force); chunks
updated on the device are as many as fit the budget (brute force) and never cross the link; gradients are
offloaded from the chunks of their weights.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support.suites.block_offload_suite import OWN, LayersSuite, refusal, total
from support.suites.resident_chunks_suite import check_resident, split_block_bytes
from support.zoo_paths import ZOO

from memtune.api import apply
from memtune.errors import ApplyError, UsageError
from memtune.offload.chunks.chunk_planner import ChunkPlan
from memtune.offload.chunks.resident_chunks_planner import resident_counts, with_resident_first
from memtune.offload.core.parameter_layout import pack
from memtune.offload.parameters.parameter_offload_pass import (
    bytes_without_chunks,
    moment_of_ops,
    sizes_in_blocks,
)
from memtune.program.residency import cache_residency
from memtune.program.step import Kind, Phase, Resource, Tier
from memtune.runtime.transfer import COUNTERS
from memtune.search_spaces.offload.states._common.chunk_technique import (
    ChunksPlan,
    in_chunks,
    non_chunk_bytes,
)
from memtune.search_spaces.offload.states.patrickstar import PatrickStar
from memtune.testing import rewritten
from memtune.testing.drift_check import plain_program, planned, target_of
from memtune.testing.training import build, settings_of, train, train_under

DEFAULT = PatrickStar(kind="patrickstar")
SMALL = PatrickStar(kind="patrickstar", chunk_bytes=70_000)
BUDGET_BYTES, ROOMY_BYTES = 1_900_000, 3_000_000
PLAN: dict[str, Any] = {"chunk_bytes": 70_000, "slots": [20] * 8}


def with_budget(technique: PatrickStar) -> dict[str, Any]:
    """Return the plan under a budget below the plain gpt's peak."""
    return technique.plan(
        plain_program(ZOO["gpt"]), replace(target_of(technique), budget_bytes=BUDGET_BYTES)
    ).document()


class TestPatrickStar(LayersSuite):
    technique = PatrickStar
    models: ClassVar = {name: ZOO[name] for name in ("gpt", "tied")}
    variants = (DEFAULT, SMALL)
    quick = ("tied",)
    update = OWN

    def test_moments_hold_as_many_chunks_as_fit_the_budget(self) -> None:
        """The mechanism: the room in a moment is the budget less all other bytes then."""
        program, target = plain_program(ZOO["gpt"]), replace(target_of(SMALL), budget_bytes=BUDGET_BYTES)
        plan = SMALL.plan(program, target)
        step = SMALL.rewrite(program, plan, target).step
        there = np.zeros(8, np.int64)
        chunks = (step.storages.kind == Kind.COMMUNICATION) & (step.storages.tier == Tier.DEVICE)
        live = step.with_storages(tier=np.where(chunks, Tier.DEVICE, Tier.SSD).astype(np.uint8)).live_bytes()
        moment = moment_of_ops(step)
        np.maximum.at(there, moment[moment >= 0], live[moment >= 0])
        slots, other = np.asarray(plan.slots), np.asarray(bytes_without_chunks(step))
        assert len(set(plan.slots)) > 1
        assert (there <= 70_000 * slots).all()
        assert (
            there[3] == 70_000 * slots[3] < there[0] + 70_000 * slots[0]
        )  # between forward and backward activations take the room
        count = pack(*sizes_in_blocks(program.step), 70_000).count
        assert (slots == np.minimum((BUDGET_BYTES - other) // 70_000, count)).all()
        assert step.peak_bytes() <= BUDGET_BYTES < program.step.peak_bytes()

    def test_bytes_on_the_link_are_the_loads_of_furthest_next_use(self) -> None:
        """Bytes are loads times the chunk size, and no other rule has fewer."""
        program, plain = plain_program(ZOO["gpt"]), rewritten(ZOO["gpt"])
        plan = with_budget(SMALL)
        chunks, slots = pack(*sizes_in_blocks(plain), plan["chunk_bytes"]), tuple(plan["slots"])
        moves = {rule: cache_residency(chunks.uses(), slots, rule).moves for rule in ("belady", "lru", "lfu")}
        assert moves["belady"] == min(moves.values()) < 2 * chunks.count
        target = replace(target_of(SMALL), budget_bytes=BUDGET_BYTES)
        step = SMALL.rewrite(program, SMALL.plan(program, target), target).step
        outside = sum(int(plain.storages.bytes[p.storage]) for p in plain.parameters if p.block < 0)
        weights = sum(int(plain.storages.bytes[p.storage]) for p in plain.parameters)
        up = total(step, Resource.HOST_TO_DEVICE) - total(plain, Resource.HOST_TO_DEVICE)
        assert up == moves["belady"] * plan["chunk_bytes"] + outside
        assert total(step, Resource.DEVICE_TO_HOST) == weights

    def test_eviction_takes_the_furthest_next_use(self) -> None:
        """The mechanism. If room is short in backward only, the least recently used chunk is needed next."""
        program, plain = plain_program(ZOO["gpt"]), rewritten(ZOO["gpt"])
        chunks = pack(*sizes_in_blocks(plain), 70_000)
        slots = [chunks.count] * 8
        slots[5] = len({*chunks.of_block[1], *chunks.of_block[2]})  # while block 2 runs backward
        plan = ChunksPlan(chunk_bytes=70_000, slots=tuple(slots))
        moves, lru = (cache_residency(chunks.uses(), tuple(slots), rule).moves for rule in ("belady", "lru"))
        assert moves < lru
        step = SMALL.rewrite(program, plan, target_of(SMALL)).step
        outside = sum(int(plain.storages.bytes[p.storage]) for p in plain.parameters if p.block < 0)
        batch = total(plain, Resource.HOST_TO_DEVICE)
        assert total(step, Resource.HOST_TO_DEVICE) == batch + moves * 70_000 + outside
        workload, model, optimizer = build(ZOO["gpt"])
        document = {"settings": settings_of(SMALL), "plan": {"offload.states": plan.document()}}
        tuned = apply(model, optimizer, document, loss=workload.loss, strict=False)
        COUNTERS.take()
        tuned.step([workload.make_batch(2)])
        assert COUNTERS.take()["host_to_device"] == total(step, Resource.HOST_TO_DEVICE)

    def test_training_under_a_budget_is_bitwise_and_copies_the_planned_bytes(self) -> None:
        document = {"settings": settings_of(SMALL), "plan": {"offload.states": with_budget(SMALL)}}
        got, wanted = train_under(ZOO["gpt"], document), train(ZOO["gpt"], OWN)
        assert all(np.array_equal(one, other) for one, other in zip(got.losses, wanted.losses, strict=True))
        assert all(np.array_equal(got.weights[name], value) for name, value in wanted.weights.items())

    def test_chunks_that_fit_are_updated_on_the_device(self) -> None:
        """The mechanism (device-aware placement): the margin above all weights holds optimizer state, no
        chunk less.
        """
        program, target = plain_program(ZOO["gpt"]), replace(target_of(SMALL), budget_bytes=ROOMY_BYTES)
        plan = SMALL.plan(program, target)
        sizes = sizes_in_blocks(program.step)
        chunks = pack(*sizes, 70_000)
        all_slots = ChunkPlan(chunks, (chunks.count,) * 8)
        fitting = [
            kept
            for kept in range(chunks.count)
            if in_chunks(program, with_resident_first(*sizes, all_slots, kept), "belady").step.peak_bytes()
            <= ROOMY_BYTES
        ]
        assert fitting == list(range(max(fitting) + 1))
        assert 0 < max(fitting) < chunks.count - 1
        assert plan.resident_parameters == resident_counts(chunks)[max(fitting)]
        assert set(plan.slots) == {chunks.count - max(fitting)}
        on_host = SMALL.model_copy(update={"device_updates": False}).plan(program, target)
        assert "resident_parameters" not in on_host.document()
        step, plain = SMALL.rewrite(program, plan, target).step, program.step
        stay, rest, outside = split_block_bytes(plain, plan.resident_parameters)
        state = (step.storages.kind == Kind.OPTIMIZER) & (step.storages.tier == Tier.DEVICE)
        assert int(step.storages.bytes[state].sum()) == 2 * sum(stay) + 4 * len(
            stay
        )  # two moments and a counter each
        assert total(step, Resource.DEVICE_TO_HOST) == sum(rest) + outside
        up = total(step, Resource.HOST_TO_DEVICE) - total(plain, Resource.HOST_TO_DEVICE)
        assert up == (chunks.count - max(fitting)) * 70_000 + outside  # each of the others is loaded once
        check_resident(ZOO["gpt"], SMALL, plan, step)

    def test_gradients_are_offloaded_from_the_chunks_of_their_weights(self) -> None:
        """The mechanism (reuse of a chunk): autograd's tensor is freed when its gradient is in place, for the
        same bytes on links.
        """
        apart = DEFAULT.model_copy(update={"gradients": "separate"})
        step, other = rewritten(ZOO["tied"], DEFAULT), rewritten(ZOO["tied"], apart)
        assert step.peak_bytes() < other.peak_bytes()
        for link in (Resource.HOST_TO_DEVICE, Resource.DEVICE_TO_HOST):
            assert total(step, link) == total(other, link)
        found = []
        for each in (step, other):
            downs = (each.ops.resource == Resource.DEVICE_TO_HOST) & (each.ops.phase == Phase.BACKWARD)
            left = each.uses.storage[downs[each.uses.op]]
            found.append(set(each.storages.kind[left].tolist()))
            assert len(left) == 18  # three blocks of six parameters
        assert found == [{Kind.COMMUNICATION}, {Kind.TEMPORARY}]
        self.check_drift("tied", apart)

    def test_gradient_in_place_is_not_read_as_its_weight(self) -> None:
        """Also after a backward that raised while all chunks are resident."""
        workload, model, optimizer = build(ZOO["tied"])
        _, plans = planned(ZOO["tied"], DEFAULT)
        plan = plans["offload.states"].document()
        document = {
            "settings": settings_of(DEFAULT),
            "plan": {"offload.states": plan | {"slots": [9] * len(plan["slots"])}},
        }
        apply(model, optimizer, document, loss=workload.loss, strict=False)
        wanted = {name: value.clone() for name, value in model.state_dict().items()}

        def fail(*_: Any) -> None:
            raise InterruptedError

        hook = model.layers[0].norm.register_full_backward_hook(fail)  # type: ignore[index, union-attr]
        with pytest.raises(InterruptedError):
            workload.loss(model, workload.make_batch(2)).backward()
        hook.remove()
        for each in (model, copy.deepcopy(model)):
            assert all(torch.equal(wanted[name], value) for name, value in each.state_dict().items())
        workload.loss(model, workload.make_batch(2)).backward()

    def test_non_chunk_bytes_of_both_gradient_modes_follow_from_one_rewrite(self) -> None:
        program = plain_program(ZOO["tied"])
        chunks = pack(*sizes_in_blocks(program.step), 70_000)
        apart, in_place = (non_chunk_bytes(program, each) for each in (False, True))
        assert max(in_place) < max(apart)
        plan = ChunkPlan(chunks, (2,) * 6, in_place=True)
        assert bytes_without_chunks(in_chunks(program, plan, "belady").step) == in_place

    def test_all_updates_are_on_the_host_without_a_margin(self) -> None:
        assert "resident_parameters" not in with_budget(SMALL)

    @pytest.mark.parametrize(
        "plan", [{**PLAN, "chunk_bytes": 256}, {**PLAN, "slots": [9]}, {**PLAN, "resident_parameters": 99}]
    )
    def test_apply_refuses_a_plan_of_another_model(self, plan: dict[str, Any]) -> None:
        error = refusal(SMALL, plan)
        assert (type(error), error.code) == (ApplyError, "MT316")
        assert "needs a plan for this model" in str(error)

    @pytest.mark.parametrize(
        "plan",
        [
            {},
            {**PLAN, "resident_parameters": "two"},
            {**PLAN, "slots": []},
            {**PLAN, "slots": [0] * 8},
            {"slots": [20] * 8},
        ],
    )
    def test_apply_refuses_missing_and_malformed_plans(self, plan: dict[str, Any]) -> None:
        error = refusal(SMALL, plan)
        assert (error.code, error.exit_code) == ("MT316", UsageError.exit_code)
        assert "plan" in str(error)

    def test_fits_refuses_by_name(self) -> None:
        program = plain_program(ZOO["gpt"])
        tiny = PatrickStar(kind="patrickstar", chunk_bytes=1000)
        assert "parameter of 65536 bytes" in str(tiny.fits(program, target_of()))
        assert "whole on each" in str(DEFAULT.fits(program, replace(target_of(), ranks=2)))
        assert DEFAULT.fits(plain_program(ZOO["lora"]), target_of()) is None  # blocks alone are trained
