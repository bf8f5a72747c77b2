"""The page of faults and promises is current, and each test that it names exists."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

HERE = Path(__file__).parent
spec = importlib.util.spec_from_file_location("scenarios", HERE / "scenarios.py")
assert spec is not None
assert spec.loader is not None
scenarios = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scenarios)


def test_page_of_reliability_is_current() -> None:
    assert scenarios.PAGE.read_text() == scenarios.page()


def test_scenarios_name_existing_tests() -> None:
    assert [each.number for each in scenarios.SCENARIOS] == list(range(1, 53))
    for each in scenarios.SCENARIOS:
        assert each.tests or each.untested, each
        for file, test in each.tests:
            text = (HERE.parent / file).read_text()
            assert re.search(rf"^def {test}\(", text, re.MULTILINE), f"{file}::{test}"
