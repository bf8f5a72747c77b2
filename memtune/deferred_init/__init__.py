"""Deferred initialization: models without memory, filled with the shards that a rank holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.deferred_init.deferred_init import (
        OneFakeMode,
        Piece,
        agreed_state,
        construction_of,
        deferred,
        fill,
        fill_shards,
        keep_only,
        require_untouched,
    )
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "OneFakeMode",
    "Piece",
    "agreed_state",
    "construction_of",
    "deferred",
    "fill",
    "fill_shards",
    "keep_only",
    "require_untouched",
]
