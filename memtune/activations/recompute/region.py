"""Region of the activation table: a block and the claims on the tensors that its forward saves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from torch import Generator, Tensor, nn

from memtune.activations.offload import id_of
from memtune.activations.recompute.buffer_mutation import only_written
from memtune.activations.recompute.fingerprint import Compared
from memtune.activations.recompute.saved_outputs import Keep
from memtune.program import KEEP, OpAddress, SavedTensorPolicy
from memtune.runtime import NoteGenerators, RandomState, local


class ModuleState:
    """Parameters and buffers of `module` by name; the tree of its modules is walked again if it has changed.

    Tensors are looked up at each call: sharding and offload put others in their place between two uses.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._walk()

    def _walk(self) -> None:
        self._modules = [
            (f"{name}." if name else "", each, list(each._modules.values()))
            for name, each in self._module.named_modules()
        ]
        self.only_written = only_written(self._module)
        """Buffers that a forward may write but does not read."""

    def refresh(self) -> None:
        """Walk the modules again if one of them has other children."""
        for _, each, children in self._modules:
            if len(children) != len(each._modules) or any(
                one is not other for one, other in zip(children, each._modules.values(), strict=True)
            ):
                self._walk()
                return

    def names(self) -> dict[int, str]:
        """Return the names of all parameters and buffers by `id_of`."""
        found: dict[int, str] = {}
        for prefix, each, _ in self._modules:
            for tensors in (each._parameters, each._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        found.setdefault(id_of(local(tensor)), prefix + name)
        return found

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers by name, each once."""
        seen, found = set[int](), dict[str, Tensor]()
        for prefix, each, _ in self._modules:
            for name, buffer in each._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    found[prefix + name] = buffer
        return found


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
    """Calls whose outputs may be offloaded, `INPUTS` for the inputs of the region; None for all that is
    claimable.
    """
    watched: bool = False
    """Its first run was checked for collectives and generators."""
    generators: list[Generator] = field(default_factory=list)
    """The user's generators from which its forward may draw; known after its first run."""
    draws: bool = False
    """An op of its first run drew random numbers, or a later run did."""
    last_unpacked: int = -1
    """Number of the saved tensor that backward unpacked last after the latest run; the next run compares its
    values.
    """
    compared: Compared | None = None
    """Values of its latest second run, which are being copied from the device."""
    reads_back: frozenset[str] | None = None
    """Buffers that its forward changes and may read, as far as its runs have shown; None before the first
    run.
    """
    is_quick: bool = False
    """A second run equalled its first in full, and in the quick form of fingerprints, which later runs
    compare.
    """
    value_checks: int = 0
    """Number of runs so far whose values could be compared."""

    @property
    def recompute(self) -> bool:
        """True if its forward runs again in backward."""
        return self.inner.runs_again

    @cached_property
    def state(self) -> ModuleState:
        """Parameters and buffers of the block."""
        return ModuleState(self.module)

    def checks_values(self, inputs: Iterable[Tensor]) -> bool:
        """Return whether this run compares values: each run on CPU, else the first runs and then one in
        `_VALUES_EVERY`, other blocks at other runs, since each comparison issues kernels.
        """
        self.value_checks += 1
        if self.value_checks <= _VALUES_FIRST or all(each.device.type == "cpu" for each in inputs):
            return True
        # By index as well, or all blocks would issue their comparisons in the same step.
        return (self.value_checks + self.index) % _VALUES_EVERY == 0

    def random_state(self) -> RandomState:
        """Return the random state at the start of a run; the pass counts it as host memory if the region
        draws.
        """
        return (RandomState.kept if self.draws else RandomState.capture)(self.module, self.generators)

    def needed(self, state: RandomState | None, noted: NoteGenerators | None) -> RandomState | None:
        """Return `state` of a run that is over, or None if a second run does not draw from it.

        An op may draw and restore the generator's state (`fork_rng`). The generators do not show that, but
        `noted` of the first run does.
        """
        if state is not None and not self.draws:
            self.draws = (noted is not None and noted.draws) or not state.is_now(self.module)
        return state if self.draws else None


@dataclass
class Traffic:
    """Counters of the table's work, for the audit."""

    forwards: set[str] = field(default_factory=set)
    """Names of the claimed regions that ran."""
    recomputed_regions: set[str] = field(default_factory=set)
    moved_bytes: int = 0
