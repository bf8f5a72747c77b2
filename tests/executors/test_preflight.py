"""Probing `model.py` in a child process: for any file, one message is returned and no process or file
remains.
"""

import os
import signal
import time
from pathlib import Path

import pytest

from memtune.errors import WorkloadError
from memtune.executors.preflight import probe, probing

ZOO = Path(__file__).parents[1] / "zoo"
BAD = ZOO / "bad"

PLAIN = """
global_batch = 6
def model(): ...
def batch(size): ...
def loss(model, batch): ...
"""


def message(path, deadline_s=60.0, **kwargs) -> WorkloadError:
    with pytest.raises(WorkloadError) as caught:
        probe(path, deadline_s, **kwargs)
    assert caught.value.fix
    assert "Traceback" not in str(caught.value)
    return caught.value


def written(folder: Path, text: str) -> Path:
    path = folder / "model.py"
    path.write_text(text)
    return path


def alive(pid: int) -> bool:
    """Return whether a process runs; one that ended and waits to be reaped by init does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_probe_reports_usable_file():
    report = probe(ZOO / "cnn_bn.py", batches=True)
    assert report.path == ZOO / "cnn_bn.py"
    assert report.functions == ("model", "batch", "loss", "optimizer")
    assert report.global_batch == 8
    assert report.imports_torch


def test_probing_starts_early_and_ends_with_context(tmp_path):
    path = written(tmp_path, f"open({str(tmp_path / 'begun')!r}, 'w')\nimport time\ntime.sleep(600)\n{PLAIN}")
    with probing(path) as begun:
        until = time.monotonic() + 60
        while not (tmp_path / "begun").exists() and time.monotonic() < until:
            time.sleep(0.01)
        assert (tmp_path / "begun").exists()
        assert alive(begun.child.pid)
    assert not alive(begun.child.pid)
    assert begun.child.returncode == -signal.SIGKILL


def test_probe_loads_torch_only_if_file_does(tmp_path):
    report = probe(written(tmp_path, f"print('hello')\n{PLAIN}"))
    assert not report.imports_torch
    assert report.output == "hello\n"
    assert report.global_batch == 6


def test_probe_passes_name_in_file(tmp_path):
    assert message(f"{written(tmp_path, PLAIN)}:task").code == "MT111"


def test_probe_ends_training_on_import_at_deadline():
    error = message(BAD / "trains.py", 1.0)
    assert error.code == "MT103"
    assert "still running after 1 s, line" in error.what
    assert error.evidence.startswith('Last line: "epoch ')
    assert "__main__" in error.fix


def test_probe_waits_for_slow_import(tmp_path):
    (tmp_path / "slow_package.py").write_text("import time; time.sleep(1)")
    assert probe(written(tmp_path, f"import slow_package\n{PLAIN}"), 0.4).global_batch == 6


@pytest.mark.parametrize(
    ("stem", "code", "words"),
    [
        ("exits", "MT112", ["line 6", "exit status 3", "no data set, giving up", "__main__"]),
        ("exits_hard", "MT112", ["exit status 0", '"bye"', "__main__"]),
        ("crashes", "MT113", ["SIGSEGV", "line 6", '"loading kernels"']),
        ("import_error", "MT102", ["line 3", "no_such_module_for_memtune"]),
        ("no_model", "MT101", ["no model()"]),
    ],
)
def test_probe_message_of_each_bad_file(stem, code, words):
    error = message(BAD / f"{stem}.py")
    assert error.code == code
    assert [word for word in words if word not in str(error)] == []


def test_probe_checks_batches_on_request():
    assert probe(BAD / "batch_ignores_size.py").functions == ("model", "batch", "loss")
    assert message(BAD / "batch_ignores_size.py", batches=True).code == "MT117"


def test_probe_reports_killed_child_as_out_of_memory(tmp_path):
    error = message(written(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"))
    assert "SIGKILL" in error.what
    assert "out of memory" in error.fix


def test_probe_ends_file_that_ignores_signals(tmp_path):
    text = """
import os, signal, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
os.closerange(0, 100)
time.sleep(600)
"""
    assert message(written(tmp_path, text), 0.5).code == "MT103"


@pytest.mark.parametrize("ending", ["time.sleep(600)", "os._exit(0)", "os.abort()", PLAIN])
def test_probe_kills_grandchildren(tmp_path, ending):
    pid_file = tmp_path / "pid"
    text = f"""
import os, subprocess, time
from pathlib import Path
forked = os.fork()
if forked == 0:
    time.sleep(600)
started = subprocess.Popen(["sleep", "600"])
Path({str(pid_file)!r}).write_text(f"{{os.getpid()}} {{forked}} {{started.pid}}")
{ending}
"""
    path = written(tmp_path, text)
    if ending is PLAIN:
        probe(path)
    else:
        message(path, 1.0)
    pids = [int(pid) for pid in pid_file.read_text().split()]
    until = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.01)
    assert [pid for pid in pids if alive(pid)] == []


def test_probe_leaves_no_descriptor_open():
    before = set(os.listdir("/proc/self/fd"))
    probe(BAD / "shapes.py")
    message(BAD / "exits_hard.py")
    message(BAD / "trains.py", 0.3)
    assert set(os.listdir("/proc/self/fd")) == before


def test_probe_quotes_last_line_of_endless_output(tmp_path):
    error = message(
        written(
            tmp_path, "for i in range(200_000): print('x' * 20)\nprint('the end')\nraise SystemExit('stop')"
        )
    )
    assert 'Last line: "the end"' in error.evidence
