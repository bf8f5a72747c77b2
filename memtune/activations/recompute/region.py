"""Region of the activation table: a block and the claims on the tensors that its forward saves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor, nn

from memtune.activations.recompute.fingerprint import Compared
from memtune.activations.recompute.region_contract import RegionContract
from memtune.activations.recompute.saved_outputs import Keep
from memtune.program import KEEP, OpAddress, SavedTensorPolicy

_VALUES_FIRST, _VALUES_EVERY = 8, 16


@dataclass
class Region:
    """A block and the claims on the tensors that its forward saves."""

    name: str
    module: nn.Module
    index: int
    inner: SavedTensorPolicy = KEEP
    """Policy of the tensors that it makes."""
    keep: Keep | None = None
    """Selects the ops whose outputs a recomputed region keeps; None keeps none and needs no dispatch mode."""
    policy: SavedTensorPolicy = KEEP
    """Policy of its claimable tensors."""
    move: float = 0.0
    """Fraction of the claimable bytes that `policy` packs."""
    min_bytes: int = 0
    """Smaller tensors are kept as they are."""
    only: frozenset[OpAddress] | None = None
    """Calls with outputs to offload, `INPUTS` for the region's inputs; None: all that is claimable."""
    watched: bool = False
    """Its first run was checked for collectives and generators."""
    last_unpacked: int = -1
    """Saved tensor that backward unpacked last after the latest run; the next run compares its values."""
    compared: Compared | None = None
    """Values of its latest second run, which are being copied from the device."""
    is_quick: bool = False
    """A second run equalled its first in full; later runs compare quick fingerprints."""
    value_checks: int = 0
    """Number of runs so far whose values could be compared."""

    @property
    def recompute(self) -> bool:
        """True if its forward runs again in backward."""
        return self.inner.runs_again

    @cached_property
    def contract(self) -> RegionContract:
        """Facts about its forward."""
        return RegionContract(self.module)

    def checks_values(self, inputs: Iterable[Tensor]) -> bool:
        """Return whether this run compares values."""
        # On CPU each does, else the first runs and then one in `_VALUES_EVERY`, other blocks at other runs,
        # since each comparison issues kernels.
        self.value_checks += 1
        if self.value_checks <= _VALUES_FIRST or all(each.device.type == "cpu" for each in inputs):
            return True
        # By index as well, or all blocks would issue their comparisons in the same step.
        return (self.value_checks + self.index) % _VALUES_EVERY == 0


@dataclass
class Traffic:
    """Counters of the table's work, for the audit."""

    forwards: set[str] = field(default_factory=set)
    """Names of the claimed regions that ran."""
    recomputed_regions: set[str] = field(default_factory=set)
    moved_bytes: int = 0
