"""Paths of the small workloads of the tests: `from zoo_paths import ZOO` (pytest is configured with
pythonpath = ["tests"]).
"""

from pathlib import Path

_HERE = Path(__file__).parents[1] / "zoo"

ZOO: dict[str, Path] = {path.stem: path for path in sorted(_HERE.glob("*.py"))}
"""Workloads that train: name → model.py."""

BAD: dict[str, Path] = {path.stem: path for path in sorted((_HERE / "bad").glob("*.py"))}
"""Files that must each end in one clear message: name → model.py."""
