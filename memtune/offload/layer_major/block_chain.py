"""The blocks of a model as a chain: what each is given, seen once in a forward of the user's own code.

What may be taken block by block, over all micro-batches, and still be the plain step to the bit:

Rule 1. A block is given what the block before it returned, what the first block was given, and plain values.
Nothing else
        computes between blocks, and nothing but the next block uses what one returns, the last one's apart.
Rule 2. What all blocks are given (masks, rotary angles) needs no gradient: its sum would have another order.
Rule 3. Nothing draws random numbers, which would be drawn in another order, and no forward changes a buffer
(BatchNorm's
        statistics), which a second forward would change again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from memtune.activations.recompute import changed_buffers
from memtune.errors import ApplyError
from memtune.runtime import HOST, RandomState, tier

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_FIX = "offload: {states: {kind: stronghold}}, which leaves the order of micro-batches as it is"
_Source = tuple[Literal["returned", "first", "plain"], Any]
"""Of a leaf of a block's arguments: which leaf of what the block before returned, or of the first block's, or
the value.
"""


@dataclass(frozen=True)
class Given:
    """Arguments of the first block in one micro-batch."""

    leaves: tuple[Any, ...]
    spec: TreeSpec
    autocast: tuple[tuple[str, torch.dtype, bool], ...]
    """Device, type and whether casts are kept, of each autocast that was on: packs run outside of the user's
    `with`.
    """

    @classmethod
    def of(cls, args: Any, kwargs: Any) -> Given:
        """The arguments, taken apart."""
        leaves, spec = tree_flatten((args, kwargs))
        on = tuple(
            (device, torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled())
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        )
        return cls(tuple(leaves), spec, on)

    @property
    def key(self) -> tuple[Any, ...]:
        """What two micro-batches have in common whose chains are the same."""
        kinds = tuple(
            ("tensor", x.requires_grad, x.dtype) if isinstance(x, Tensor) else (type(x), _value(x))
            for x in self.leaves
        )
        return str(self.spec), kinds, self.autocast

    @contextmanager
    def as_called(self) -> Iterator[None]:
        """Inside, autocast is as it was when the block was called."""
        with ExitStack() as stack:
            for device, dtype, keeps in self.autocast:
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=keeps))
            yield


@dataclass(frozen=True)
class Link:
    """One block of the chain."""

    spec: TreeSpec
    sources: tuple[_Source, ...]
    returned: TreeSpec
    passed: tuple[int, ...]
    """Leaves of what the block returns that the next one is given; none for the last block."""

    def arguments(self, before: Sequence[Tensor], first: Sequence[Any]) -> tuple[Any, Any]:
        """Arguments from what the block before passed on and what the first block was given."""
        values = {"returned": before, "first": first}
        leaves = [where if kind == "plain" else values[kind][where] for kind, where in self.sources]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs

    def passes(self, out: Any) -> list[Tensor]:
        """What of the block's output the next block is given."""
        leaves = tree_flatten(out)[0]
        return [leaves[at] for at in self.passed]

    def stand_in(self, tensors: Sequence[Tensor]) -> Any:
        """An output that passes `tensors` on, whatever their number, and holds nothing else."""
        leaves: list[Any] = [None] * self.returned.num_leaves
        for number, at in enumerate(self.passed):
            leaves[at] = tensors[min(number, len(tensors) - 1)]
        return tree_unflatten(leaves, self.returned)


Chain = tuple[Link, ...]


