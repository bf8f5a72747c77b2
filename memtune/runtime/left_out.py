"""The calls that a recomputed region neither keeps nor runs again.

What a call that is *left out* made is needed by nothing that runs again, so the second run gets memory of the same shape
that nobody has written; what autograd saved of it stays. The first run checks that nothing needs it, whatever the plan
says: if something does, all calls run again.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from memtune.calls import SHAPE_ALONE, Call
from memtune.runtime.moved import View, id_of
from memtune.runtime.random_state import RandomState

NEVER = sys.maxsize


@dataclass(frozen=True)
class _Shape:
    view: View
    device: torch.device

    def unwritten(self) -> Tensor:
        return torch.empty_strided(self.view.size, self.view.stride, dtype=self.view.dtype, device=self.device)


@dataclass(frozen=True)
class _Left:
    out: Any
    """What the call returned, `_Shape`s in place of tensors; None for one that wrote in place."""
    random: RandomState | None
    """What it left of the random state, if it may have drawn."""


class LeftOut:
    """The calls that one run of a region leaves out, and what they would have made."""

    def __init__(self) -> None:
        self._needed = NEVER
        self._all_run = False
        self._calls: dict[Call, _Left] = {}
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def leave_out(self, call: Call, func: Any, args: Any, out: Any, *, before: int, random: RandomState | None) -> None:
        """Note that `call`, which ran `func` on `args` and returned `out`, is not to run again.

        `before`, here and below: how many recomputed tensors had been saved. `random`: the state now, if `func` may draw.
        """
        if func._schema.is_mutable:
            if not all(self.made(t) for t in _written(func, args)):
                self.is_needed(before)
            self._calls[call] = _Left(None, random)
            return
        self._calls[call] = _Left(
            tree_map(lambda t: _Shape(View.describe(t), t.device) if isinstance(t, Tensor) else t, out), random
        )
        self._note(out)

    def read_by(self, func: Any, args: Any, out: Any, *, before: int) -> None:
        """`func` runs again and read `args`: it may look at what is left out and at its shape, but not at its values.

        memtune's own ops are copies of what autograd saved, which the second run does not repeat.
        """
        if func.namespace in ("prim", "memtune") or str(func) in SHAPE_ALONE:
            return
        if not any(self.made(t) for t in tree_leaves(args) if isinstance(t, Tensor)):
            return
        outs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if func._schema.is_mutable or not outs or not all(self.made(t) for t in outs):
            self.is_needed(before)

    def is_needed(self, before: int) -> None:
        """Something that runs again needs what was to be left out."""
        self._needed = min(self._needed, before)

    def made(self, tensor: Tensor) -> bool:
        """`tensor` looks into what a call that is left out made, in the run at hand."""
        found = self._made.get(id_of(tensor))
        return found is not None and found() is tensor.untyped_storage()

    def settle(self, last: int, *, all_kept: bool) -> None:
        """The first run is over.

        Args:
            last: Number of the last recomputed tensor that is wanted: what runs later does not count.
            all_kept: Nothing that was to be kept has been written into since.
        """
        self._made = {}
        self._all_run = self._needed <= last or not all_kept

    def __contains__(self, call: Call) -> bool:
        """Whether the second run leaves `call` out."""
        return call in self._calls

    def take(self, call: Call, func: Any, args: Any, kwargs: Any) -> Any:
        """Unwritten memory as `call` made, for the second run; for one that writes in place, what it was given."""
        left = self._calls[call]
        if self._all_run:
            out = func(*args, **kwargs)
        elif left.out is None:
            return args[0]
        else:
            if left.random is not None:
                left.random.continue_from()
            out = tree_map(lambda shape: shape.unwritten() if isinstance(shape, _Shape) else shape, left.out)
        if not func._schema.is_mutable:
            self._note(out)
        return out

    def _note(self, out: Any) -> None:
        self._made |= {id_of(t): weakref.ref(t.untyped_storage()) for t in tree_leaves(out) if isinstance(t, Tensor)}


def _written(func: Any, args: Any) -> list[Tensor]:
    arguments = func._schema.arguments
    written = [given for given, known in zip(args, arguments, strict=False) if known.alias_info and known.alias_info.is_write]
    return [t for t in written if isinstance(t, Tensor)]
