"""Weights of large linear layers loaded tile by tile (ZeRO-Infinity, section 5.1.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.offload.tiles.tiled_weights import (
        TileStore as TileStore,
        install as install,
        linear_layers as linear_layers,
        sharded_tiles as sharded_tiles,
    )
    from memtune.offload.tiles.tiled_weights_pass import (
        tile_rows as tile_rows,
        tile_weights as tile_weights,
        tileable as tileable,
        tileable_rows as tileable_rows,
        weights_before_biases as weights_before_biases,
    )
else:
    __getattr__ = open_door(__name__)
