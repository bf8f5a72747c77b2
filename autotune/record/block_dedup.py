"""Record forward and backward of five equal blocks and expand the recording to all of them.

Three rules make the expansion equal to a full recording, in which all blocks run:

1. Skipped blocks are in the middle of a run of equal blocks: same classes, sizes and settings, no hooks
   (`_index_attributes`). A skipped block returns its arguments, in the structure of the previous block's
   output.
2. One recording of the session is full. The expansion at its micro-batch must equal it, column by column:
   ops, shapes, saved tensors, lifetimes, and its gradients those that the warm-up, in which the skipped
   blocks do not run either, assumed for the optimizer's state. Otherwise warm-up and all recordings are
   full, and `disabled_reason` is set.
3. At every other micro-batch, two of the recorded blocks must have equal rows, up to row numbers
   (`block_expand.py`), and gradients and state must have the specifications of the full recording, whose
   optimizer phase is reused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from memtune.autotune.record.block_expand import (
    BlockExpansion,
    BlocksDiffer,
    PartialRecording,
    with_optimizer,
)
from memtune.autotune.record.step_builder import OpRow
from memtune.autotune.record.tracer import Tracer
from memtune.program import Call, Hints, Phase, Resource, Step

MIN_EQUAL_BLOCKS = 8
"""Shortest run of equal blocks for which skipping saves time: five of them are recorded at each size."""
_BEFORE, _AFTER = 4, 1
"""Recorded blocks of a run before and after the skipped ones. The first block has another predecessor than
the rest, and the second can depend on it (if the model's input needs no gradient), so the third and fourth
are compared.
"""
_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    torch.memory_format,
)
_OWN_NAMES = frozenset(vars(nn.Module()))


_T = TypeVar("_T")


@dataclass(frozen=True)
class _Run:
    """A run of equal blocks, by their indices."""

    first: int
    end: int

    @property
    def skipped(self) -> range:
        return range(self.first + _BEFORE, self.end - _AFTER)


@dataclass(frozen=True)
class _OutputStructure:
    """Structure of a block's output: for each tensor the index of the argument with its specification."""

    called: tuple[Any, ...]
    leaves: tuple[Any, ...]
    arguments: tuple[int, ...]
    form: TreeSpec


class BlockDedup:
    """Finds equal blocks, records the model without most of them, and expands the recording.

    Create it before memtune hooks into the model: existing hooks are the user's and disable it (rule 1).

    Attributes:
        disabled_reason: Why steps are recorded in full; empty while they are not.
        skipped: Names of the blocks that do not run in a partial recording.
        recorded: Names of the blocks that do.
        lent: Specifications of all gradients after `lend_gradients`.
    """

    def __init__(self, model: nn.Module, blocks: list[str]) -> None:
        self._model, self._blocks = model, blocks
        self._runs = _runs(model, blocks)
        self.skipped = [blocks[i] for run in self._runs for i in run.skipped]
        self.recorded = [name for name in blocks if name not in set(self.skipped)]
        self.disabled_reason = "" if self._runs else f"there are no {MIN_EQUAL_BLOCKS} equal blocks in a row"
        self._proof: tuple[Step, Hints, PartialRecording] | None = None
        self.lent: tuple[Any, ...] = ()

    @property
    def verified(self) -> bool:
        """True once an expansion has been equal to the full recording at its micro-batch."""
        return self._proof is not None

    def attempt(self, work: Callable[[], _T]) -> _T | None:
        """Return the result of `work`.

        On any error return None, and before verification set `disabled_reason`.
        """
        try:
            return work()
        # User code may raise anything without some of its blocks; the full recording, which follows, runs it
        # complete.
        except Exception as error:
            if not self.verified:
                self.disabled_reason = _reason(error)
            return None

    def verify(self, step: Step, hints: Hints, partial: PartialRecording) -> None:
        """Compare the expansion of `partial` with the full recording at the same micro-batch (rule 2).

        Raises:
            BlocksDiffer: They are not equal.
        """
        expanded = self._expand(partial, (step, hints, partial))
        difference = _difference(expanded[0], step) or _hints_difference(expanded[1], hints)
        if difference:
            raise BlocksDiffer(f"the expanded recording differs from the full one in {difference}")
        self._proof = step, hints, partial

    def expand(self, partial: PartialRecording) -> tuple[Step, Hints]:
        """Return step and hints of all blocks.

        Raises:
            BlocksDiffer: Rule 3 does not hold.
        """
        assert self._proof is not None
        return self._expand(partial, self._proof)

    def _expand(
        self, partial: PartialRecording, proof: tuple[Step, Hints, PartialRecording]
    ) -> tuple[Step, Hints]:
        full, hints, verified = proof
        # The optimizer phase of the full recording is reused, so all that it reads must be the same.
        if partial.gradients != verified.gradients or partial.n_state != verified.n_state:
            raise BlocksDiffer("gradients have other shapes or dtypes at this micro-batch")
        if not np.array_equal(
            partial.step.storages.bytes[: partial.n_state], verified.step.storages.bytes[: partial.n_state]
        ):
            raise BlocksDiffer("parameters, buffers or optimizer state have other sizes at this micro-batch")
        for run in self._runs:
            partial = BlockExpansion(
                partial, run.first + _BEFORE - 1, [self._blocks[i] for i in run.skipped]
            ).expanded()
        step = with_optimizer(partial, full)
        # The last one is that of the op that represents the optimizer.
        own = partial.signatures[:-1]
        signatures = (*own, *hints.signatures[full.ops.n - step.ops.n + len(own) :])
        return step, replace(hints, calls=partial.calls, signatures=signatures)

    @contextmanager
    def skipping_blocks(self) -> Iterator[None]:
        """Replace the forward of skipped blocks by one that returns its arguments."""
        with ExitStack() as stack:
            for run in self._runs:
                seen: list[_OutputStructure] = []
                # The last block that runs before the skipped ones shows what a block of the run returns.
                before = self._model.get_submodule(self._blocks[run.skipped.start - 1])
                note = functools.partial(_note_call, seen)
                stack.callback(before.register_forward_hook(note, with_kwargs=True).remove)
                for i in run.skipped:
                    block = self._model.get_submodule(self._blocks[i])
                    # An attribute of the object hides the method of its class until it is deleted.
                    block.forward = functools.partial(_skipped_forward, seen)
                    stack.callback(delattr, block, "forward")
            yield

    def partial_recording(
        self, tracer: Tracer, calls: Sequence[Call], optimizer: Optimizer, gradients: tuple[Any, ...]
    ) -> PartialRecording:
        """Return what `tracer` recorded without the skipped blocks; the last op is `optimizer_mark`."""
        rows: dict[str, list[int]] = {}
        for name in self._blocks:
            block = self._model.get_submodule(name)
            state = [
                leaf for each in block.parameters() for leaf in tree_leaves(optimizer.state.get(each, {}))
            ]
            held = [
                *block.parameters(),
                *block.buffers(),
                *(each for each in state if isinstance(each, Tensor)),
            ]
            rows[name] = list(dict.fromkeys(tracer.storage_of(each) for each in held))
        # A tied weight belongs to no single block: a copy refers to the same row as the original.
        holders: dict[int, int] = {}
        for name in self._blocks:
            for row in rows[name]:
                holders[row] = holders.get(row, 0) + 1
        return PartialRecording(
            step=_without_modules(tracer.step(), set(self.skipped)),
            calls=tuple(calls),
            signatures=tuple(tracer.draft.signatures),
            entered=tuple(tracer.entered[i] for i in range(len(self.recorded))),
            n_state=tracer.n_state,
            owned={name: [row for row in rows[name] if holders[row] == 1] for name in self._blocks},
            gradients=gradients,
        )

    def lend_gradients(self) -> None:
        """Give skipped blocks gradients like those of the block before them, for the optimizer's state."""
        for run in self._runs:
            before = [*self._model.get_submodule(self._blocks[run.skipped.start - 1]).parameters()]
            for i in run.skipped:
                block = self._model.get_submodule(self._blocks[i])
                for mine, like in zip(block.parameters(), before, strict=True):
                    if mine.grad is None and like.grad is not None:
                        # Only shapes count: the warm-up step makes the state of the optimizer for them.
                        mine.grad = torch.empty_like(like.grad)
        self.lent = self.gradient_specs()

    def check_lent(self) -> None:
        """Compare the current gradients, of all blocks, with those that were lent for the warm-up.

        Raises:
            BlocksDiffer: They are not equal.
        """
        if self.lent and self.lent != self.gradient_specs():
            raise BlocksDiffer("blocks have gradients of other shapes or dtypes, or none")

    def gradient_specs(self) -> tuple[Any, ...]:
        """Return the specification of each parameter's current gradient, None where there is none."""
        return tuple(
            None if each.grad is None else _tensor_spec(each.grad) for each in self._model.parameters()
        )


def optimizer_mark(tracer: Tracer) -> None:
    """Append one op that represents the optimizer phase; storages that outlive backward live until it."""
    row = OpRow("memtune.optimizer", 0, -1, int(Phase.OPTIMIZER), int(Resource.NOTHING))
    tracer.draft.append([row], signatures=[""], uses=[], made=[])


# -- skipped blocks ------------------------------------------------------------------------------------------


def _note_call(seen: list[_OutputStructure], block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Store the specifications of arguments and output of the last block before the skipped ones."""
    given = tree_leaves((args, kwargs))
    leaves, form = tree_flatten(output)
    free = {i: _tensor_spec(each) for i, each in enumerate(given) if isinstance(each, Tensor)}
    arguments = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            argument = next((i for i, like in free.items() if like == _tensor_spec(leaf)), None)
            if argument is None:
                raise BlocksDiffer("a block returns a tensor whose shape, strides or dtype no argument has")
            # Two outputs are two tensors: each argument is returned once.
            del free[argument]
            arguments.append(argument)
        elif isinstance(leaf, _PLAIN):
            arguments.append(-1)
        else:
            raise BlocksDiffer(f"a block returns a {type(leaf).__name__}")
    plain = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    seen[:] = [_OutputStructure(tuple(map(_argument_spec, given)), plain, tuple(arguments), form)]


def _skipped_forward(seen: list[_OutputStructure], *args: Any, **kwargs: Any) -> Any:
    given = tree_leaves((args, kwargs))
    if not seen or tuple(map(_argument_spec, given)) != seen[0].called:
        raise BlocksDiffer("blocks are called with other arguments")
    # No op runs: each returned tensor is an argument of the same specification, so no storage is created.
    returned = zip(seen[0].leaves, seen[0].arguments, strict=True)
    return tree_unflatten([leaf if i < 0 else given[i] for leaf, i in returned], seen[0].form)


def _reason(error: BaseException) -> str:
    """Return why a model cannot run without some blocks; user code may wrap the original exception."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, BlocksDiffer):
        cause = cause.__cause__
    return (
        f"the model without some of its blocks raises {type(error).__name__}" if cause is None else str(cause)
    )


def _tensor_spec(tensor: Tensor) -> tuple[Any, ...]:
    return (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        type(tensor),
    )


def _argument_spec(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _tensor_spec(value)
    # Of other objects only identity shows that blocks get the same.
    return value if isinstance(value, _PLAIN) else id(value)


# -- runs of equal blocks ------------------------------------------------------------------------------------


def _runs(model: nn.Module, blocks: Sequence[str]) -> list[_Run]:
    """Return the runs of at least `MIN_EQUAL_BLOCKS` equal blocks."""
    modules = [model.get_submodule(name) for name in blocks]
    found, first, counting = [], 0, None
    for i in range(1, len(modules) + 1):
        step = _index_attributes(modules[i - 1], modules[i]) if i < len(modules) else None
        # Attributes that number the blocks must be the same ones throughout a run.
        if step is not None and (i - 1 == first or step == counting):
            counting = step
            continue
        if i - first >= MIN_EQUAL_BLOCKS:
            found.append(_Run(first, i))
        first = i
    return found


def _index_attributes(one: nn.Module, other: nn.Module) -> frozenset[str] | None:
    """Return the attributes that number the blocks (larger by one in `other`), None if the blocks differ."""
    names = [name for name, _ in one.named_modules()]
    if names != [name for name, _ in other.named_modules()]:
        return None
    counting: set[str] = set()
    for name, mine, theirs in zip(names, one.modules(), other.modules(), strict=True):
        if (
            _hooked(mine)
            or _hooked(theirs)
            or not _same_tensors(mine, theirs)
            or type(mine) is not type(theirs)
        ):
            return None
        ours, its = (
            {key: value for key, value in vars(each).items() if key not in _OWN_NAMES}
            for each in (mine, theirs)
        )
        # A replaced forward may differ in what no attribute shows.
        if ours.keys() != its.keys() or mine.training != theirs.training or "forward" in ours:
            return None
        for key, value in ours.items():
            if type(value) is int and type(its[key]) is int and its[key] == value + 1:
                counting.add(f"{name}.{key}")
            elif not _same_setting(value, its[key]):
                return None
    return frozenset(counting)


def _hooked(module: nn.Module) -> bool:
    hooks = [value for name, value in vars(module).items() if name.endswith("hooks")]
    tensors = [each for each in module._parameters.values() if each is not None]
    return any(hooks) or any(
        each._backward_hooks or getattr(each, "_post_accumulate_grad_hooks", None) for each in tensors
    )


def _same_tensors(one: nn.Module, other: nn.Module) -> bool:
    for mine, theirs in ((one._parameters, other._parameters), (one._buffers, other._buffers)):
        if [*mine] != [*theirs]:
            return False
        for left, right in zip(mine.values(), theirs.values(), strict=True):
            if (left is None) != (right is None) or (
                left is not None and right is not None and _tensor_spec(left) != _tensor_spec(right)
            ):
                return False
    return True


def _same_setting(one: Any, other: Any) -> bool:
    """Return whether two attributes are equal; unknown types are equal only if identical."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, _PLAIN):
        return bool(one == other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same_setting, one, other))
    if isinstance(one, dict):
        return [*one] == [*other] and all(map(_same_setting, one.values(), other.values()))
    if isinstance(one, functools.partial):
        return all(
            map(_same_setting, (one.func, one.args, one.keywords), (other.func, other.args, other.keywords))
        )
    return False


# -- comparison with the full recording ----------------------------------------------------------------------


def _without_modules(step: Step, names: set[str]) -> Step:
    """Return `step` without modules in which no op ran."""
    kept = [i for i, name in enumerate(step.modules) if name not in names]
    number = np.full(len(step.modules), -1, np.int32)
    number[kept] = np.arange(len(kept))
    return replace(step, modules=tuple(step.modules[i] for i in kept)).with_ops(
        module=number[step.ops.module]
    )


def _difference(one: Step, other: Step) -> str:
    """Return the name of the first column in which two steps differ, or ''."""
    others = other.values()
    for name, mine in one.values().items():
        theirs = others[name]
        if name == "ops.sequence_nr":
            # Autograd's counter runs on between recordings: node numbers are compared up to an offset.
            mine, theirs = (np.where(each < 0, -1, each - each.max(initial=0)) for each in (mine, theirs))
        if not (np.array_equal(mine, theirs) if isinstance(mine, np.ndarray) else mine == theirs):
            return name
    return ""


def _hints_difference(one: Hints, other: Hints) -> str:
    """Return the part in which the hints of two equal steps differ, or ''."""
    if one.signatures != other.signatures:
        return "the arguments of ops"
    # Numbers of autograd nodes may differ by one offset, which is the same for all calls.
    numbers = {
        tuple(np.subtract(mine.nodes, theirs.nodes))
        for mine, theirs in zip(one.calls, other.calls, strict=False)
    }
    mine, theirs = ([replace(call, nodes=(0, 0)) for call in each.calls] for each in (one, other))
    return (
        ""
        if mine == theirs and len({number for pair in numbers for number in pair}) < 2
        else "calls of attention or dropout"
    )
