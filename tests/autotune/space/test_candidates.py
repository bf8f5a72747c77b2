from __future__ import annotations

import pickle
import random
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from support.search.prepared_search import recording, rewriter

from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.autotune.space.scoring import Scorer
from memtune.autotune.space.search_space import build_space
from memtune.program.edit import accumulate_gradients
from memtune.program.step import Program
from memtune.search_spaces import find
from memtune.search_spaces.execution import Execution
from memtune.technique import Exactness, Plan, Reason, Target, Technique

PLAIN = Execution(micro_batch=8)


def choice(execution: Execution = PLAIN, **kinds: Technique) -> Choice:
    return Choice.of(execution, {each.slot: each for each in kinds.values()})


def technique(slot: str, kind: str, **knobs: Any) -> Technique:
    return find(slot, kind)(kind=kind, **knobs)


FULL = technique("recompute", "full")
MOVE = technique("offload.activations", "copy_out")
HOST = technique("offload.states", "optimizer_cpu")


def test_rewriter_rewrites_common_prefix_once():
    made = rewriter()
    first = made.candidate(choice(a=FULL, b=MOVE))
    passes = made.n_passes
    second = made.candidate(choice(a=FULL, b=MOVE, c=HOST))
    assert isinstance(first, Candidate)
    assert isinstance(second, Candidate)
    assert made.n_passes - passes <= 2  # HOST, and the null allocator behind it
    assert made.candidate(choice(a=FULL, b=MOVE)).program is first.program  # type: ignore[union-attr]


def test_rewriter_cached_prefix_equals_fresh_one():
    made = rewriter()
    for each in (choice(a=FULL), choice(a=FULL, b=MOVE), choice(a=FULL, b=MOVE, c=HOST)):
        made.candidate(each)
    fresh = rewriter().program(choice(a=FULL, b=MOVE, c=HOST))
    kept = made.program(choice(a=FULL, b=MOVE, c=HOST))
    assert isinstance(fresh, Program)
    assert isinstance(kept, Program)
    np.testing.assert_array_equal(fresh.step.live_bytes(), kept.step.live_bytes())


def test_rewriter_programs_are_equal_after_cache_is_cleared():
    made = rewriter()
    before = made.program(choice(a=FULL))
    made.forget()
    after = made.program(choice(a=FULL))
    assert isinstance(before, Program)
    assert isinstance(after, Program)
    assert before is not after
    np.testing.assert_array_equal(before.step.live_bytes(), after.step.live_bytes())


@pytest.mark.parametrize("slots", [("recompute", "offload.activations"), ("recompute", "offload.states")])
def test_scores_are_equal_in_drawn_order(slots: tuple[str, ...]):
    made = rewriter(budget_bytes=5 * 2**20)
    space = build_space(made, 8, axes=("execution", *slots))
    draw, choices = random.Random(0), list(space)
    drawn = draw.sample(choices, min(len(choices), 60))

    def scored(order: list[Choice]) -> dict[Choice, object]:
        # Solvers remember solutions by the step itself, so a copy of it begins without any.
        scorer = Scorer(Rewriter(pickle.loads(pickle.dumps(recording())), made.target))
        found = ((each, scorer.score(each)) for each in order)
        return {each: str(score) if isinstance(score, Reason) else score for each, score in found}

    assert scored(drawn) == scored(draw.sample(drawn, len(drawn)))


class Nosy(Technique):
    """Refuses when another slot, which comes later in pass order, holds anything."""

    kind: Literal["nosy"] = "nosy"
    slot: ClassVar[str] = "recompute"
    title: ClassVar[str] = "nosy"
    source: ClassVar[str] = "test"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    def fits(self, program: Program, target: Target) -> Reason | None:
        return Reason("there is an offload") if "offload.states" in target.chosen else None

    def record(self, target: Target) -> dict[str, Any]:
        return {"nosy": "offload.states" in target.chosen}


def test_rewriter_cache_key_includes_observed_slots():
    made, nosy = rewriter(), Nosy(kind="nosy")
    assert isinstance(made.candidate(choice(a=nosy)), Candidate)
    assert isinstance(made.candidate(choice(a=nosy, c=HOST)), Reason)
    assert isinstance(made.candidate(choice(a=nosy, b=MOVE)), Candidate)
    assert "/nosy=false" in made.key(choice(a=nosy))
    assert "/nosy=true" in made.key(choice(a=nosy, c=HOST))


class Slow(Nosy):
    """Solves for a plan where no other slot holds anything."""

    def fits(self, program: Program, target: Target) -> Reason | None:
        if super().fits(program, target) is None:
            raise AssertionError("solved for nothing")
        return None


def test_rewriter_does_not_cache_refusals_that_depend_on_other_slots():
    made = rewriter()
    assert made.refusal(Slow(), PLAIN) is None
    assert "offload" in str(made.program(choice(a=Nosy(), b=HOST)))
    own = find("sharding.states", "fsdp")(kind="fsdp")
    assert "only one rank" in str(made.refusal(own, PLAIN))


class Solving(Nosy):
    """Solves for a plan whatever other slots hold."""

    def fits(self, program: Program, target: Target) -> Reason | None:
        raise AssertionError("solved for nothing")


