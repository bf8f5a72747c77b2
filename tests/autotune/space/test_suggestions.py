"""Ways out where nothing fits: each of them does fit, the cheapest is first, and a larger limit is always
one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from fixed_cpu import CPU
from support.zoo_paths import ZOO

from memtune import hardware
from memtune.autotune.predict import Prediction
from memtune.autotune.space.candidates import Choice, Rewriter
from memtune.autotune.space.scoring import Scored, Scorer
from memtune.autotune.space.suggestions import (
    Remedy,
    _one_change,
    _wider,
    describe,
    improvements,
    more_memory,
    remedies,
    rounded_up,
)
from memtune.search_spaces.execution import Execution
from memtune.technique import Target
from memtune.testing.drift_check import recording_of
from memtune.units import parse_bytes


@pytest.fixture(scope="module")
def rewriter() -> Rewriter:
    return Rewriter(recording_of(ZOO["gpt"]), Target(hardware.find("h100-80g")))


def closest(rewriter: Rewriter, micro_batch: int) -> Scored:
    found = Scorer(rewriter).score(Choice.of(Execution(micro_batch=micro_batch), {}))
    assert isinstance(found, Scored)
    return found


def test_suggestions_fit_and_cheapest_is_first(rewriter: Rewriter) -> None:
    start = closest(rewriter, 8)
    budget = start.prediction.peak_allocated_bytes * 3 // 4
    found = remedies(Scorer(rewriter), start, budget)
    assert len(found) == 3
    assert all(each.peak_bytes <= budget for each in found[:-1])
    assert [each.slowdown for each in found[:-1]] == sorted(each.slowdown for each in found[:-1])
    assert found[-1].change.startswith("--max-memory")
    assert found[-1].peak_bytes == start.prediction.peak_allocated_bytes


def test_suggestions_combine_two_changes_if_needed(rewriter: Rewriter) -> None:
    start = closest(rewriter, 8)
    scorer = Scorer(rewriter)
    smallest = min(
        each.peak_bytes for each in (*_one_change(scorer, start), *_wider(scorer, start.choice, start, ""))
    )
    found = remedies(Scorer(rewriter), start, smallest - 1)
    assert len(found) > 1
    assert all(" and " in each.change and each.peak_bytes < smallest for each in found[:-1])


def test_suggestions_raise_limit_if_no_change_suffices(rewriter: Rewriter) -> None:
    assert len(remedies(Scorer(rewriter), closest(rewriter, 2), 1000)) == 1


def test_suggestions_never_exceed_device_memory() -> None:
    gpu = hardware.find("h100-80g")
    assert more_memory(gpu, 70 * 2**30) == "--max-memory 70GiB or a card with more memory"
    assert more_memory(gpu, 90 * 2**30) == "a card with 90GiB of memory"
    assert more_memory(CPU, 70 * 2**30) == "--max-memory 70GiB"  # no card on a CPU


@pytest.mark.parametrize(("gib", "suggested"), [(100, True), (400, False)])
def test_faster_setting_is_suggested_only_where_a_card_holds_it(
    monkeypatch: pytest.MonkeyPatch, rewriter: Rewriter, gib: int, suggested: bool
) -> None:
    """Before, a setting that needs more than any card has suggested `a card with 1523GiB of memory`."""
    best, scorer = closest(rewriter, 2), Scorer(replace_budget(rewriter, 70 * 2**30))
    faster = replace(closest(rewriter, 8), prediction=larger_and_faster(best, gib * 2**30))
    monkeypatch.setattr(Scorer, "refined", lambda self, each: each)
    changes = [each.change for each in improvements(scorer, best, [faster])]
    assert [each for each in changes if "a card with" in each] == (
        [f"a card with {gib}GiB of memory, then {faster.choice.sentence}"] if suggested else []
    )


def replace_budget(rewriter: Rewriter, budget_bytes: int) -> Rewriter:
    return Rewriter(rewriter.recording, replace(rewriter.target, budget_bytes=budget_bytes))


def larger_and_faster(than: Scored, peak_bytes: int) -> Prediction:
    now = than.prediction
    return replace(now, peak_allocated_bytes=peak_bytes, samples_per_s=2 * now.samples_per_s)


def test_suggested_limit_is_rounded_up() -> None:
    for n_bytes in (1, 2**20, 2**20 + 1, 7 * 2**30 + 5, 123_456_789):
        assert parse_bytes(rounded_up(n_bytes)) >= n_bytes


@pytest.mark.parametrize("name", ["h100-80g", "a100-80g"])
def test_suggested_limit_is_not_rounded_above_device_memory(name: str) -> None:
    gpu = hardware.find(name)
    for n_bytes in (
        gpu.memory_bytes,
        gpu.memory_bytes - 1,
        gpu.memory_bytes - 2**20,
        gpu.memory_bytes - 2**27,
    ):
        limit = more_memory(gpu, n_bytes).split()[1]
        assert n_bytes <= parse_bytes(limit) <= gpu.memory_bytes


def test_suggestion_fits_one_line() -> None:
    assert describe(Remedy("8 ranks", 2**20, 1.25)) == "8 ranks: 1.00 MiB, 1.2× the time per sample"
    assert describe(Remedy("8 ranks", 2**20, 1.0)) == "8 ranks: 1.00 MiB"
