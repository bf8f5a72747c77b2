"""Counts of a step's work in Python: ops that a dispatch mode sees, whatever its function is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memtune.runtime import EagerRecorder, OpVisitor

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


class Named(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Named, lambda: EagerRecorder(OpVisitor())], ids=["named", "alias"])
def test_counts_include_ops_of_a_mode(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from overhead_clock import counts_of  # type: ignore[import-not-found]

    x = torch.ones(3)

    def way() -> None:
        with mode():
            x.mul(2).add(1)

    counts = counts_of(way)
    assert (counts.dispatches, counts.mode_entries) == (2, 1)
