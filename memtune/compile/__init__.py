"""torch.compile around a model or its blocks, and graph passes for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.compile.partitioner import LEAST_BUDGET, LOW_PEAK
    from memtune.compile.regions import CompiledModel, Compiling, compile_regions
else:
    __getattr__ = open_door(__name__)

__all__ = ["LEAST_BUDGET", "LOW_PEAK", "CompiledModel", "Compiling", "compile_regions"]
