"""torch.compile around a model or its blocks, and graph passes for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.compile.partitioner import LEAST_BUDGET as LEAST_BUDGET, LOW_PEAK as LOW_PEAK
    from memtune.compile.regions import (
        CompiledModel as CompiledModel,
        Compiling as Compiling,
        compile_regions as compile_regions,
    )
else:
    __getattr__ = open_door(__name__)
