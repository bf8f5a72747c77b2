"""Offload directory: the directory on SSD that the user allows, with a locked folder for each process that
uses it. Temporary files of a search are in such a folder of the directory for temporary files.

`MEMTUNE_OFFLOAD_DIR` (`--offload-dir` sets it) names the directory, never a config, which may come from a
stranger: no key of a config is a path, so none can point outside of the directory. Several directories, on
separate drives, are a list (`/one:/two`). States of a run's folder:

    made (.memtune-new-) --rename--> owned (locked) --close--> removed
                                       |--process ends--> dead --clean, next run--> removed
                                       |--manifest--> resumable: removed by `memtune clean` or a resumed run

The kernel releases a folder's lock when its process ends in any way, so a dead run is known for certain.

The directory itself must not be a link, which another user with write access next to it could redirect. Links
above it are followed, since machines have them (`/scratch`, homes), and their target is checked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from memtune.errors import EnvironmentFault

VARIABLE: Final = "MEMTUNE_OFFLOAD_DIR"
_NETWORK: Final = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "ceph",
    "lustre",
    "gpfs",
    "9p",
    "afs",
    "beegfs",
    "glusterfs",
    "pvfs2",
    "wekafs",
    "davfs",
    "vboxsf",
    "fuse.sshfs",
    "fuse.glusterfs",
    "fuse.s3fs",
    "fuse.gcsfuse",
    "fuse.rclone",
    "fuse.juicefs",
    "fuse.ceph",
    "fuse.ceph-fuse",
    "fuse.mount-s3",
    "fuse.goofys",
    "fuse.blobfuse",
    "fuse.blobfuse2",
    "fuse.davfs",
    "fuse.hdfs",
    "fuse.alluxio-fuse",
    "fuse.seaweedfs",
    "fuse.lustre",
    "fuse.vmhgfs-fuse",
)
_MEMORY: Final = ("tmpfs", "ramfs")
_MAX_LINKS: Final = 40
"""The limit of Linux for links in a path."""
_WARNED: Final[set[Path]] = set()
"""Directories in memory about which this process has already warned."""
_RUN, _NEW = "memtune-run-", ".memtune-new-"
_OWNER = "owner"
_BEING_MADE_S: Final = 60.0
"""A folder still without a lock after this time was left by a process killed while making it."""
_GLANCE_S: Final = 0.1
"""Time after which a process that checks whether a folder is dead has released its lock."""
MANIFEST: Final = "manifest-"
"""Prefix of the manifests from which training can resume (`ssd.last_step`); folders with one are kept."""


def allowed() -> str:
    """Return the allowed directory, the first of several, or "" if none; reads the environment only."""
    return next(iter(allowed_dirs()), "")


def allowed_dirs() -> tuple[str, ...]:
    """Return all allowed directories; a list with colons names several drives."""
    return tuple(each for each in os.environ.get(VARIABLE, "").split(os.pathsep) if each)


def checked(root: str | None = None, *, quiet: bool = False) -> Path:
    """Return the directory, if it may be used.

    Args:
        root: The directory; default: `allowed()`.
        quiet: Do not warn, because the process that uses the directory will.

    Raises:
        EnvironmentFault: None was given, or it is missing, not a directory, a link, on a network mount, not
            writable, writable by all users, or another user's.
    """
    text = allowed() if root is None else root
    if not text:
        raise _fault(
            "No directory for tensors on SSD was given.",
            fix=f"export {VARIABLE}=/path/on/your/drive, or --offload-dir",
        )
    path = Path(text).absolute()  # the process may change its working directory
    # Before any `stat`: access to a network mount whose server is down would hang.
    for each in _asked(path):
        _must_not_be_on_network(path, _mounted_at(each))
    _must_be_a_plain_directory(Path(text))
    # Again by device number: a bind mount is not recognisable from the path.
    _must_not_be_on_network(path, file_system(path))
    # A path inside another run's folder was passed on by a process that has warned already.
    if not quiet and given(path) == path and path not in _WARNED:
        if warning := in_memory(path):
            warnings.warn(warning, stacklevel=2)
        _WARNED.add(path)
    if not os.access(path, os.W_OK | os.X_OK):
        raise _fault(
            f"The offload directory {path} is not writable.", fix=f"chmod u+w {path}, or choose another"
        )
    there = path.stat()
    mode, owner = there.st_mode, there.st_uid
    # Its owner could replace a run's folder by a link. Root is trusted, and may use any directory.
    if os.getuid() not in (owner, 0) and owner != 0:
        raise _fault(
            f"The offload directory {path} belongs to another user (uid {owner}).",
            fix="make a directory of your own, below it for example",
        )
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise _fault(f"The offload directory {path} is writable by all users.", fix=f"chmod o-w {path}")
    return path


def checked_dirs() -> list[Path]:
    """Return `checked` of the first directory and all others that may be used, since any may have kept steps.

    Raises:
        EnvironmentFault: As `checked` of the first.
    """
    found = [checked()]
    for root in allowed_dirs()[1:]:
        with contextlib.suppress(EnvironmentFault):  # a process that writes there raises it
            found.append(checked(root, quiet=True))
    return found


def in_memory(path: Path) -> str:
    """Return a warning for a directory in memory; "" for any other."""
    if (kind := file_system(path)) not in _MEMORY:
        return ""
    return (
        f"The offload directory {path} is in memory ({kind}): tensors there occupy host memory, not a drive."
    )


def given(path: Path) -> Path:
    """Return the user's directory that contains `path`; a run's folder may be in another run's."""
    return next((each.parent for each in reversed((path, *path.parents)) if each.name.startswith(_RUN)), path)


