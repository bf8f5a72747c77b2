"""Content of distributions: tracked links, one import name, all subpackages, and the stub of the native
module.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from nanobind.stubgen import StubGen

import memtune
from memtune import _native

ROOT = Path(__file__).parents[1]
LINKED = ("autotune", "executors", "search_spaces")


@pytest.mark.parametrize("name", LINKED)
def test_links_lead_to_the_top_level_folders(name: str) -> None:
    link = ROOT / "memtune" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"


@pytest.mark.parametrize("name", LINKED)
def test_linked_folders_are_one_module_of_memtune(name: str) -> None:
    module = __import__(f"memtune.{name}", fromlist=["__name__"])
    assert module.__name__ == f"memtune.{name}"
    assert name not in sys.modules


def build(kind: str, out: Path) -> Path:
    """Return the built `wheel` or `sdist`. The wheel lacks its native module, because only its list of files
    is read.
    """
    settings = {"wheel.cmake": "false", "wheel.py-api": "py3"}
    call = (
        f"from scikit_build_core.build import build_{kind} as build; print(build({str(out)!r}, {settings!r}))"
    )
    done = subprocess.run([sys.executable, "-c", call], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.split()[-1]


def shipped_files() -> set[str]:
    """Return every source of the package as a path that starts with memtune/, links followed."""
    homes = {"memtune": ROOT / "memtune"} | {f"memtune/{name}": ROOT / name for name in LINKED}
    return {
        f"{home}/{path.relative_to(folder)}"
        for home, folder in homes.items()
        for path in folder.rglob("*.*")
        if path.suffix in {".py", ".pyi", ".cpp", ".typed"}
    }


def test_wheel_holds_every_source_under_one_top_level_name(tmp_path: Path) -> None:
    names = zipfile.ZipFile(build("wheel", tmp_path)).namelist()
    files = {name for name in names if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in files} == {"memtune"}
    assert shipped_files() <= files
    assert {"memtune/py.typed", "memtune/_native.pyi", "memtune/autotune/__init__.py"} <= files


def test_sdist_holds_every_source_and_what_builds_it(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert shipped_files() <= names
    assert {"CMakeLists.txt", "LICENSE", "csrc/bindings.cpp", "autotune/__init__.py"} <= names
    assert not any(name.startswith((".venv", "build/")) for name in names)


def test_committed_stub_is_what_nanobind_generates() -> None:
    stub = StubGen(_native)
    stub.put(_native)
    fix = "\n  Fix: .venv/bin/python -m nanobind.stubgen -m memtune._native -o memtune/_native.pyi"
    assert (ROOT / "memtune/_native.pyi").read_text() == stub.get(), fix


def test_native_module_was_built_from_this_version() -> None:
    assert _native.version() == memtune.__version__


def test_public_names_are_documented_as_lazy() -> None:
    assert set(memtune._HOME) | {"__version__"} == set(memtune.__all__)
    with pytest.raises(AttributeError, match="no attribute 'serach'"):
        memtune.serach  # noqa: B018
