"""Optuna's studies in memory instead of SQLite files, which take half of the time of a simulated search.

For tests of what a search decides; those of interrupted, damaged and resumed studies have files
(test_study_resume.py, test_study_store.py).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from optuna.storages import InMemoryStorage

from memtune.autotune.space import sampler


class _Study(InMemoryStorage):
    """With what a search calls of a storage on disk."""

    engine = SimpleNamespace(dispose=lambda: None)


def install(patch: pytest.MonkeyPatch) -> None:
    """Keep studies in memory until `patch` is undone: a path is one study, as with files."""
    made: dict[Path, _Study] = {}
    patch.setattr(sampler, "_storage", lambda path: made.setdefault(path.absolute(), _Study()))
