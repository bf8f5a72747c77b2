"""Benchmarks import only names that memtune has, so that a rename cannot break a script that no test runs."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "benchmarks").rglob("*.py"))


def missing_names(source: str) -> list[str]:
    """Return the names that `from memtune… import` statements of this source ask for in vain."""
    missing = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "memtune":
            module = import_module(node.module)
            missing += [
                f"{node.module}.{each.name}"
                for each in node.names
                if not hasattr(module, each.name) and find_spec(f"{node.module}.{each.name}") is None
            ]
    return missing


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_benchmark_imports_existing_names(script: Path) -> None:
    assert not missing_names(script.read_text())


def test_removed_names_are_reported() -> None:
    source = "from memtune.config import load_config, removed_name\nimport torch"
    assert missing_names(source) == ["memtune.config.removed_name"]
