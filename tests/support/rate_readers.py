"""Find the test files that can depend on the speed of the CPU: their tests read one of its rates, in this
process or in a rank, or start a process of another kind. `pytest --rate-readers` runs them alone.

Every run keeps what it has found in pytest's cache: a file stays a reader, one that is new is run.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
_HELPERS = f"{TESTS}{os.sep}"
_STATELESS = {__file__, str(TESTS / "support" / "gloo.py")}
_KEPT = "memtune/rate_readers"
_NO_READERS = {"c++", "cc", "clang++", "g++", "gcc", "git", "uname"}
_COPIES = ("replace", "cpu")  # dataclasses.replace, known_devices.cpu: they decide nothing


@dataclass
class ReaderNotes:
    current: str = ""
    """File of the running test."""
    readers: set[str] = field(default_factory=set)
    """Test files, and the helpers which read a rate: they may cache what they have computed."""
    run: set[str] = field(default_factory=set)


NOTES = ReaderNotes()


def note_reader() -> None:
    """Note that the running test depends on rates, and so may the tests that call a helper on the stack."""
    NOTES.readers.add(NOTES.current)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_HELPERS) and file not in _STATELESS:
            NOTES.readers.add(os.path.relpath(file, TESTS))
        frame = frame.f_back


class _NotedRate:
    """A field of a frozen dataclass whose reads are noted."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: type) -> Any:
        if owner is None:
            raise AttributeError(self._name)
        values = vars(owner)
        if values.get("name", "cpu") == "cpu" and sys._getframe(1).f_code.co_name not in _COPIES:
            note_reader()
        return values[self._name]

    def __set__(self, owner: Any, value: Any) -> None:
        vars(owner)[self._name] = value


def install() -> None:
    """Note reads of the CPU's rates in this process, and processes that it starts."""
    from fixed_cpu import rates

    from memtune.hardware.cpu_probe import CpuRates
    from memtune.hardware.spec import Hardware, of_cpu

    slow, fast = rates("0.1"), rates("10")
    for kind, one, other in ((CpuRates, slow, fast), (Hardware, of_cpu(slow), of_cpu(fast))):
        for name in kind.__dataclass_fields__:
            if name != "sources" and getattr(one, name) != getattr(other, name):
                setattr(kind, name, _NotedRate(name))
    fork, init = os.fork, subprocess.Popen.__init__

    def noted_fork() -> int:
        note_reader()
        return fork()

    def noted_init(process: Any, args: Any, *more: Any, **how: Any) -> None:
        command = args if isinstance(args, (str, os.PathLike)) else args[0]
        if Path(command).name not in _NO_READERS:
            note_reader()
        init(process, args, *more, **how)

    os.fork = noted_fork
    subprocess.Popen.__init__ = noted_init  # type: ignore[method-assign]


# -- pytest's hooks ------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rate-readers", action="store_true", help="run only files whose tests may depend on the CPU's rates"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("rate_readers"):
        return
    kept = _kept(config)
    readers = {file for file, reads in kept.items() if reads}
    chosen = [each for each in items if kept.get(_file(each), True) or helpers_of(_file(each)) & readers]
    config.hook.pytest_deselected(items=[each for each in items if each not in set(chosen)])
    items[:] = chosen


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    NOTES.current = _file(item)
    NOTES.run.add(NOTES.current)
    try:
        return (yield)
    finally:
        NOTES.current = ""


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    found = {"run": sorted(NOTES.run), "readers": sorted(NOTES.readers - {""})}
    if hasattr(config, "workerinput"):
        config.workeroutput["rate_readers"] = found
    else:
        _keep(config, found)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if found := getattr(node, "workeroutput", {}).get("rate_readers"):
        _keep(node.config, found)


def _kept(config: pytest.Config) -> dict[str, bool]:
    cache = getattr(config, "cache", None)  # None with -p no:cacheprovider
    return cache.get(_KEPT, {}) if cache else {}


def _keep(config: pytest.Config, found: dict[str, list[str]]) -> None:
    if cache := getattr(config, "cache", None):
        new = dict.fromkeys(found["run"], False) | _kept(config) | dict.fromkeys(found["readers"], True)
        cache.set(_KEPT, new)


def _file(item: pytest.Item) -> str:
    return str(item.path.relative_to(TESTS)) if TESTS in item.path.parents else str(item.path)


@cache
def helpers_of(file: str) -> frozenset[str]:
    """Return the helpers that a file of tests imports, directly or through others."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((TESTS / file).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        else:
            continue
        found |= {path for name in names if (TESTS / (path := name.replace(".", "/") + ".py")).is_file()}
    return frozenset(found.union(*map(helpers_of, found - {file})))
