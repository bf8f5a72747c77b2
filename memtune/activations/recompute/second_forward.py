"""Second run of a region's forward: compares the tensors that it saves with the first run's, and stores them
for backward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from memtune.activations.offload import OffloadedTensor, id_of
from memtune.activations.recompute.fingerprint import Compared, difference, magnitude
from memtune.errors import ApplyError

if TYPE_CHECKING:
    from memtune.activations.recompute.activation_table import _Frame as Frame


_SAME_EACH_TIME = (
    "its forward must do the same each time it runs; choose recompute: {kind: none} if it cannot"
)
_COMPILE_IN_CONFIG = "execution: {compile: …} in the config, not torch.compile, which compiles the runs apart"


class Replay:
    """Pack hook of the second run, which it stops after the last tensor that backward needs."""

    def __init__(self, frame: Frame, inputs: set[int]) -> None:
        self._frame, self._inputs, self.count = frame, inputs, 0
        self._fixed, self._keeps = frame.fixed, bool(frame.kept.calls) or not frame.skipped.is_empty
        self._fingerprinter = frame.fingerprinter()
        # Tensors behind it have no reader, so the run ends there (early stop).
        self.enough = max(frame.wanted) + 1

    def pack(self, tensor: Tensor) -> int:
        """Return the number of a saved tensor, stored for backward; -1 for one that is not recomputed."""
        key = id_of(tensor)
        if key in self._fixed:
            self._fingerprinter.passes(key)
            return -1
        # The same tests in the same order as `_Frame.pack`: both runs must give a tensor the same number.
        if key in self._inputs or not is_plain(tensor) or (self._keeps and self._frame.is_kept(tensor)):
            return -1
        self._compare(tensor)
        self._frame.keep_back(self.count, tensor.detach())
        self.count += 1
        if self.count == self.enough:
            # An exception is the only way out of the user's code; nothing in it may need to finish.
            raise StopReplay
        return self.count - 1

    def _compare(self, tensor: Tensor) -> None:
        """Compare `tensor` with the first run's: shape, type, the ops that led to it, its magnitude.

        Raises:
            ApplyError: They differ, so the forward is not deterministic.
        """
        before, now = self._frame.fingerprints[self.count], self._fingerprinter.fingerprint(tensor)
        if before != now:
            was, is_now = difference(before, now)
            raise ApplyError(
                f"{self._frame.region.name} ran other ops when it was run again: {is_now or 'nothing'} where"
                f" the first run had {was or 'nothing'}.",
                evidence=(
                    f"Saved tensor {self.count} was {before.dtype} {list(before.size)} and is {now.dtype}"
                    f" {list(now.size)}." + (" torch.compile has compiled it." if _is_compiled() else "")
                ),
                fix=_COMPILE_IN_CONFIG if _is_compiled() else _SAME_EACH_TIME,
                code="MT307",
            )
        if self._frame.magnitudes and self.count in self._frame.magnitudes:
            region = self._frame.region
            compared = Compared(
                region.name, self.count, now, self._frame.magnitudes[self.count], magnitude(tensor)
            )
            # On CPU the values are there; on a GPU the host would wait for all kernels issued so far.
            if len(self._frame.magnitudes) > 1 or tensor.device.type == "cpu":
                compared.check()
            else:
                region.compared = compared.sent()

    def settle(self) -> None:
        """After a run compared in full: compare the quick form from now on if it did not differ either."""
        if not self._frame.is_quick:
            before, now = self._frame.quick, self._fingerprinter.quick
            self._frame.region.is_quick = before[: len(now)] == now


class StopReplay(Exception):
    """Ends the second run after the last tensor that backward needs."""


def is_plain(value: Any) -> bool:
    """Return whether `value` is a strided tensor and no DTensor."""
    if type(value) is Tensor:  # most are
        return value.layout is torch.strided
    return isinstance(value, Tensor) and value.layout is torch.strided and not hasattr(value, "to_local")


def refuse_unpack(packed: int) -> Tensor:
    """Refuse to unpack a tensor of the second run's graph, through which no backward runs.

    Raises:
        ApplyError: Always.
    """
    raise ApplyError(
        "backward ran through the graph of a recomputation.", fix="report this as a bug", code="MT308"
    )


class CallArguments:
    """Arguments of a call as the call began, taken apart.

    Containers are made again only for another call: those of the user check what they hold (PackedSequence),
    and the call may change them.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.leaves: list[Any] = [*args, *kwargs.values()]
        self._count, self._names, self._spec = len(args), tuple(kwargs), None
        if not all(isinstance(each, _LEAVES) for each in self.leaves):  # those of most blocks need no walk
            self.leaves, self._spec = tree_flatten((args, kwargs))

    def convert(self, convert: Callable[[Any], Any]) -> None:
        """Replace each leaf by `convert(leaf)`."""
        self.leaves = [convert(each) for each in self.leaves]

    def made(self, convert: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any], list[Any]]:
        """Return args and kwargs of converted leaves, and these."""
        leaves = [convert(each) for each in self.leaves]
        if self._spec is None:
            named = dict(zip(self._names, leaves[self._count :], strict=True))
            return tuple(leaves[: self._count]), named, leaves
        return *tree_unflatten(leaves, self._spec), leaves


_LEAVES = (Tensor, type(None), bool, int, float, str)


def once_each(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `convert` with a cache by identity, because a forward may compare its inputs with `is`."""
    made: dict[int, tuple[Any, Any]] = {}

    def converted(value: Any) -> Any:
        if id(value) not in made:
            made[id(value)] = value, convert(value)  # `value` stays alive, or another could have its id
        return made[id(value)][1]

    return converted


def as_input(value: Any) -> Any:
    """Return an input for the second run: the same memory, as a leaf of a graph of its own."""
    if isinstance(value, OffloadedTensor):
        return value.get().detach().requires_grad_(value.requires_grad)
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    return value


def _is_compiled() -> bool:
    """Return whether torch.compile has compiled frames in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])
