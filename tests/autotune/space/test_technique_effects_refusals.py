"""Techniques found responsible for refusals of the live model."""

from __future__ import annotations

from memtune.autotune.space.technique_effects import Kinds, refusing_techniques


def trial(*names: str) -> Kinds:
    return frozenset(("slot", name) for name in names)


def test_what_all_have_in_common_and_nothing_that_works_has() -> None:
    assert refusing_techniques([trial("a", "x")], []) == []
    assert refusing_techniques([trial("a", "x"), trial("a", "y")], [trial("x"), trial("y")]) == [trial("a")]
    assert refusing_techniques([trial("a", "b", "x"), trial("a", "b", "y")], [trial("b")]) == [
        trial("a", "b")
    ]  # a alone has not been seen
    assert refusing_techniques([trial("a", "x"), trial("a", "y")], [trial("a", "z")]) == []
    assert refusing_techniques([trial("a"), trial("b")], []) == []


def test_more_trials_make_it_more_general() -> None:
    assert refusing_techniques([trial("a", "b", "x"), trial("a", "b", "y"), trial("a", "x")], []) == [
        trial("a")
    ]


def test_one_refusal_of_several_techniques() -> None:
    """Nothing is common to all of them."""
    assert refusing_techniques([trial("a", "x"), trial("a", "y"), trial("b", "z"), trial("b", "y")], []) == [
        trial("a"),
        trial("b"),
    ]


def test_what_stands_beside_two_culprits_is_cleared_by_more_trials_of_them() -> None:
    seen = [trial("a", "x"), trial("b", "x")]
    assert refusing_techniques(seen, []) == [trial("x")]
    assert refusing_techniques([*seen, trial("a", "y"), trial("b", "z"), trial("a", "w")], []) == [
        trial("a"),
        trial("b"),
    ]


def test_a_trial_that_is_explained_is_no_proof_against_another_technique() -> None:
    assert refusing_techniques([trial("a", "x"), trial("a", "y"), trial("b", "x")], []) == [trial("a")]