def _must_not_be_on_network(path: Path, kind: str) -> None:
    if kind in _NETWORK:
        raise _fault(
            f"The offload directory {path} is on a network mount ({kind}).",
            fix="choose a directory on a local drive",
        )


def _must_be_a_plain_directory(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a null byte
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _fault(
            f"The offload directory {str(path)[:200]} cannot be used: {reason}.",
            fix="make it, or choose another",
        ) from None
    if stat.S_ISLNK(mode):
        raise _fault(
            f"The offload directory {path} is a symbolic link.",
            fix=f"give its target: {os.path.realpath(path)}",
        )
    if not stat.S_ISDIR(mode):
        raise _fault(f"The offload directory {path} is a file.", fix="choose a directory")


def _fault(what: str, *, fix: str) -> EnvironmentFault:
    return EnvironmentFault(what, fix=fix, code="MT361")


def file_system(path: Path) -> str:
    """Return the type of the file system of `path` as the kernel names it (`ext4`, `nfs4`), "" if unknown."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    return next((each.kind for each in _mounts() if each.device == wanted), "")


class _Mount(NamedTuple):
    device: str
    at: Path
    kind: str


def _mounts() -> Iterator[_Mount]:
    """Yield the mounts, the last one first; none if the kernel does not list them."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in reversed(lines):
        left, _, right = line.partition(" - ")
        fields = left.split()
        at = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), fields[4])  # a blank is written as \040
        yield _Mount(fields[2], Path(at), right.split()[0])


def _asked(path: Path) -> Iterator[Path]:
    """Yield the places that are accessed on the way to `path`, following links above it; lazily."""
    left, here, links = [*reversed(path.parts[1:])], Path("/"), 0
    while left and links < _MAX_LINKS:
        here = here.parent if (name := left.pop()) == ".." else here / name
        yield here
        if left and (to := _link(here)):
            here, links = here.parent, links + 1
            left += reversed(Path(to).parts)


def _link(path: Path) -> str:
    """Return the target of the link `path`; "" if it is no link."""
    try:
        return os.readlink(path)
    except (OSError, ValueError):  # ValueError: a null byte
        return ""


