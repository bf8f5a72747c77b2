"""Origin of an error."""

from __future__ import annotations

import pytest

from memtune.config.tuned_config import load_config
from memtune.errors import MemtuneError, raised_at


def place_of(document: object) -> str:
    with pytest.raises(MemtuneError) as caught:
        load_config(document)  # type: ignore[arg-type]
    return raised_at(caught.value)


def test_raised_at_is_equal_for_one_rule() -> None:
    first, second = place_of({"memtune": 98}), place_of({"memtune": 99})
    assert first == second
    assert first.startswith("memtune.config.tuned_config:")
    assert place_of({"memtune": 1, "setings": {}}) != first


def test_raised_at_is_empty_for_other_errors() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        1 / 0  # noqa: B018
    assert raised_at(caught.value) == ""
