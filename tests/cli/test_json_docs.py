"""docs/json.md names every command that prints a document, and every field at its top level or in a row of
one.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from support.memory_snapshots import record

from memtune import cli
from memtune.autotune.search import outcome, plan_report
from memtune.cli._app import app
from memtune.executors.base import TrialResult
from memtune.hardware.calibration_cache import Calibration

_DOCS = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
_PLACES = re.split(r"^(?:## |- )(?=`memtune )|^## ", _DOCS, flags=re.MULTILINE)


def documented(command: str) -> set[str]:
    """Return the names in the section of a command."""
    texts = [
        place for place in _PLACES if re.match(rf"`memtune {re.escape(command)}(?! --calibrate)\b", place)
    ]
    return set(re.findall(r"`(\w+)`", "".join(texts)))


def planned() -> set[str]:
    report = plan_report.PlanReport({})
    return {*plan_report.PlanRow("", {}, "ok").to_dict(), *report.to_dict()} - {"schema"}


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("plan", planned()),
        ("trial", {name if name != "losses" else "loss" for name in TrialResult.model_fields}),
        ("search", {each.name for each in fields(outcome.SearchOutcome)} | outcome._SHOWN),
        ("doctor --calibrate", {"device", *(each.name for each in fields(Calibration))} - {"schema"}),
    ],
)
def test_json_doc_has_every_field(command: str, names: set[str]) -> None:
    assert names - documented(command) == set()


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("techniques", []),
        ("techniques", ["--matrix"]),
        ("doctor", []),
        ("explain", ["c.yaml"]),
        ("clean", ["."]),
        ("config check", ["c.yaml"]),
        ("replay", ["snapshot.pickle"]),
    ],
)
def test_json_doc_has_every_printed_field(
    command: str,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("settings:\n  recompute: {kind: full}\n")
    Path("snapshot.pickle").write_bytes(pickle.dumps(record([(0, 0, 2**20, 0, 0, -1)], "")[0]))
    assert cli.run([*command.split(), *arguments, "--json"]) == 0
    assert names(json.loads(capsys.readouterr().out)) - {"schema"} - documented(command) == set()


def names(document: Any) -> set[str]:
    """Return the fields at the top of a document, and in the rows of its lists."""
    if isinstance(document, list):
        return {name for row in document if isinstance(row, dict) for name in row}
    return set(document) | {
        name for value in document.values() if isinstance(value, list) for name in names(value)
    }


def with_json(command: Any, path: str = "") -> Iterator[str]:
    """Return the commands below this one that take `--json`."""
    for name, each in getattr(command, "commands", {}).items():
        yield from with_json(each, f"{path} {name}".strip())
    if any("--json" in getattr(each, "opts", ()) for each in command.params):
        yield path


def test_json_doc_has_every_command() -> None:
    commands = list(with_json(typer.main.get_command(app)))
    assert {"search", "doctor", "config check"} <= set(commands)
    assert [command for command in commands if not documented(command)] == []
