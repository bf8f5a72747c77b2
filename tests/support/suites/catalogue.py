"""The suites of all techniques, by the file of their tests."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from memtune.testing import TechniqueSuite

TESTS = Path(__file__).parents[2]
_SUITE = re.compile(r"^class Test\w+\(\w*Suite\):", re.MULTILINE)


def suite_files() -> list[str]:
    """Return the files in `tests/search_spaces` that have a suite, without loading them."""
    files = sorted(TESTS.glob("search_spaces/**/test_*.py"))
    return [str(each.relative_to(TESTS)) for each in files if _SUITE.search(each.read_text())]


def suites_in(file: str) -> list[TechniqueSuite]:
    """Return the suites of a file."""
    spec = importlib.util.spec_from_file_location(f"suites_of_{Path(file).stem}", TESTS / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    classes = [each for each in vars(module).values() if isinstance(each, type)]
    mine = [each for each in classes if each.__module__ == module.__name__]
    return [each() for each in mine if issubclass(each, TechniqueSuite)]
