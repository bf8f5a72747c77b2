"""Commands of the documentation run as they are written, page by page, in an empty folder.

A block marked `bash` can run anywhere: on a CPU, without a network. A block with a title is that file. All
pages but one are slow; `make test-slow` runs them.
"""

from __future__ import annotations

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
    home = folder / "home"
    home.mkdir()
    environment = {  # neither the user's settings nor those of this test run
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    for language, title, body in FENCE.findall(with_pass(text)):
        if title:
            (folder / title).write_text(body, encoding="utf-8")
        for line in body.splitlines() if language == "bash" else ():
            if line.strip():
                yield (
                    line,
                    subprocess.run(
                        ["bash", "-euo", "pipefail", "-c", line],
                        cwd=folder,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        capture_output=True,
                        text=True,
                        timeout=1800,
                        check=False,
                    ),
                )


@pytest.mark.timeout(3600)  # searches and plans of large models: minutes on an idle machine
@pytest.mark.parametrize(
    "page", [pytest.param(each, marks=[pytest.mark.slow] * (each != QUICK)) for each in PAGES]
)
def test_page_runs_as_written(page, tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    lines = list(run_page((ROOT / page).read_text(encoding="utf-8"), tmp_path))
    assert lines
    failed = [f"{line}\n{done.stdout}{done.stderr}" for line, done in lines if done.returncode]
    assert not failed, failed[0]
