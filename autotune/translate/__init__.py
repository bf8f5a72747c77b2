"""Translate a step recorded on CPU into the step that CUDA runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.autotune.translate import translation_table as translation_table
    from memtune.autotune.translate.inductor_fusion import fused as fused
    from memtune.autotune.translate.translation import (
        COMPOSED_ATTENTION as COMPOSED_ATTENTION,
        translate as translate,
    )
    from memtune.autotune.translate.translation_table import FOREACH_OPTIMIZERS as FOREACH_OPTIMIZERS
else:
    __getattr__ = open_door(__name__)