class Look:
    """Watches one forward and says what passes between the blocks.

    Args:
        model: The user's module.
        names: Of its blocks, in the order in which they should run.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._model, self._names = model, names
        self._first: tuple[Any, ...] = ()
        self._before: list[Any] = []  # what the block before returned; all others may die
        self._sources: list[tuple[_Source, ...]] = []
        self._specs: list[tuple[TreeSpec, TreeSpec]] = []
        self._middle: list[tuple[str, weakref.ref[Tensor]]] = []
        self._inside = False
        self._wrong = ""

    def block(self, index: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run block `index` and note what it is given and returns."""
        if index != len(self._sources):
            self._says(
                f"{self._names[index]} runs {'again' if index < len(self._sources) else 'out of order'}"
            )
        given = Given.of(args, kwargs)
        self._first = self._first or given.leaves
        self._sources.append(tuple(self._source(index, leaf) for leaf in given.leaves))
        tensors = [leaf for leaf in given.leaves if isinstance(leaf, Tensor)]
        versions = [leaf._version for leaf in tensors]
        self._inside = True
        try:
            out = forward(*args, **kwargs)
        finally:
            self._inside = False
        if any(leaf._version != version for leaf, version in zip(tensors, versions, strict=True)):
            self._says(f"{self._names[index]} changes what it is given in place")
        self._before, returned = tree_flatten(out)
        self._specs.append((given.spec, returned))
        if index < len(self._names) - 1:
            self._middle += [
                (self._names[index], weakref.ref(leaf)) for leaf in self._before if isinstance(leaf, Tensor)
            ]
        return out

    def _says(self, what: str) -> None:
        self._wrong = self._wrong or what

    def chain(self, run: Callable[[], Any]) -> Chain:
        """The chain that `run`, a forward of the whole model and its loss, shows; leaves no trace in it.

        Raises:
            ApplyError: The blocks are no chain: which rule is broken, and where.
        """
        buffers = {name: buffer._version for name, buffer in self._model.named_buffers()}
        with tier(HOST):
            before = {name: buffer.detach().clone() for name, buffer in self._model.named_buffers()}
        state = RandomState.capture(self._model)
        with state.restored(), _Between(self):
            run()
            drawn = not state.is_now(self._model)
        changed = changed_buffers(self._model, buffers)
        with torch.no_grad():
            for name in changed:
                self._model.get_buffer(name).copy_(before[name])
        if changed:
            self._says(f"forward changes {changed[0]}, which running a block again would change again")
        if drawn:
            self._says(
                f"forward draws random numbers{dropout_of(self._model)}, and their order would be another"
            )
        links = self._links() if not self._wrong else ()
        if self._wrong:
            raise no_chain(self._wrong)
        return links

    def _links(self) -> Chain:
        if len(self._sources) != len(self._names):
            self._says(f"{self._names[len(self._sources)]} does not run")
            return ()
        links: list[Link] = []
        for index, (spec, returned) in enumerate(self._specs):
            following = self._sources[index + 1] if index + 1 < len(self._sources) else ()
            passed = tuple(dict.fromkeys(where for kind, where in following if kind == "returned"))
            at = links[-1].passed if links else ()
            mine = tuple(
                (kind, at.index(where) if kind == "returned" else where)
                for kind, where in self._sources[index]
            )
            links.append(Link(spec, mine, returned, passed))
        return tuple(links)

    def _source(self, index: int, leaf: Any) -> _Source:
        name = self._names[index]
        if not isinstance(leaf, Tensor):
            if not isinstance(leaf, _PLAIN):
                self._says(f"{name} is given a {type(leaf).__name__}, which may change as blocks run")
            return "plain", leaf
        before = next((i for i, each in enumerate(self._before) if each is leaf), -1)
        if before >= 0:
            return "returned", before
        at = next((i for i, each in enumerate(self._first) if each is leaf), -1)
        if at < 0:
            self._says(f"code between the blocks makes what {name} is given")
        elif index and leaf.requires_grad:
            self._says(
                f"{name} is given what the first block was given as well, whose gradient would be summed in"
                " another order"
            )
        return "first", at

    def sees(self, func: Any, args: Any, kwargs: Any) -> None:
        """An op runs: outside of the blocks it must not use what a block but the last returned (Rule 1)."""
        if self._inside or not self._middle or self._wrong:
            return
        used = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        }
        for name, reference in self._middle:
            tensor = reference()
            if tensor is not None and tensor.untyped_storage()._cdata in used:
                self._says(f"the op {func} uses what {name} returned, outside of the next block")


class _Between(TorchDispatchMode):
    """Shows every op to a `Look`."""

    def __init__(self, look: Look) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._look = look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._look.sees(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _value(leaf: Any) -> Any:
    return leaf if isinstance(leaf, _PLAIN) else id(type(leaf))


def dropout_of(model: nn.Module) -> str:
    """` (h.0.drop)`: the first dropout of `model` that drops anything, '' for none."""
    found = (
        name
        for name, each in model.named_modules()
        if isinstance(each, nn.modules.dropout._DropoutNd) and each.p
    )
    name = next(found, "") if model.training else ""
    return f" ({name})" if name else ""


def no_chain(why: str) -> ApplyError:
    """The error that says why blocks cannot be taken one by one over all micro-batches."""
    return ApplyError(
        "The blocks cannot be run one after the other over all micro-batches.",
        evidence=f"{why[:1].upper()}{why[1:]}.",
        fix=_FIX,
        code="MT397",
    )
