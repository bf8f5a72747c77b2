"""Commands of the documentation and of the examples run as they are written, in an empty folder.

A block marked `bash` can run anywhere: on a CPU, without a network. A block with a title is that file. Of an
example's docstring those commands run that need no GPU. `make test-slow` runs all, `make test` one page.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r'^```(\w+)(?: title="([\w./-]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)
QUICK = "docs/guides/config-by-hand.md"
IN_A_CHECKOUT = "docs/tutorials/technique.md"
"""Page that adds a file to memtune itself: it gets a copy."""
PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    if "\n```bash\n" in page.read_text(encoding="utf-8")
)


def with_pass(text: str) -> str:
    """Return the page with the pass of CONTRIBUTING.md, as the site's hook inserts it."""
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    source = next(body for _, _, body in FENCE.findall(contributing) if "def offload_saved" in body)
    return text.replace("PASS_SOURCE", f'```python title="offload_saved.py"\n{source}```')


def run_page(text: str, folder: Path) -> Iterator[tuple[str, subprocess.CompletedProcess[str]]]:
    """Write the files of a page and run its commands in order; yield each line with its outcome."""
    for language, title, body in FENCE.findall(with_pass(text)):
        if title:
            (folder / title).parent.mkdir(parents=True, exist_ok=True)
            (folder / title).write_text(body, encoding="utf-8")
        for line in body.splitlines() if language == "bash" else ():
            if line.strip():
                yield line, run_line(line, folder)


def run_line(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder`, with neither the user's settings nor those of this test run."""
    (folder / "home").mkdir(exist_ok=True)
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(folder / "home"),
        "LANG": "C.UTF-8",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **({"PYTHONPATH": str(folder)} if (folder / "memtune").exists() else {}),
    }
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", line],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )


def checked(done: Iterator[tuple[str, subprocess.CompletedProcess[str]]]) -> None:
    """Assert that there are commands and that each exits with 0."""
    lines = list(done)
    assert lines
    failed = [f"{line}\n{each.stdout}{each.stderr}" for line, each in lines if each.returncode]
    assert not failed, failed[0]


@pytest.mark.timeout(3600)  # searches and plans of large models: minutes on an idle machine
@pytest.mark.parametrize(
    "page", [pytest.param(each, marks=[pytest.mark.slow] * (each != QUICK)) for each in PAGES]
)
def test_page_runs_as_written(page, tmp_path):
    packages = ("memtune", "autotune", "executors", "search_spaces") if page == IN_A_CHECKOUT else ()
    for each in ("examples", *packages):
        shutil.copytree(
            ROOT / each, tmp_path / each, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    checked(run_page((ROOT / page).read_text(encoding="utf-8"), tmp_path))


def commands(example: Path) -> list[str]:
    """Return the commands in an example's docstring that need no GPU."""
    text = ast.get_docstring(ast.parse(example.read_text(encoding="utf-8"))) or ""
    found = re.findall(r"^ {4}((?:\w+=\S+ )?(?:memtune|python) .*)$", text, re.MULTILINE)
    return [each for each in found if " search " not in each or "--device cpu" in each]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "example",
    [each for each in sorted(ROOT.glob("examples/*.py")) if commands(each)],
    ids=lambda each: each.stem,
)
def test_docstring_of_example_runs_as_written(example, tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    checked((line, run_line(line, tmp_path)) for line in commands(example))