def _mounted_at(path: Path) -> str:
    """Return `file_system` from the path's text alone, because access to a dead server would hang."""
    path = Path(os.path.normpath(path))
    under = [each for each in _mounts() if path.is_relative_to(each.at)]
    return max(under, key=lambda each: len(each.at.parts)).kind if under else ""


def free_bytes() -> int | None:
    """Return the free bytes of the drives of all allowed directories, dead runs' files included; None if
    unknown.

    Files of resumable runs are not counted.
    """
    drives: dict[int, int] = {}
    try:
        for root in map(Path, allowed_dirs()):
            left = sum(each.n_bytes for each in orphans(root) if not each.resumable)
            there = os.statvfs(root)
            device = os.stat(root).st_dev
            # Directories on one drive share its free bytes.
            drives[device] = max(drives.get(device, 0), there.f_bavail * there.f_frsize) + left
    except (OSError, ValueError):
        return None
    return sum(drives.values()) if drives else None


class RunFolder:
    """Folder of this process, mode 0700, locked while the process lives, removed by `close` or at a normal
    end.

    A resumable one is kept; `remove` removes it.

    Args:
        directory: Its parent; folders of dead runs there that are not resumable are removed first.
        name: Of the parent, for messages.

    Attributes:
        path: The folder.
        kept: By key of a resumable step: the objects that own its places in the folder's files.
    """

    def __init__(self, directory: Path, name: str = "offload directory") -> None:
        self.kept: dict[str, object] = {}
        # First, so that dead runs' files do not fill the drive that this one needs.
        clean(directory, resumable=False)
        with contextlib.ExitStack() as undo:
            try:
                made = Path(tempfile.mkdtemp(prefix=_NEW, dir=directory))
                undo.callback(shutil.rmtree, made, ignore_errors=True)
                lock = os.open(made / _OWNER, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
                undo.callback(os.close, lock)
                # flock, not fcntl locks: those end when any descriptor of the file is closed.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.write(lock, f"{os.getpid()}\n".encode())
                # From the rename on `clean` of other processes checks the folder's lock, already held.
                self.path = made.rename(directory / f"{_RUN}{os.getpid()}-{made.name.removeprefix(_NEW)}")
            except OSError as error:
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                raise _fault(
                    f"Nothing can be made in the {name} {directory}: {error.strerror}.",
                    fix="free space" if full else "choose a directory on a drive that you may write to",
                ) from None
            undo.pop_all()
        self._end = weakref.finalize(self, _remove_own, self.path, lock, os.getpid())

    @classmethod
    def temporary(cls) -> RunFolder:
        """Return a folder in the directory for temporary files (TMPDIR).

        Raises:
            EnvironmentFault: It cannot be made.
        """
        return cls(Path(tempfile.gettempdir()), "directory for temporary files")

    def close(self) -> None:
        """Remove the folder and its content, unless it is resumable."""
        self._end()

    def remove(self) -> None:
        """Remove the folder and its content."""
        for manifest in self.path.glob(f"{MANIFEST}*"):
            manifest.unlink(missing_ok=True)
        self.kept.clear()
        self._end()


def folders_of_own() -> list[RunFolder]:
    """Return a new folder in every allowed directory for a trial's ranks; none if one cannot be used."""
    # Steps kept there are never mistaken for those of the user's own training, and are removed with the
    # folder however those processes end.
    with contextlib.ExitStack() as undo:
        made = []
        for each in allowed_dirs():
            try:
                made.append(RunFolder(checked(each, quiet=True)))
            except EnvironmentFault:  # the process that uses the directory raises it
                return []
            undo.callback(made[-1].remove)
        undo.pop_all()
    return made


def _remove_own(path: Path, lock: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child inherits the lock, and must not remove the folder
        if not is_resumable(path):
            shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def flush(folder: Path) -> None:
    """Return once the names in `folder` are on the drive."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def is_resumable(path: Path) -> bool:
    """Return whether the run of the folder `path` has a manifest."""
    return any(path.glob(f"{MANIFEST}*"))


@dataclass(frozen=True)
class Left:
    """Folder of a dead run."""

    path: Path
    n_bytes: int
    resumable: bool = False
    """Training can resume from it."""


def run_folders(directory: Path) -> list[Path]:
    """Return the folders of this user's runs in `directory`, of living and dead processes."""
    with contextlib.suppress(OSError):
        found = [
            each
            for each in os.scandir(directory)
            if each.name.startswith(_RUN) and each.is_dir(follow_symlinks=False)
        ]
        return [Path(each.path) for each in found if each.stat(follow_symlinks=False).st_uid == os.getuid()]
    return []


def orphans(directory: Path) -> Iterator[Left]:
    """Yield the folders in `directory` whose process has ended, without those of other users and links."""
    entries: list[os.DirEntry[str]] = []
    with contextlib.suppress(OSError):
        entries += sorted(os.scandir(directory), key=lambda each: each.name)
    for entry in entries:
        left = None
        with contextlib.suppress(OSError):  # another run may be removing it
            left = _left_in(entry)
        if left is not None:
            yield left


def _left_in(entry: os.DirEntry[str]) -> Left | None:
    mine = entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.getuid()
    path = Path(entry.path)
    if not mine or not entry.name.startswith((_RUN, _NEW)) or not _is_dead(path):
        return None
    return Left(path, sum(each.lstat().st_blocks * 512 for each in path.rglob("*")), is_resumable(path))


def _is_dead(path: Path) -> bool:
    if path.name.startswith(_NEW) and time.time() - path.lstat().st_mtime < _BEING_MADE_S:
        return False  # its process has made it and not locked it yet
    if (lock := _lock(path, fcntl.LOCK_SH)) is not None:  # shared, because others may check it as well
        os.close(lock)
        return True
    return not (path / _OWNER).is_file()


def locked(path: Path, patience_s: float = 0.0) -> int | None:
    """Return the lock of the folder `path`, held until it is closed; None if its process lives."""
    # A process that checks whether the folder is dead holds it for a moment, hence the patience.
    stop_s = time.monotonic() + patience_s
    while (lock := _lock(path, fcntl.LOCK_EX)) is None and time.monotonic() < stop_s:
        time.sleep(0.01)
    return lock


def _lock(path: Path, how: int) -> int | None:
    try:
        lock = os.open(path / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
        # Locked too late: the folder was removed, and another one may have its name.
        if not os.path.samestat(os.fstat(lock), os.lstat(path / _OWNER)):
            raise FileNotFoundError
    except OSError:  # its owner lives, or it was removed before the lock was taken
        os.close(lock)
        return None
    return lock


def clean(directory: Path, *, resumable: bool = True) -> list[Left]:
    """Remove the folders of dead runs in `directory`, resumable ones only if `resumable`; return them."""
    removed = []
    for each in list(orphans(directory)):
        if (resumable or not each.resumable) and _removed(each.path, resumable):
            removed.append(each)
    return removed


def remove_folder(path: Path) -> None:
    """Remove the folder of a run, manifests first: a crash leaves none that names removed tensors."""
    with contextlib.suppress(OSError):
        for manifest in path.glob(f"{MANIFEST}*"):
            manifest.unlink(missing_ok=True)
        flush(path)
    shutil.rmtree(path, ignore_errors=True)


def _removed(path: Path, resumable: bool) -> bool:
    """Remove the folder `path`, unless a run has locked it or made it resumable; return whether it did."""
    lock = locked(path, _GLANCE_S)
    if lock is None and (path / _OWNER).exists():
        return False
    try:
        if resumable or not is_resumable(path):
            remove_folder(path)
    finally:
        if lock is not None:
            os.close(lock)
    return not path.exists()
