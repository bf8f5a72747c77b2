"""Promises of SECURITY.md that no other test covers, and that each promise has a test."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest

from memtune.autotune.search.search_events import EventLog
from memtune.errors import EnvironmentFault
from memtune.ssd.last_step import Manifest

ROOT = Path(__file__).parents[1]
OWN_PROCESSES = {
    "memtune/interactive/objects.py": "the user's own objects, stored for trials in a private folder",
    "autotune/predict/parallel_map.py": "pipes between this process and its children",
}
"""Files that unpickle what the same user's processes wrote."""
READERS = {("pickle", "load"), ("pickle", "loads"), ("pickle", "Unpickler"), ("yaml", "load")}


def sources() -> list[Path]:
    folders = ("memtune", "autotune", "executors", "search_spaces")
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def unpickles(path: Path) -> list[int]:
    """Return the lines of `path` that unpickle, or call torch.load other than for weights only."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if not isinstance(node.func.value, ast.Name):
            continue
        called = node.func.value.id, node.func.attr
        safe = any(
            each.arg == "weights_only" and isinstance(each.value, ast.Constant) and each.value.value is True
            for each in node.keywords
        )
        if called in READERS or (called == ("torch", "load") and not safe):
            found.append(node.lineno)
    return found


def test_files_are_never_unpickled() -> None:
    found = {str(path.relative_to(ROOT)): lines for path in sources() if (lines := unpickles(path))}
    assert found.keys() == OWN_PROCESSES.keys(), found


def test_ray_starts_without_a_dashboard() -> None:
    starts = [
        node
        for node in ast.walk(ast.parse((ROOT / "executors/ray/cluster.py").read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "ray.init"
    ]
    assert len(starts) == 1
    options = {each.arg: ast.unparse(each.value) for each in starts[0].keywords}
    assert options["include_dashboard"] == "False"
    assert options["address"] == "'local'"


@pytest.mark.parametrize("writer", ["event log", "manifest"])
def test_planted_links_are_not_followed(tmp_path: Path, writer: str) -> None:
    (victim := tmp_path / "victim").write_text("")
    (folder := tmp_path / "folder").mkdir()
    if writer == "event log":
        (folder / "events.jsonl").symlink_to(victim)
        with pytest.raises(EnvironmentFault, match="MT403"):
            EventLog(folder / "events.jsonl")
    else:
        manifest = Manifest("key" * 20, 3, [], [])
        manifest.write(folder)
        (written,) = folder.iterdir()
        os.symlink(victim, folder / f".new-{written.name}")
        manifest.write(folder)
        assert Manifest.read(written) is not None
    assert victim.read_text() == ""


def test_promises_name_tests() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", text)
    assert len(named) == sum(line.startswith("| ") for line in text.split("## Promises")[1].splitlines()) - 1
    for file, test in named:
        assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{test}"
