"""Deferred initialization: models without memory, filled with the shards that a rank holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.deferred_init.construction import OneFakeMode as OneFakeMode
    from memtune.deferred_init.deferred_init import (
        Piece as Piece,
        agreed_state as agreed_state,
        construction_of as construction_of,
        deferred as deferred,
        fill as fill,
        fill_shards as fill_shards,
        keep_only as keep_only,
        require_untouched as require_untouched,
    )
else:
    __getattr__ = open_door(__name__)
