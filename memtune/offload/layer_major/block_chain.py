"""The blocks of a model as a chain: the data flow between blocks, recorded in one forward of the user's code.

Layer-major order gives the bits of the plain step only if the blocks form a chain:

Rule 1. The arguments of a block are outputs of the previous block, arguments of the first block, or plain
  values. No op runs between blocks, and only the next block uses a block's output (except the last one's).
Rule 2. Arguments that all blocks share (masks, rotary angles) need no gradient: it would be summed in another
  order.
Rule 3. No block draws random numbers (their order would change) or writes a buffer in forward (BatchNorm's
  statistics; a second forward would write it again).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from memtune.activations.recompute import RegionContract
from memtune.device import accelerator
from memtune.errors import ApplyError
from memtune.runtime import HOST, EagerRecorder, OpVisitor, RandomState, tier

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_FIX = "offload: {states: {kind: stronghold}}, which keeps the plain order of micro-batches"
_Source = tuple[Literal["returned", "first", "plain"], Any]
"""Source of an argument leaf: index into the output before or the first arguments, or the value."""


@dataclass(frozen=True)
class CallArguments:
    """Arguments of the first block in one micro-batch."""

    leaves: tuple[Any, ...]
    spec: TreeSpec
    autocast: tuple[tuple[str, torch.dtype, bool], ...]
    """(device, dtype, caches casts) of each active autocast: packs run outside of the user's `with`."""

    @classmethod
    def flatten(cls, args: Any, kwargs: Any) -> CallArguments:
        """Flatten the arguments and note the active autocasts."""
        leaves, spec = tree_flatten((args, kwargs))
        # The user's `with torch.autocast` is left when packs run: the blocks must run under the same casts
        # all the same.
        on = tuple(
            (device, torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled())
            for device in accelerator.types()
            if torch.is_autocast_enabled(device)
        )
        return cls(tuple(leaves), spec, on)

    @property
    def key(self) -> tuple[Any, ...]:
        """The key of the recorded chain: micro-batches with equal keys share a chain."""
        kinds = tuple(
            ("tensor", x.requires_grad, x.dtype) if isinstance(x, Tensor) else (type(x), _value(x))
            for x in self.leaves
        )
        return str(self.spec), kinds, self.autocast

    @contextmanager
    def autocast_as_called(self) -> Iterator[None]:
        """Return a context with the autocasts of the block's original call."""
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
    """Output leaves that the next block takes; empty for the last block."""

    def arguments(self, before: Sequence[Tensor], first: Sequence[Any]) -> tuple[Any, Any]:
        """Build the block's arguments.

        Args:
            before: Output leaves of the previous block, as `passed_outputs` returns them.
            first: Argument leaves of the first block.
        """
        values = {"returned": before, "first": first}
        leaves = [where if kind == "plain" else values[kind][where] for kind, where in self.sources]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs

    def passed_outputs(self, out: Any) -> list[Tensor]:
        """Return the output leaves that the next block takes."""
        leaves = tree_flatten(out)[0]
        return [leaves[at] for at in self.passed]

    def placeholder_output(self, tensors: Sequence[Tensor]) -> Any:
        """Return an output with `tensors` in the passed leaves and None elsewhere."""
        # With fewer tensors than leaves the last one is repeated: a skipped block passes on what
        # the next pack starts from, and only the last skipped block's leaves must be exact.
        leaves: list[Any] = [None] * self.returned.num_leaves
        for number, at in enumerate(self.passed):
            leaves[at] = tensors[min(number, len(tensors) - 1)]
        return tree_unflatten(leaves, self.returned)


Chain = tuple[Link, ...]


