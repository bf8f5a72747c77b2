"""The folder of a study.

A lock, its fingerprint, and files that a crash leaves either old or new, never torn.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import socket
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from memtune.config import TunedConfig, file_texts, save, save_private
from memtune.errors import EnvironmentFault, UsageError, existing_file

SCHEMA = 1
HOME = Path(".memtune")
RESULT = "result.json"
"""Outcome of a finished search; absent before."""
TIMELINES = "timelines.json"
"""Simulated timelines of a search that wrote a config; read by the report."""
_NETWORK = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "afs",
    "9p",
    "fuse.sshfs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
}


@dataclass
class StudyFolder:
    """`.memtune/<name>/` with study.db, events.jsonl, study.json (the fingerprint) and logs/.

    As a context manager it locks the folder; the kernel releases the lock if the process dies.
    """

    path: Path

    def __post_init__(self) -> None:
        self._lock = FileLock(self.path / "lock", mode=0o600)

    @property
    def database(self) -> Path:
        """Return the path of the Optuna study."""
        return self.path / "study.db"

    @property
    def events(self) -> Path:
        """Return the path of the event log."""
        return self.path / "events.jsonl"

    @property
    def logs(self) -> Path:
        """Return the folder of the trials' output."""
        return self.path / "logs"

    @property
    def name(self) -> str:
        """Return the name of the study."""
        return self.path.name

    def save_text(self, name: str, text: str) -> None:
        """Write `text` to the study's file `name`, atomically and for the user only."""
        save_private(self.path / name, text.encode())

    def __enter__(self) -> StudyFolder:
        """Lock the study.

        Raise EnvironmentFault (MT401) if another search has it or the folder is not writable.
        """
        try:
            # Logs and the study hold what trials print. A parent made here is private too.
            for each in (self.path.parent, self.path):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
            for partial in self.path.glob(".*.tmp*"):  # of a search that was killed while it wrote
                partial.unlink(missing_ok=True)
            self.save_text(
                "owner.json",
                _json({"pid": os.getpid(), "host": socket.gethostname(), "since": _clock()}),
            )
        except Timeout:
            raise self._in_use() from None
        except OSError as error:
            raise EnvironmentFault(
                f"The study folder {self.path} cannot be written.",
                evidence=str(error),
                fix="run where you may write, or name another folder with --study",
                code="MT404",
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        """Unlock the study."""
        (self.path / "owner.json").unlink(missing_ok=True)
        self._lock.release()

    def discard(self) -> None:
        """Remove a folder in which nothing was started."""
        shutil.rmtree(self.path, ignore_errors=True)

    def fingerprint(self) -> dict[str, Any] | None:
        """Return the fingerprint: workload, options and versions of the study, or None for a new one."""
        return read_json(self.path / "study.json")

    def check_new(self) -> None:
        """Raise UsageError if the study exists."""
        if self.fingerprint() is not None:
            raise UsageError(
                f"Study '{self.name}' exists already.",
                evidence=str(self.path),
                fix="add --resume, or --study another",
                code="MT405",
            )

    def claim(self, fingerprint: Mapping[str, Any], *, resume: bool) -> bool:
        """Start the study or resume it; return whether it existed.

        Raises:
            UsageError: The study exists and `resume` was not requested, or its fingerprint differs.
        """
        before = self.fingerprint()
        if before is None:
            self.save_text("study.json", _json({"memtune": SCHEMA, **fingerprint}))
            return False
        if not resume:
            self.check_new()
        self._require_equal(before, {"memtune": SCHEMA, **fingerprint})
        return True

    def check_unchanged(self, file: Path, options: Mapping[str, Any]) -> None:
        """Compare options, the model's file and the files that it imported with the study's; run no code.

        Raises:
            UsageError: One has changed.
        """
        fingerprint = self.fingerprint() or {}
        asked, workload = fingerprint.get("options"), fingerprint.get("workload")
        if isinstance(asked, dict):
            then = {name: asked.get(name) for name in options}
            self._require_equal({"options": then}, {"options": options})
        imports = workload.get("imports") if isinstance(workload, dict) else None
        if not isinstance(workload, dict) or not isinstance(imports, dict):
            return
        then = {"source_sha256": workload.get("source_sha256"), "imports": imports}
        now = {
            "source_sha256": _sha256_of(file),
            "imports": {name: _sha256_of(file.parent / name) for name in imports},
        }
        self._require_equal({"workload": then}, {"workload": now})

    def _require_equal(self, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        changed = differences(then, now)
        if changed:
            raise UsageError(
                f"Study '{self.name}' was made for another setup; its trials would not be comparable.",
                evidence="; ".join(changed),
                fix="undo the change, or start a new study with --study another",
                code="MT406",
            )

    def save_config(self, config: TunedConfig, out: Path) -> Path:
        """Write `config` to `out`, after noting its hash."""
        # A crash leaves no config that the study does not recognise.
        text, _ = file_texts(config, out)
        # The hashes of all versions: after a crash between the two writes the old file is still recognised.
        known = {*self._written(), _sha256(text.encode())}
        self.save_text("written.json", _json({"sha256": sorted(known)}))
        return save(config, out)

    def wrote(self, path: Path) -> bool:
        """Return whether the file at `path` was written by this study and is unchanged."""
        with contextlib.suppress(OSError):
            return _sha256(path.read_bytes()) in self._written()
        return False

    def _written(self) -> list[str]:
        known = (read_json(self.path / "written.json") or {}).get("sha256")
        return [str(each) for each in known] if isinstance(known, list) else []

    def check_database(self) -> Path | None:
        """Rename a damaged database to `study.db.corrupt`; return its new path, None if it was intact."""
        if not self.database.exists():
            return None
        try:
            with contextlib.closing(sqlite3.connect(self.database)) as connection:
                sound = connection.execute("PRAGMA quick_check").fetchone() == ("ok",)
        except UnicodeDecodeError:  # of SQLite's message, with a damaged name in it
            sound = False
        except sqlite3.DatabaseError as error:
            from memtune.autotune.space import is_unreached  # loads torch, which refusals of a command do not

            sound = is_unreached(error)  # the next open raises it
        return None if sound else self.set_database_aside()

    def set_database_aside(self) -> Path:
        """Rename the database to `study.db.corrupt`; return its new path."""
        aside = self.database.with_suffix(".db.corrupt")
        os.replace(self.database, aside)
        # SQLite would play a journal of the damaged database back into a new one of its name.
        for leftover in ("study.db-journal", "study.db-wal", "study.db-shm"):
            (self.path / leftover).unlink(missing_ok=True)
        return aside

    def network(self) -> str | None:
        """Return the kind of network file system, on which locks and SQLite are safe from one host only."""
        with contextlib.suppress(OSError):
            # The longest mount point above the folder is the one that it is on.
            best = ("", "")
            for line in Path("/proc/self/mounts").read_text().splitlines():
                _, mount, kind, *_ = line.split()
                if len(mount) > len(best[0]) and self.path.resolve().is_relative_to(mount):
                    best = (mount, kind)
            return best[1] if best[1] in _NETWORK else None
        return None

    def free_bytes(self) -> int:
        """Return the free bytes on its disk."""
        return shutil.disk_usage(self.path).free

    def _in_use(self) -> EnvironmentFault:
        owner = read_json(self.path / "owner.json") or {}
        holder = f"pid {owner.get('pid', '?')} on {owner.get('host', '?')} since {owner.get('since', '?')}"
        return EnvironmentFault(
            f"Study '{self.name}' is in use by {holder}.",
            fix=f"memtune watch {self.path}, or --study another",
            code="MT401",
        )


def named_study(name: str) -> StudyFolder:
    """Return the folder of a study below `.memtune/`, or of a path."""
    named = Path(name)
    return StudyFolder(named if len(named.parts) > 1 or named.is_absolute() else HOME / named)


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the changes, one line per field: `options.goal: throughput → memory`."""
    found = []
    for key in dict.fromkeys((*before, *now)):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            found.append(f"{prefix}{key}: {_shown(old)} → {_shown(new)}")
    return found


def _shown(value: object) -> str:
    text = "unset" if value is None else str(value)
    return text[:12] + "…" if len(text) > 40 else text


def versions() -> dict[str, str]:
    """Return versions of everything that a measurement depends on."""
    import torch

    import memtune
    from memtune.device import accelerator

    return {
        "memtune": memtune.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "driver": accelerator.runtime() or "none",
    }


def has_owner(folder: Path) -> bool:
    """Return whether a search works on the study in `folder`; one on another host is believed to be alive."""
    owner = read_json(folder / "owner.json") or {}
    pid = owner.get("pid")
    if not isinstance(pid, int):
        return False
    if owner.get("host") != socket.gethostname():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        return True
    return True


def check_writable(path: Path, *, force: bool, evidence: str = "") -> None:
    """Check at the start, not after the search, that `path` can be written.

    Args:
        path: Of the config.
        force: Whether an existing file may be replaced.
        evidence: Reason why it may not.

    Raises:
        UsageError: It exists and `force` is not set.
    """
    if path.is_dir():
        raise EnvironmentFault(f"{path} is a folder.", fix="name a file with --out", code="MT407")
    if path.exists() and not force:
        raise existing_file(path, f"add --force to replace it, or --out another{path.suffix}", evidence)
    folder = path.parent
    probe = folder / f".{path.name}.{os.getpid()}.probe"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise EnvironmentFault(
            f"{path} cannot be written.",
            evidence=f"{folder.absolute()}: {error.strerror}.",
            fix="name a file in a folder of yours with --out",
            code="MT407",
        ) from error


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None where there is no file or it holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _sha256_of(path: Path) -> str | None:
    try:
        return _sha256(path.read_bytes())
    except OSError:
        return None


def _clock() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
