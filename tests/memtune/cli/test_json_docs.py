"""docs/json.md names every field that a program can meet at the top of a document, or in a row of one."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from memtune.autotune import outcome, planning
from memtune.executors.base import TrialResult

_SECTIONS = re.split(r"^## ", (Path(__file__).parents[3] / "docs" / "json.md").read_text(), flags=re.MULTILINE)


def documented(command: str) -> set[str]:
    """Names in the section of a command."""
    (text,) = (section for section in _SECTIONS if section.startswith(f"`memtune {command} MODEL"))
    return set(re.findall(r"`(\w+)`", text))


def planned() -> set[str]:
    report = planning.PlanReport({}, (), (), (), {}, {})
    return {*planning.Planned("", {}, "ok").to_dict(), *report.to_dict()} - {"schema"}


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("plan", planned()),
        ("trial", {name if name != "losses" else "loss" for name in TrialResult.model_fields}),
        ("search", {each.name for each in fields(outcome.SearchOutcome)} | outcome._SHOWN),
    ],
)
def test_every_field_is_documented(command: str, names: set[str]) -> None:
    assert names - documented(command) == set()
