"""Recomputation of parts of forward in backward, and the activation table of keep, recompute and offload
claims.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.activations.recompute import activation_table as activation_table
    from memtune.activations.recompute.activation_table import ActivationTable
    from memtune.activations.recompute.recompute_pass import recompute_blocks, spoiled
    from memtune.activations.recompute.region_contract import RegionContract, RegionRun
    from memtune.activations.recompute.rng_state_pass import STATE_BYTES, states_of, states_online
    from memtune.activations.recompute.saved_outputs import Keep
    from memtune.activations.recompute.user_checkpoint import (
        autograd_saves,
        hooks_of_table,
        saves_are_dropped,
        without_hooks,
    )
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "STATE_BYTES",
    "ActivationTable",
    "Keep",
    "RegionContract",
    "RegionRun",
    "activation_table",
    "autograd_saves",
    "hooks_of_table",
    "recompute_blocks",
    "saves_are_dropped",
    "spoiled",
    "states_of",
    "states_online",
    "without_hooks",
]
