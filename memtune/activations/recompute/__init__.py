"""Recomputation in backward, and the activation table of keep, recompute and offload claims."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.activations.recompute import activation_table as activation_table
    from memtune.activations.recompute.activation_table import ActivationTable as ActivationTable
    from memtune.activations.recompute.recompute_pass import (
        recompute_blocks as recompute_blocks,
        spoiled as spoiled,
    )
    from memtune.activations.recompute.region_contract import (
        RegionContract as RegionContract,
        RegionRun as RegionRun,
    )
    from memtune.activations.recompute.rng_state_pass import (
        STATE_BYTES as STATE_BYTES,
        states_of as states_of,
        states_online as states_online,
    )
    from memtune.activations.recompute.saved_outputs import Keep as Keep
    from memtune.activations.recompute.user_checkpoint import (
        autograd_saves as autograd_saves,
        hooks_of_table as hooks_of_table,
        saves_are_dropped as saves_are_dropped,
        without_hooks as without_hooks,
    )
else:
    __getattr__ = open_door(__name__)