class ChainRecorder(OpVisitor):
    """Records the data flow between blocks in one forward.

    Args:
        model: The user's module.
        names: Module paths of its blocks, in expected call order.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._model, self._names = model, names
        self._first: tuple[Any, ...] = ()
        # Only the previous block's output is held: holding all would keep every activation alive.
        self._before: list[Any] = []
        self._sources: list[tuple[_Source, ...]] = []
        self._specs: list[tuple[TreeSpec, TreeSpec]] = []
        self._middle: list[tuple[str, weakref.ref[Tensor]]] = []
        self._inside = False
        self._broken_rule = ""

    def block(self, index: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run block `index` and record the sources of its arguments and its output."""
        if index != len(self._sources):
            self._reject(
                f"{self._names[index]} runs {'again' if index < len(self._sources) else 'out of order'}"
            )
        given = CallArguments.flatten(args, kwargs)
        # Arguments of the first block are what the prologue makes: masks and positions that later blocks
        # share are among them.
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
            # A pack of backward runs the block again from the same argument, which must be unchanged.
            self._reject(f"{self._names[index]} changes its argument in place")
        self._before, returned = tree_flatten(out)
        self._specs.append((given.spec, returned))
        # The last block's output goes to the user's code, which may do anything with it.
        if index < len(self._names) - 1:
            # Weak references: an output that died cannot be used outside of the next block.
            self._middle += [
                (self._names[index], weakref.ref(leaf)) for leaf in self._before if isinstance(leaf, Tensor)
            ]
        return out

    def _reject(self, reason: str) -> None:
        """Note the first broken rule; the forward goes on, and `chain` raises at its end."""
        self._broken_rule = self._broken_rule or reason

    def chain(self, run: Callable[[], Any]) -> Chain:
        """Run `run`, a forward of the model with its loss, and return the chain.

        Buffers and random-number generators are restored afterwards.

        Raises:
            ApplyError: The blocks are no chain; names the broken rule and the module.
        """
        # All that a forward changes besides its outputs is restored, and refused: packs run blocks twice.
        contract = RegionContract(self._model)
        buffers = contract.buffers()
        versions = {name: buffer._version for name, buffer in buffers.items()}
        with tier(HOST):
            before = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        state = RandomState.capture(self._model, python=True)
        # A recording forward must not change the training run: generators and buffers are restored.
        with state.restored(), EagerRecorder(self):
            run()
            drawn = not state.is_now(self._model)
        changed = contract.written(versions)
        with torch.no_grad():
            for name in changed:
                buffers[name].copy_(before[name])
        if changed:
            self._reject(
                f"forward writes {changed[0]}, and the second forward of a block would write it again"
            )
        if drawn:
            self._reject(
                f"forward draws random numbers{dropout_of(self._model)}, and their order would change"
            )
        links = self._links() if not self._broken_rule else ()
        if self._broken_rule:
            raise not_chain_error(self._broken_rule)
        return links

    def _links(self) -> Chain:
        """Return the chain of the blocks' calls, empty if they form none."""
        if len(self._sources) != len(self._names):
            self._reject(f"{self._names[len(self._sources)]} does not run")
            return ()
        links: list[Link] = []
        for index, (spec, returned) in enumerate(self._specs):
            following = self._sources[index + 1] if index + 1 < len(self._sources) else ()
            # Only what the next block takes is saved between packs; other outputs (attention maps) are
            # dropped.
            passed = tuple(dict.fromkeys(where for kind, where in following if kind == "returned"))
            at = links[-1].passed if links else ()
            mine = tuple(
                (kind, at.index(where) if kind == "returned" else where)
                for kind, where in self._sources[index]
            )
            links.append(Link(spec, mine, returned, passed))
        return tuple(links)

    def _source(self, index: int, leaf: Any) -> _Source:
        """Return the origin of a block's argument: the block before, the first block's arguments, or a plain
        value.
        """
        name = self._names[index]
        if not isinstance(leaf, Tensor):
            if not isinstance(leaf, _PLAIN):
                self._reject(f"{name} takes a {type(leaf).__name__}, which may change while blocks run")
            return "plain", leaf
        # Identity, not storage: a view made between blocks is an op that packs would not run.
        before = next((i for i, each in enumerate(self._before) if each is leaf), -1)
        if before >= 0:
            return "returned", before
        at = next((i for i, each in enumerate(self._first) if each is leaf), -1)
        if at < 0:
            self._reject(f"code between the blocks computes an argument of {name}")
        elif index and leaf.requires_grad:
            self._reject(
                f"{name} and the first block share an argument whose gradient would be summed in another"
                " order"
            )
        return "first", at

    def before(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Check an op outside of the blocks: it must not use an output of a block but the last (Rule 1)."""
        # After the first violation further ones add nothing to the message.
        if self._inside or not self._middle or self._broken_rule:
            return NotImplemented
        # Storages, not tensors: a view of the output is a use as well.
        used = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        }
        for name, reference in self._middle:
            tensor = reference()
            if tensor is not None and tensor.untyped_storage()._cdata in used:
                self._reject(f"the op {func} uses the output of {name} outside of the next block")
        return NotImplemented


def _value(leaf: Any) -> Any:
    return leaf if isinstance(leaf, _PLAIN) else id(type(leaf))


def dropout_of(model: nn.Module) -> str:
    """Return ` (h.0.drop)`, the first active dropout of `model`; empty for none."""
    found = (
        name
        for name, each in model.named_modules()
        if isinstance(each, nn.modules.dropout._DropoutNd) and each.p
    )
    name = next(found, "") if model.training else ""
    return f" ({name})" if name else ""


def not_chain_error(why: str) -> ApplyError:
    """Return the error for blocks that are no chain, with the broken rule as evidence."""
    return ApplyError(
        "The blocks cannot be run one after the other over all micro-batches.",
        evidence=f"{why[:1].upper()}{why[1:]}.",
        fix=_FIX,
        code="MT397",
    )
