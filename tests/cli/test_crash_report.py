"""A process that dies of a signal still leaves a message."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

MODEL = """\
import ctypes, os

def model():
    os.abort()

def loss(model, batch):
    ctypes.string_at(0)

def batch(size):
    return size
"""


def run(folder: Path, call: str, as_json: bool = False) -> subprocess.CompletedProcess[str]:
    (folder / "net.py").write_text(MODEL)
    code = (
        "from memtune.cli._crash_report import report_crashes\nimport net\n"
        f"with report_crashes('x/net.py:Task', {as_json}): {call}"
    )
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("call", "number", "words"),
    [
        ("net.model()", signal.SIGABRT, "MT113 net.py crashed the process in model(), line 4:  Aborted."),
        (
            "net.loss(1, 2)",
            signal.SIGSEGV,
            "MT113 net.py crashed the process in loss(), line 7:  Segmentation fault.",
        ),
        ("__import__('os').abort()", signal.SIGABRT, "MT900 the process of memtune crashed:  Aborted."),
    ],
)
def test_crash_report_names_function_and_line(tmp_path: Path, call: str, number: int, words: str) -> None:
    done = run(tmp_path, call)
    assert done.returncode == -number
    assert done.stderr.startswith(words)
    assert "Fix: " in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert done.stdout == ""


def test_crash_report_with_json_is_a_document(tmp_path: Path) -> None:
    document = json.loads(run(tmp_path, "net.model()", as_json=True).stdout)
    assert document["schema"] == 1
    assert document["error"].keys() == {"code", "what", "evidence", "fix"}
    assert document["error"]["code"] == "MT113"


@pytest.mark.parametrize(
    "call", ["net.batch(2)", "1 / 0", "__import__('os').kill(__import__('os').getpid(), 9)"]
)
def test_crash_report_is_silent_without_a_crash(tmp_path: Path, call: str) -> None:
    assert "MT" not in run(tmp_path, call).stderr
