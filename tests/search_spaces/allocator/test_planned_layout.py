"""Training at planned offsets: the plain model's bits, also if steps differ from the plan."""

from __future__ import annotations

import pytest
import torch
from support.suites.arena_suite import ArenaSuite, trained
from support.zoo_paths import ZOO

from memtune.api import apply
from memtune.memory import arena
from memtune.search_spaces.allocator.planned_layout import PlannedLayout
from memtune.testing.training import build, one_step, settings_of

pytestmark = pytest.mark.native_ledger


class TestPlannedLayout(ArenaSuite):
    technique = PlannedLayout

    def test_requests_of_equal_steps_are_served_by_plan(self) -> None:
        _, messages = trained([4] * 8, PlannedLayout())
        found = arena.statistics()
        assert found.plans == 1
        assert found.plan_requests > 200
        assert found.plan_served >= 4 * found.plan_requests * 0.95
        assert found.plan_bytes <= 1.01 * found.plan_bound_bytes
        assert not messages

    def test_reserved_memory_is_the_plan_and_the_optimizers_state(self) -> None:
        workload, model, optimizer = build(ZOO["gpt"])
        tuned = apply(model, optimizer, {"settings": settings_of(PlannedLayout())}, strict=False)
        for step in range(5):
            one_step(workload, model, optimizer, tuned, seed=step, micro_batches=1, size=16)
        state = sum(each.nbytes for held in optimizer.state.values() for each in held.values())
        found = arena.statistics()
        page = 2 << 20  # the plan and the state end in one each
        assert found.plans == 1
        assert found.reserved_bytes <= found.plan_bytes + state + 2 * page

    def test_steps_of_other_sizes_are_served_bit_for_bit_with_one_message(self) -> None:
        sizes = [4, 4, 4, 4, 6, 4, 3, 4, 4, 8, 2, 4, 4]
        got, messages = trained(sizes, PlannedLayout(replan_after=10_000))
        wanted, _ = trained(sizes, None)
        assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
        assert arena.statistics().deviations > 50
        assert arena.statistics().plans == 1
        assert len(messages) == 1
        assert "other memory than planned (request" in messages[0]

    def test_arena_plans_another_step_after_enough_deviations(self) -> None:
        got, messages = trained([4] * 4 + [7] * 8, PlannedLayout(replan_after=20))
        wanted, _ = trained([4] * 4 + [7] * 8, None)
        assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
        assert arena.statistics().plans >= 2
        assert len(messages) == 1

    def test_request_larger_than_arena_is_served_outside_it(self) -> None:
        """One tensor larger than everything planned keeps its values, and later steps are served by plan as
        before.
        """
        workload, model, optimizer = build(ZOO["tied"])
        tuned = apply(model, optimizer, {"settings": settings_of(PlannedLayout())}, strict=False)
        for step in range(4):
            one_step(workload, model, optimizer, tuned, seed=step, micro_batches=1)
        planned = arena.statistics()
        large = torch.arange(planned.plan_bytes // 4 + 1024, dtype=torch.int32)
        assert large.nbytes > planned.plan_bytes > 0
        served = arena.statistics().plan_served
        with pytest.warns(RuntimeWarning, match="other memory than planned"):
            one_step(workload, model, optimizer, tuned, seed=4, micro_batches=1)
        after = arena.statistics()
        assert after.deviations > planned.deviations
        assert after.plan_served - served >= 0.9 * after.plan_requests
        assert after.plans == 1
        assert torch.equal(large, torch.arange(len(large), dtype=torch.int32))