@pytest.mark.parametrize(
    "offload", ["stronghold", "l2l", "angel_ptm", "patrickstar", "elixir", "zero_infinity"]
)
def test_rewriter_asks_refuses_of_all_slots_before_plans_are_solved(offload: str):
    ranks = Rewriter(recording(), Target(rewriter().target.hardware, 4))
    states = technique("sharding.states", "fsdp", reshard_after_forward=False)
    knobs = {"parameters": "host"} if offload == "zero_infinity" else {}
    moved = technique("offload.states", offload, **knobs)
    assert "default gathers" in str(ranks.program(choice(a=Solving(), b=states, c=moved)))
    with pytest.raises(AssertionError):
        ranks.program(choice(a=Solving(), b=technique("sharding.states", "fsdp"), c=moved))


def test_rewriter_checks_state_sharding_on_model_parts():
    """Parts share micro-batches, so that a step of one has sums to divide; of copies there are fewer than
    ranks.
    """
    whole = Rewriter(recording(), Target(rewriter().target.hardware, 4))
    parts = Rewriter(
        recording(), Target(rewriter().target.hardware, 4, sharded=lambda *_: Reason("nothing is cut"))
    )
    zero2 = find("sharding.states", "zero2")(kind="zero2")
    assert "no sums to shard" in str(whole.refusal(zero2, PLAIN))
    assert parts.refusal(zero2, PLAIN) is None


def test_choices_with_equal_records_share_key():
    made = rewriter()
    assert made.key(choice(a=FULL)) == made.key(choice(a=technique("recompute", "every_nth", n=1)))
    assert made.key(choice(a=FULL)) != made.key(choice(a=technique("recompute", "every_nth", n=2)))
    assert made.key(choice()) != made.key(choice(Execution(micro_batch=4, accumulate=2)))


def test_allocator_knobs_change_key_but_not_program():
    made = rewriter()
    tuned = choice(d=technique("allocator", "native", max_split_size_mb=128))
    assert made.key(choice()) != made.key(tuned)
    assert made.program(choice()) is made.program(tuned)


def test_rewriter_accumulation_uses_step_of_later_micro_batch():
    program = rewriter().program(choice(Execution(micro_batch=4, accumulate=2)))
    assert isinstance(program, Program)
    assert (program.micro_batch, program.accumulate) == (4, 2)
    assert program.step.peak_bytes() == accumulate_gradients(recording().at(4)).peak_bytes()


def test_rewriter_returns_reason_for_unfit_choice():
    assert isinstance(rewriter().candidate(choice(a=technique("recompute", "every_nth", n=4))), Reason)
    assert isinstance(rewriter().candidate(choice(Execution())), Reason)


def test_rewriter_raises_on_broken_rewrite():
    class Broken(Nosy):
        kind: Literal["broken"] = "broken"  # type: ignore[assignment]

        def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
            step = program.step
            return program.with_step(step.with_uses(storage=step.uses.storage + step.storages.n))

    with pytest.raises((ValueError, TypeError)):
        rewriter().candidate(choice(a=Broken(kind="broken")))


def test_choice_round_trips_through_plain_data():
    made = choice(
        Execution(micro_batch=4, accumulate=2), a=technique("recompute", "every_nth", n=3), b=MOVE, c=HOST
    )
    assert Choice.from_document(made.dump()) == made
    assert made.dump()["offload"] == {
        "states": {"kind": "optimizer_cpu"},
        "activations": {"kind": "copy_out"},
    }


def test_choice_complexity_orders_by_slots_then_knobs():
    plain, one = choice(), choice(a=technique("recompute", "every_nth"))
    knob, two = choice(a=technique("recompute", "every_nth", n=3)), choice(a=FULL, b=MOVE)
    assert sorted([two, knob, one, plain], key=lambda each: each.complexity) == [plain, one, knob, two]


def test_equal_techniques_share_pass_and_prediction():
    made = rewriter(ranks=2)
    scorer = Scorer(made)
    left_out, given, kept = (
        technique("sharding.states", "fsdp", **knobs)
        for knobs in ({}, {"degree": 2}, {"reshard_after_forward": False})
    )
    first = made.program(choice(a=left_out))
    passes = made.n_passes
    assert made.program(choice(a=given)) is first
    assert made.n_passes == passes
    assert made.program(choice(a=kept)) is not first
    scored = [scorer.score(choice(a=each)) for each in (left_out, kept, given)]
    assert scored[2].prediction is scored[0].prediction  # type: ignore[union-attr]
    assert scored[1].prediction is not scored[0].prediction  # type: ignore[union-attr]
    refused = made.program(choice(a=technique("sharding.states", "fsdp", degree=2, blocks_per_unit=99)))
    assert isinstance(refused, Reason)


def test_equal_technique_objects_share_cache():
    made = rewriter()
    first = made.program(choice(a=FULL))
    for _ in range(3):  # short-lived objects whose addresses are reused
        assert made.program(choice(a=technique("recompute", "full"))) is first
        assert made.program(choice(a=technique("recompute", "selective"))) is not first
