"""The directory for tensors on SSD: refusals, and that no file remains after a run, however it ended."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from memtune.errors import EnvironmentFault
from memtune.ssd import offload_dir
from memtune.ssd.offload_dir import VARIABLE, RunFolder, allowed, allowed_dirs, checked, clean, orphans


def refusal(root: str | None = None) -> str:
    with pytest.raises(EnvironmentFault) as caught:
        checked(root)
    assert caught.value.code == "MT361"
    assert caught.value.fix
    return caught.value.what


def test_checked_requires_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(offload_dir.VARIABLE, raising=False)
    assert "No directory" in refusal()
    monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))
    assert checked() == tmp_path


def test_checked_refuses_unusable_directories_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert "No such file" in refusal(str(tmp_path / "missing"))
    assert "is a file" in refusal(str(tmp_path / "file"))
    assert "symbolic link" in refusal(str(tmp_path / "link"))
    assert "is writable by all users" in refusal(str(tmp_path / "open"))
    monkeypatch.setattr(offload_dir, "file_system", lambda path: "nfs4")
    assert "network mount (nfs4)" in refusal(str(tmp_path))
    monkeypatch.undo()
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    assert "not writable" in refusal(str(tmp_path))


def test_directory_in_memory_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_dir, "file_system", lambda path: "tmpfs")
    with pytest.warns(UserWarning, match=r"is in memory \(tmpfs\)"):
        assert checked(str(tmp_path)) == tmp_path
    with warnings.catch_warnings(action="error"):
        assert checked(str(tmp_path)) == tmp_path, "one warning per process is enough"


def test_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner could replace a run's folder by a link to the user's own files."""
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    monkeypatch.setattr(
        Path, "stat", lambda self, **_: os.stat_result((0o40755, 0, 0, 0, 4321, 0, 0, 0, 0, 0))
    )
    with pytest.raises(EnvironmentFault, match=r"belongs to another user \(uid 4321\)"):
        checked(str(tmp_path))


def test_links_above_the_directory_are_followed(tmp_path: Path) -> None:
    (tmp_path / "drive" / "mine").mkdir(parents=True)
    (tmp_path / "scratch").symlink_to("drive")
    assert checked(str(tmp_path / "scratch" / "mine")) == tmp_path / "scratch" / "mine"
    (tmp_path / "circle").symlink_to("circle")
    assert "cannot be used: Too many levels" in refusal(str(tmp_path / "circle" / "mine"))


def test_trial_messages_name_the_users_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(offload_dir, "file_system", lambda path: "tmpfs")
    lent = RunFolder(tmp_path)
    own = RunFolder(checked(str(lent.path)))
    assert not recwarn.list
    assert [offload_dir.given(each) for each in (own.path, lent.path, tmp_path)] == [tmp_path] * 3
    own.remove()
    lent.remove()


