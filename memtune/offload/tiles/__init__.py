"""Weights of large linear layers loaded tile by tile (ZeRO-Infinity, section 5.1.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.offload.tiles.tiled_shards_pass import tile_rows, tileable_rows
    from memtune.offload.tiles.tiled_weights import install, linear_layers, sharded_tiles
    from memtune.offload.tiles.tiled_weights_pass import tile_weights, tileable, weights_before_biases
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "install",
    "linear_layers",
    "sharded_tiles",
    "tile_rows",
    "tile_weights",
    "tileable",
    "tileable_rows",
    "weights_before_biases",
]
