from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from memtune.autotune.search.study_store import StudyFolder, check_writable, differences, has_owner
from memtune.errors import EnvironmentFault, UsageError

HOLD = """
import sys, time
from pathlib import Path
from memtune.autotune.search.study_store import StudyFolder
with StudyFolder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "gpt")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_study_lock_reports_pid_and_time(holder: subprocess.Popen[str], tmp_path: Path):
    with (
        pytest.raises(EnvironmentFault, match=f"in use by pid {holder.pid} on .* since 20") as caught,
        StudyFolder(tmp_path / "gpt"),
    ):
        pass
    assert caught.value.code == "MT401"


def test_study_lock_is_released_by_killed_process(holder: subprocess.Popen[str], tmp_path: Path):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with StudyFolder(tmp_path / "gpt"):
        pass


def test_study_store_removes_partial_files_of_a_killed_search(tmp_path: Path) -> None:
    kill = "import os; os.replace = lambda *_: os.kill(os.getpid(), 9)"
    enter = "from memtune.autotune.search.study_store import StudyFolder; from pathlib import Path"
    program = f"{enter}; {kill}; StudyFolder(Path({str(tmp_path)!r})).__enter__()"
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    assert [each.suffix for each in tmp_path.iterdir() if each.name.startswith(".")] == [".tmp"]
    with StudyFolder(tmp_path):
        assert sorted(each.name for each in tmp_path.iterdir()) == ["lock", "owner.json"]


def test_study_store_reports_folder_that_cannot_be_created(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="cannot be written"), StudyFolder(tmp_path / "file" / "gpt"):
        pass


MADE_FOR = {
    "workload": {"file": "model.py", "name": None, "source_sha256": "a" * 64},
    "options": {"goal": "throughput", "ranks": 2, "budget_bytes": 100, "axes": [], "freeze": {}, "seed": 0},
    "hardware": "cpu",
    "versions": {"torch": "2.13.0", "python": "3.11.7"},
}


def leaves(data: dict[str, object], prefix: str = "") -> list[str]:
    found = []
    for key, value in data.items():
        found += leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [f"{prefix}{key}"]  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("name", leaves(MADE_FOR))  # type: ignore[arg-type]
def test_study_store_names_changed_field_on_resume(tmp_path: Path, name: str):
    import copy

    with StudyFolder(tmp_path / "gpt") as folder:
        assert folder.claim(MADE_FOR, resume=False) is False
        changed = copy.deepcopy(MADE_FOR)
        *path, last = name.split(".")
        node: dict[str, object] = changed  # type: ignore[assignment]
        for part in path:
            node = node[part]  # type: ignore[assignment]
        node[last] = "something else"
        with pytest.raises(UsageError) as caught:
            folder.claim(changed, resume=True)
        assert caught.value.evidence.startswith(f"{name}: ")
        assert "something else" in caught.value.evidence


def test_study_store_allows_repeated_resume(tmp_path: Path):
    with StudyFolder(tmp_path / "gpt") as folder:
        folder.claim(MADE_FOR, resume=True)
        assert all(folder.claim(MADE_FOR, resume=True) for _ in range(3))


def test_study_store_refuses_existing_study_without_resume(tmp_path: Path):
    with StudyFolder(tmp_path / "gpt") as folder:
        folder.claim(MADE_FOR, resume=False)
        with pytest.raises(UsageError, match="exists already"):
            folder.claim(MADE_FOR, resume=False)


def test_differences_give_old_and_new_values():
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 4}) == [
        "a.c: 2 → 3",
        "d: unset → 4",
    ]


@pytest.mark.parametrize("where", [0, 100, 5000])
def test_study_store_sets_damaged_database_aside(tmp_path: Path, where: int):
    with StudyFolder(tmp_path / "gpt") as folder:
        with sqlite3.connect(folder.database) as connection:
            connection.execute("create table t (x text)")
            connection.executemany("insert into t values (?)", [("x" * 100,) for _ in range(200)])
        connection.close()
        assert folder.check_database() is None
        content = bytearray(folder.database.read_bytes())
        content[where : where + 64] = os.urandom(64)
        if where == 5000:
            content = content[: len(content) // 2]
        folder.database.write_bytes(bytes(content))
        aside = folder.check_database()
        assert aside is not None
        assert aside.read_bytes() == bytes(content)
        assert not folder.database.exists()


def test_study_has_an_owner_while_its_process_lives(tmp_path: Path):
    folder = tmp_path / "gpt"
    assert not has_owner(folder)
    with StudyFolder(folder):
        assert has_owner(folder)
        owner = json.loads((folder / "owner.json").read_text())
    assert not has_owner(folder)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (folder / "owner.json").write_text(json.dumps({**owner, "pid": ended.pid}))
    assert not has_owner(folder)
    (folder / "owner.json").write_text(json.dumps({**owner, "pid": ended.pid, "host": "another"}))
    assert has_owner(folder)


def test_study_store_checks_output_at_start(tmp_path: Path):
    check_writable(tmp_path / "tuned.yaml", force=False)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "tuned.yaml").write_text("old")
    with pytest.raises(UsageError, match="exists"):
        check_writable(tmp_path / "tuned.yaml", force=False)
    check_writable(tmp_path / "tuned.yaml", force=True)
    assert (tmp_path / "tuned.yaml").read_text() == "old"
    with pytest.raises(EnvironmentFault, match="cannot be written"):
        check_writable(tmp_path / "missing" / "tuned.yaml", force=False)
    with pytest.raises(EnvironmentFault, match="is a folder"):
        check_writable(tmp_path, force=False)


def test_study_with_a_damaged_name_in_its_schema_is_set_aside(tmp_path: Path):
    """SQLite names it in its error, whose message is then no text."""
    folder = StudyFolder(tmp_path)
    with contextlib.closing(sqlite3.connect(folder.database)) as base:
        base.execute("create table told (number int)")
        base.execute("create index by_number on told (number)")
        base.commit()
    whole = folder.database.read_bytes()
    # The schema's own text is rows of (kind, name, table, page, SQL): the SQL of the last one is broken too.
    folder.database.write_bytes(
        whole.replace(b"by_number", b"\xa0y_number").replace(b"told (number)", b"told (mumber)")
    )
    aside = folder.check_database()
    assert aside is not None
    assert not folder.database.exists()
