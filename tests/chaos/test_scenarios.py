"""Each row of the page of faults and promises names tests that exist, or says why it has none."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_rows_of_reliability_page_name_existing_tests() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\| (.*) \|$", (ROOT / "docs/reliability.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 53))
    for number, cell in rows:
        tests = re.findall(r"\[(\w+)\]\(\.\./(tests/[\w/]+\.py)\)", cell)
        assert cell.count("](") == len(tests), number
        assert tests or re.fullmatch(r"none: .+", cell), number
        for test, file in tests:
            text = (ROOT / file).read_text()
            assert re.search(rf"^def {test}\(", text, re.MULTILINE), f"{file}::{test}"
