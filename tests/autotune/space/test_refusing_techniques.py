"""Techniques found responsible for refusals of the live model."""

from __future__ import annotations

from memtune.autotune.space.pruning import Kinds, refusing_techniques


def trial(*names: str) -> Kinds:
    return frozenset(("slot", name) for name in names)


def test_refusal_culprit_is_common_to_refused_and_absent_from_working() -> None:
    assert refusing_techniques([trial("a", "x")], []) == []
    assert refusing_techniques([trial("a", "x"), trial("a", "y")], [trial("x"), trial("y")]) == [trial("a")]
    assert refusing_techniques([trial("a", "b", "x"), trial("a", "b", "y")], [trial("b")]) == [
        trial("a", "b")
    ]  # a alone has not been seen
    assert refusing_techniques([trial("a", "x"), trial("a", "y")], [trial("a", "z")]) == []
    assert refusing_techniques([trial("a"), trial("b")], []) == []


def test_refusal_culprit_generalizes_with_trials() -> None:
    assert refusing_techniques([trial("a", "b", "x"), trial("a", "b", "y"), trial("a", "x")], []) == [
        trial("a")
    ]


def test_single_refusal_blames_combination() -> None:
    """Nothing is common to all of them."""
    assert refusing_techniques([trial("a", "x"), trial("a", "y"), trial("b", "z"), trial("b", "y")], []) == [
        trial("a"),
        trial("b"),
    ]


def test_techniques_next_to_two_culprits_are_cleared_by_more_trials() -> None:
    seen = [trial("a", "x"), trial("b", "x")]
    assert refusing_techniques(seen, []) == [trial("x")]
    assert refusing_techniques([*seen, trial("a", "y"), trial("b", "z"), trial("a", "w")], []) == [
        trial("a"),
        trial("b"),
    ]


def test_explained_refusal_does_not_blame_another_technique() -> None:
    assert refusing_techniques([trial("a", "x"), trial("a", "y"), trial("b", "x")], []) == [trial("a")]
