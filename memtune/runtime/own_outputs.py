"""What a pipeline stage's own blocks have returned: the activations that this rank alone decides about.

What a stage is given by others, and what the code around the blocks makes (masks, tables of positions), is held there as well:
moving it would free nothing.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memtune.runtime.moved import id_of


class OwnOutputs:
    """Of the forward of one micro-batch through one stage."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[torch.UntypedStorage]] = []

    def begin(self) -> None:
        """A forward of the stage begins."""
        self._made = []

    def returned(self, out: Any) -> None:
        """A block has returned `out`."""
        tensors = (each for each in tree_leaves(out) if isinstance(each, torch.Tensor))
        self._made += [weakref.ref(each.untyped_storage()) for each in tensors]

    def others(self, given: Any) -> frozenset[int]:
        """Storages among what a block is given that no block of the stage has returned."""
        own = {id(storage) for made in self._made if (storage := made()) is not None}
        tensors = (each for each in tree_leaves(given) if isinstance(each, torch.Tensor))
        return frozenset(id_of(each) for each in tensors if id(each.untyped_storage()) not in own)
