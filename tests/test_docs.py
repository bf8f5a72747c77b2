"""Tables in docs/techniques.md and docs/compile.md name the registered techniques with their own facts."""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path

import pytest

from memtune.search_spaces import NULL_KINDS, SLOTS, find, kinds, knob_texts

ROOT = Path(__file__).parents[1]
KINDS = {slot: set(kinds(slot)) for slot in SLOTS}
BACKENDS = {"aot_eager"}
"""Other entries of the table that look like kinds."""


def rows(document: str) -> list[tuple[str, str]]:
    """Return first and second cell of every row of every table."""
    lines = (ROOT / document).read_text().splitlines()
    return [
        (cells[0].strip(), cells[1].strip()) for line in lines if len(cells := line.strip("|").split("|")) > 1
    ]


def quoted(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


def test_catalogue_names_exactly_the_techniques() -> None:
    table = dict(rows("docs/techniques.md"))
    assert {slot: KINDS[slot] - quoted(table[slot]) for slot in SLOTS} == {slot: set() for slot in SLOTS}
    known = set().union(*KINDS.values()) | BACKENDS
    assert {slot: quoted(table[slot]) - known for slot in SLOTS} == {slot: set() for slot in SLOTS}


def test_knobs_have_texts() -> None:
    silent = [
        (slot, kind, knob)
        for slot in SLOTS
        for kind in KINDS[slot]
        for knob in set(find(slot, kind).model_fields) - {"kind"}
        if not knob_texts(slot, kind).get(knob)
    ]
    assert silent == []


def test_compile_table_equals_the_techniques_effects() -> None:
    eager = {
        (slot, kind): bool(find(slot, kind)(kind=kind).effects.eager_only)
        for slot in SLOTS
        for kind in KINDS[slot]
    }
    said = {}
    for technique, scope in rows("docs/compile.md"):
        slot = technique.replace(",", " ").split()[0] if technique else ""
        if slot in KINDS:
            named = quoted(technique) or KINDS[slot] - {NULL_KINDS[slot]}
            said |= {(slot, kind): scope == "no" for kind in named}
    assert {key: no for key, no in said.items() if eager[key] is not no} == {}
    in_text = {"sharding.communication", "execution.order"}  # the text below the table has them
    assert {(slot, kind) for slot, kind in eager if slot not in in_text and kind != NULL_KINDS[slot]} <= set(
        said
    )


def test_planning_times_are_the_measured_ones() -> None:
    results = json.loads((ROOT / "benchmarks/results/plan-speed.json").read_text())
    took = {row["case"]: f"{row['wall_s']:.0f} s" for row in results["rows"]}
    many, one, largest = (took[case] for case in ("7b", "7b-one-gpu", "405b"))
    readme, index = (" ".join((ROOT / page).read_text().split()) for page in ("README.md", "docs/index.md"))
    assert f"took {many} for 7B parameters on 64 GPUs, {one} on one, and {largest}" in readme
    assert f"took {one} for 7B parameters on one GPU and {many} on 64" in index
    table = dict(rows("docs/measurements.md"))
    names = ("7B on 64 GPUs", "7B on one GPU", "405B-shaped on 16,384 GPUs")
    assert [table[name] for name in names] == [f"{row['wall_s']:.1f} s" for row in results["rows"][:3]]


def test_systems_page_names_every_technique_and_existing_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "hooks")
    import systems

    named = {name for each in systems.entries() for name in each["techniques"]}
    known = {f"{slot}/{kind}" for slot in SLOTS for kind in KINDS[slot]}
    assert named - known == set()
    assert known - named <= {f"{slot}/{kind}" for slot, kind in NULL_KINDS.items()}
    tests = [test.split("::") for each in systems.entries() for test in each["tests"]]
    files = {file: (ROOT / "tests" / file).read_text() for file, _ in tests}
    assert [test for test in tests if f"def {test[1]}(" not in files[test[0]]] == []
    assert systems.PAGE.read_text() == "\n".join(systems.page()) + "\n", "run  python docs/hooks/systems.py"


def test_architecture_lists_the_decisions() -> None:
    listed = re.findall(r"\]\(decisions/([\w-]+\.md)\)", (ROOT / "docs" / "architecture.md").read_text())
    assert listed == sorted(path.name for path in (ROOT / "docs" / "decisions").glob("*.md"))


PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))


@pytest.mark.parametrize("page", PAGES, ids=lambda each: each.name)
def test_imports_in_documents_resolve(page: Path) -> None:
    text, missing = page.read_text(encoding="utf-8"), []
    of_page = {f"memtune.{each[:-3].replace('/', '.')}" for each in re.findall(r'title="([\w/]+\.py)"', text)}
    for block in re.findall(r"^```python.*?\n(.*?)^```", text, re.M | re.S):
        for statement in ast.walk(ast.parse(block)):
            if not isinstance(statement, ast.ImportFrom) or statement.module in of_page:
                continue
            if (statement.module or "").startswith("memtune"):
                found = importlib.import_module(statement.module or "")
                missing += [each.name for each in statement.names if not hasattr(found, each.name)]
    assert missing == []
