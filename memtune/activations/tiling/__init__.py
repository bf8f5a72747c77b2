"""Losses, MLPs and norms computed tile by tile, so that large intermediate tensors never exist in full."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.activations.tiling import tiled_loss as tiled_loss
    from memtune.activations.tiling.cross_entropy_pattern import (
        LossPattern as LossPattern,
        loss_pattern as loss_pattern,
    )
    from memtune.activations.tiling.deferred_logits import install_lazy_head as install_lazy_head
    from memtune.activations.tiling.micro_tensors_pass import split_regions as split_regions
    from memtune.activations.tiling.position_wise_pattern import (
        PositionWise as PositionWise,
        by_sample as by_sample,
        norms as norms,
        position_wise as position_wise,
    )
    from memtune.activations.tiling.step_rows import made_by as made_by
    from memtune.activations.tiling.tiled_loss_pass import tile_loss as tile_loss
    from memtune.activations.tiling.tiled_region import install_tiled_modules as install_tiled_modules
    from memtune.activations.tiling.tiled_region_pass import (
        Tiling as Tiling,
        rows_of_parts as rows_of_parts,
        tile_regions as tile_regions,
    )
else:
    __getattr__ = open_door(__name__)
