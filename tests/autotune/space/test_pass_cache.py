"""The program cache evicts the least recently used leaves first and keeps nodes in use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.search.prepared_search import rewriter

from memtune.autotune.space import pass_cache
from memtune.autotune.space.candidates import Candidate, Choice
from memtune.program.step import Program
from memtune.search_spaces import find
from memtune.search_spaces.execution import Execution
from memtune.search_spaces.offload.states.optimizer_cpu import OptimizerCpu
from memtune.search_spaces.recompute.planned import Planned
from memtune.technique import Technique

SIZES = range(1, 9)


def choice(size: int, *slots: str) -> Choice:
    kinds = {"recompute": "full", "offload.activations": "copy_out", "offload.states": "optimizer_cpu"}
    held: dict[str, Technique] = {slot: find(slot, kinds[slot])(kind=kinds[slot]) for slot in slots}
    return Choice.of(Execution(micro_batch=size), held)


def test_pass_cache_evicts_used_prefix_last(monkeypatch: pytest.MonkeyPatch) -> None:
    made = rewriter()
    program = made.program(choice(1, "recompute"))
    assert isinstance(program, Program)
    monkeypatch.setattr(pass_cache, "MAX_ROWS", 16 * program.step.ops.n)  # eight sizes make more than that
    before = []
    for size in SIZES:
        before.append(made.program(choice(size, "recompute", "offload.states")))
        assert made.program(choice(1, "recompute")) is program  # used all the time
    passes = made.n_passes
    again = [made.program(choice(size, "recompute", "offload.states")) for size in SIZES]
    assert made.n_passes > passes, "nothing was forgotten"
    for one, other in zip(before, again, strict=True):
        assert isinstance(one, Program)
        assert isinstance(other, Program)
        np.testing.assert_array_equal(one.step.live_bytes(), other.step.live_bytes())
    held = sum(node.n_rows for node in made._memory._held())
    assert held == made._memory._n_rows <= 18 * program.step.ops.n  # one path may come on top


def test_pass_cache_does_not_keep_path_over_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_cache, "MAX_ROWS", 1)
    made = rewriter()
    first = made.program(choice(2, "recompute", "offload.states"))
    second = made.program(choice(2, "recompute", "offload.states"))
    assert isinstance(first, Program)
    assert isinstance(second, Program)
    assert first is not second
    np.testing.assert_array_equal(first.step.live_bytes(), second.step.live_bytes())


def test_pass_cache_keeps_plans_and_verdicts_of_evicted_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for verb in ("fits", "plan"):
        monkeypatch.setattr(Planned, verb, _noting(asked, getattr(Planned, verb)))
    monkeypatch.setattr(pass_cache, "MAX_ROWS", 1)
    made, given = rewriter(), Choice.of(Execution(micro_batch=2), {"recompute": Planned(share=0.5)})
    first, second = made.candidate(given), made.candidate(given)
    assert isinstance(first, Candidate)
    assert isinstance(second, Candidate)
    assert first.program is not second.program
    assert first.plans == second.plans
    np.testing.assert_array_equal(first.program.step.live_bytes(), second.program.step.live_bytes())
    assert asked == ["fits", "plan"]


def _noting(asked: list[str], verb: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any) -> Any:
        asked.append(verb.__name__)
        return verb(*args)

    return noted


def test_node_after_a_slot_is_that_of_an_equal_program() -> None:
    program = rewriter().program(choice(2))
    assert isinstance(program, Program)
    there = pass_cache.Node(program)
    before = pass_cache.Node(program, made={("recompute", "record"): [pass_cache.Pass({}, there)]})
    assert before.after("recompute", replace(program)) is there
    assert before.after("split", program) is None
    assert before.after("recompute", replace(program, notes=("other",))) is None
    assert before.after("recompute", program.with_step(replace(program.step))) is None


def test_pass_cache_shares_suffix_of_equal_programs_with_own_plans() -> None:
    made, on_host = rewriter(), OptimizerCpu()

    def candidate(**knobs: Any) -> Candidate:
        held = {"recompute": Planned(**knobs), "offload.states": on_host}
        found = made.candidate(Choice.of(Execution(micro_batch=2), held))
        assert isinstance(found, Candidate), found
        return found

    budget_bytes = candidate(share=0.5).plans["recompute"].budget_bytes
    programs = []
    for more in (1, 2):
        passes = made.n_passes
        one = candidate(budget_bytes=budget_bytes + more, headroom=0.0)
        assert one.plans["recompute"].budget_bytes == budget_bytes + more
        assert made.n_passes == passes + 1, "the optimizer's pass was run again"
        programs.append(one.program)
    assert programs[0] is programs[1]