def test_resumable_folder_is_kept_until_clean(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    (run.path / f"{offload_dir.MANIFEST}0").touch()
    run.close()
    assert [left.resumable for left in orphans(tmp_path)] == [True]
    RunFolder(tmp_path).close()
    assert [left.path for left in clean(tmp_path)] == [run.path]
    run = RunFolder(tmp_path)
    (run.path / f"{offload_dir.MANIFEST}0").touch()
    run.remove()
    assert not list(tmp_path.iterdir())


def dead(root: Path, name: str) -> Path:
    folder = root / f"memtune-run-999-{name}"
    folder.mkdir()
    (folder / "owner").touch()
    (folder / f"{offload_dir.MANIFEST}0").touch()
    return folder


def test_clean_keeps_a_folder_locked_since_its_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = dead(tmp_path, "a"), dead(tmp_path, "b")
    held, remove = [], shutil.rmtree

    def rmtree(path: Path, **more: bool) -> None:
        held.append((offload_dir.locked(first), offload_dir.locked(second)))
        remove(path, **more)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    assert [left.path for left in clean(tmp_path)] == [first]
    assert held[0][0] is None, "no process gets the lock of a folder that is being removed"
    assert second.exists()
    os.close(held[0][1] or -1)
    assert [left.path for left in clean(tmp_path)] == [second]


def test_clean_keeps_a_folder_that_became_resumable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = dead(tmp_path, "a")
    monkeypatch.setattr(
        offload_dir, "orphans", lambda directory: iter([offload_dir.Left(folder, 0, resumable=False)])
    )
    assert clean(tmp_path, resumable=False) == []
    assert folder.exists()


def test_lock_of_a_removed_folder_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, flock = dead(tmp_path, "a"), fcntl.flock

    def removed_before(lock: int, how: int) -> None:
        (folder / "owner").unlink()
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", removed_before)
    assert offload_dir.locked(folder) is None


def test_file_system_is_the_kernels_name() -> None:
    assert offload_dir.file_system(Path("/proc")) == "proc"


@pytest.mark.parametrize("name", ["\0", "a\0b", "x" * 5000, "\udcff"])
def test_checked_refuses_impossible_names(name: str) -> None:
    assert "cannot be used" in refusal("/" + name)


def test_run_folder_is_private_and_removed_at_the_end(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.path.stat().st_mode & 0o777 == 0o700
    assert not list(orphans(tmp_path))  # its owner lives
    run.close()
    assert not list(tmp_path.iterdir())


def test_clean_removes_dead_runs_only(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from memtune.ssd.offload_dir import RunFolder\n"
        "run = RunFolder(Path(sys.argv[1])); (run.path / 'tensors').write_bytes(bytes(10000))\n"
        "print('made', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "made\n"
    assert not clean(tmp_path)
    child.send_signal(signal.SIGKILL)
    child.wait()
    (tmp_path / "memtune-run-link").symlink_to("/")
    (child_of := next(tmp_path.glob(f"memtune-run-{child.pid}-*")) / "memtune-run-2").mkdir()
    (child_of / "tensors").write_bytes(bytes(20000))
    (left,) = clean(tmp_path)
    assert left.n_bytes >= 30000
    assert [each.name for each in tmp_path.iterdir()] == ["memtune-run-link"]


def test_first_of_several_directories_is_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for text, found in (("", ()), ("/one", ("/one",)), ("/one:/two:", ("/one", "/two"))):
        monkeypatch.setenv(VARIABLE, text)
        assert allowed_dirs() == found
        assert allowed() == (found[0] if found else "")


@pytest.mark.parametrize("with_owner", [True, False])
def test_unlocked_new_folder_is_removed_after_a_delay(tmp_path: Path, with_owner: bool) -> None:
    """A new folder has no lock at first; another rank that starts at that moment must not remove it."""
    half = tmp_path / ".memtune-new-1"
    half.mkdir(mode=0o700)
    if with_owner:
        (half / "owner").touch()
    RunFolder(tmp_path).close()
    assert not clean(tmp_path)
    os.utime(half, (0, 0))
    assert [each.path for each in clean(tmp_path)] == [half]


def test_orphans_skips_folders_removed_meanwhile(tmp_path: Path) -> None:
    """Ranks start together, and each removes dead runs; one that searches a step to resume must see
    them all.
    """
    for name in "abc":
        (tmp_path / f"memtune-run-{name}").mkdir()
    found = orphans(tmp_path)
    assert next(found).path.name == "memtune-run-a"
    (tmp_path / "memtune-run-b").rmdir()
    assert [each.path.name for each in found] == ["memtune-run-c"]


def test_folders_of_a_dead_trial_are_removed_with_their_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"{tmp_path}:{tmp_path}")
    made = offload_dir.folders_of_own()
    inner = RunFolder(made[0].path)
    (inner.path / "manifest-0").write_bytes(bytes(5000))
    assert not list(orphans(tmp_path)), "its owner lives"
    for each in made:
        each.remove()
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv(VARIABLE, f"{tmp_path}:{tmp_path}/missing")
    assert offload_dir.folders_of_own() == []
    assert not list(tmp_path.iterdir())


def run_child(code: str, cwd: Path) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=True
    ).stdout


def test_failed_run_folder_leaves_nothing(tmp_path: Path) -> None:
    """The kernel accepts no byte of a file, as on a full drive."""
    code = f"""
import pathlib, resource
from memtune.errors import EnvironmentFault
from memtune.ssd.offload_dir import RunFolder
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    RunFolder(pathlib.Path({str(tmp_path)!r}))
except EnvironmentFault as fault:
    print(fault)
"""
    assert "Nothing can be made" in run_child(code, tmp_path)
    assert not list(tmp_path.iterdir())


def test_relative_directory_is_resolved_at_the_start(tmp_path: Path) -> None:
    """Its folder is removed at the end, from any working directory."""
    (tmp_path / "drive").mkdir()
    code = """
import os
from memtune.ssd.offload_dir import RunFolder, checked
folder = RunFolder(checked("drive"))
os.chdir("/")
print(folder.path)
"""
    assert run_child(code, tmp_path).startswith(str(tmp_path / "drive"))
    assert not list((tmp_path / "drive").iterdir())


def test_dead_network_mount_is_refused_without_access(tmp_path: Path) -> None:
    """A real mount in a namespace of its own without a server, so an access to the directory would wait
    forever.
    """
    code = f"""
import ctypes, os, sys
from pathlib import Path
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x20000) or libc.mount(None, b"/", None, 0x44000, None):  # own mounts, none of them seen outside
    sys.exit(print("not allowed"))
where = Path({str(tmp_path)!r}) / "far away"
where.mkdir()
(where.parent / "home").symlink_to("far away")
server = os.open("/dev/fuse", os.O_RDWR) if os.path.exists("/dev/fuse") else -1
options = f"fd={{server}},rootmode=40000,user_id=0,group_id=0".encode()
if libc.mount(b"server:/home", bytes(where), b"fuse.sshfs", 0, options):
    sys.exit(print("not allowed"))
from memtune.errors import EnvironmentFault
from memtune.ssd.offload_dir import checked
for each in (where, where.parent / "home"):
    try:
        checked(str(each / "offload"))
    except EnvironmentFault as fault:
        print(fault)
"""  # noqa: E501
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    if done.stdout == "not allowed\n":
        pytest.skip("mounting is not allowed here")
    assert "far away/offload is on a network mount (fuse.sshfs)" in done.stdout
    assert "home/offload is on a network mount (fuse.sshfs)" in done.stdout, (
        "what a link leads to is not asked either"
    )
