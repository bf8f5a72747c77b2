"""Forward and backward of a model of equal blocks, recorded for five of them and written down for all.

Three things make what is written down equal to a whole recording:

1. Left out are blocks in the middle of a run whose modules are *alike*: same classes, sizes and settings, no hooks (`_counting`).
   A left-out block returns what it was given, in the form in which the block before it returned it.
2. One recording of the session is whole. What is written down at its micro-batch must be equal to it, column by column: ops,
   shapes, saved tensors, lifetimes. Otherwise all recordings are whole, and `whole` says why.
3. At every other micro-batch, two blocks that are recorded must say the same of themselves and their neighbours
   (`autotune/unfold.py`), and gradients and state must be as in the whole recording, whose optimizer phase is taken over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from memtune.autotune.tracer import Tracer
from memtune.autotune.unfold import Short, Unfolding, Unlike, with_optimizer
from memtune.program import Call, Hints, Phase, Resource, Step

LEAST = 8
"""Equal blocks in a row from which leaving some out saves more time than it takes: five of them are recorded at each size."""
_BEFORE, _AFTER = 4, 1
"""How many of a run are recorded before and after those that are left out. The first block has another neighbour than the rest,
and the second one feels it (where the model's input needs no gradient), so the third and fourth are compared."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.memory_format)
_OWN_NAMES = frozenset(vars(nn.Module()))


_T = TypeVar("_T")


@dataclass(frozen=True)
class _Run:
    """Blocks in a row that are alike, by their numbers."""

    first: int
    end: int

    @property
    def left_out(self) -> range:
        return range(self.first + _BEFORE, self.end - _AFTER)


@dataclass(frozen=True)
class _Returned:
    """The form of what a block returned: which of its arguments each tensor is like, and all else as it is."""

    called: tuple[Any, ...]
    leaves: tuple[Any, ...]
    arguments: tuple[int, ...]
    form: TreeSpec


class BlockFold:
    """Finds equal blocks, records the model without most of them, and writes them into the recording.

    Make one before anything hooks into the model: hooks that are already there are the user's (rule 1).

    Attributes:
        whole: Why steps are recorded whole; empty while they are not.
        left_out: Names of the blocks that do not run in a short recording.
        kept: Names of those that do.
    """

    def __init__(self, model: nn.Module, blocks: list[str]) -> None:
        self._model, self._blocks = model, blocks
        self._runs = _runs(model, blocks)
        self.left_out = [blocks[i] for run in self._runs for i in run.left_out]
        self.kept = [name for name in blocks if name not in set(self.left_out)]
        self.whole = "" if self._runs else f"there are no {LEAST} equal blocks in a row"
        self._proof: tuple[Step, Hints, Short] | None = None

    @property
    def proven(self) -> bool:
        """Whether a whole recording was equal to what was written down for it."""
        return self._proof is not None

    def attempt(self, work: Callable[[], _T]) -> _T | None:
        """What `work` gives; None, with the reason in `whole` while nothing is proven, where it cannot be done by the rules."""
        try:
            return work()
        except Exception as error:  # the user's code, without some of its blocks, may raise anything; whole, it runs
            if not self.proven:
                self.whole = _reason(error)
            return None

    def prove(self, step: Step, hints: Hints, short: Short) -> None:
        """Hold what is written down for `short` against the whole recording at the same micro-batch (rule 2).

        Raises:
            Unlike: They are not equal.
        """
        written = self._written(short, (step, hints, short))
        found = _difference(written[0], step) or _other_hints(written[1], hints)
        if found:
            raise Unlike(f"written down, they differ in {found}")
        self._proof = step, hints, short

    def written(self, short: Short) -> tuple[Step, Hints]:
        """The step that `short` stands for.

        Raises:
            Unlike: By rule 3 it cannot be told.
        """
        assert self._proof is not None
        return self._written(short, self._proof)

    def _written(self, short: Short, proof: tuple[Step, Hints, Short]) -> tuple[Step, Hints]:
        whole, hints, proven = proof
        if short.gradients != proven.gradients or short.n_state != proven.n_state:
            raise Unlike("gradients are others at this micro-batch")
        if not np.array_equal(short.step.bytes[: short.n_state], proven.step.bytes[: short.n_state]):
            raise Unlike("what the model holds has another size at this micro-batch")
        for run in self._runs:
            short = Unfolding(short, run.first + _BEFORE - 1, [self._blocks[i] for i in run.left_out]).done()
        step = with_optimizer(short, whole)
        own = short.signatures[:-1]
        signatures = (*own, *hints.signatures[whole.n_ops - step.n_ops + len(own) :])
        return step, replace(hints, calls=short.calls, signatures=signatures)

    @contextmanager
    def without_blocks(self) -> Iterator[None]:
        """Inside, blocks that are left out return what they are given."""
        with ExitStack() as stack:
            for run in self._runs:
                seen: list[_Returned] = []
                before = self._model.get_submodule(self._blocks[run.left_out.start - 1])
                note = functools.partial(_note, seen)
                stack.callback(before.register_forward_hook(note, with_kwargs=True).remove)
                for i in run.left_out:
                    block = self._model.get_submodule(self._blocks[i])
                    block.forward = functools.partial(_passed_on, seen)
                    stack.callback(delattr, block, "forward")
            yield

    def short(self, tracer: Tracer, calls: Sequence[Call], optimizer: Optimizer, gradients: tuple[Any, ...]) -> Short:
        """What `tracer` has recorded without the blocks; its last op is `optimizer_mark`'s."""
        rows: dict[str, list[int]] = {}
        for name in self._blocks:
            block = self._model.get_submodule(name)
            state = [leaf for each in block.parameters() for leaf in tree_leaves(optimizer.state.get(each, {}))]
            held = [*block.parameters(), *block.buffers(), *(each for each in state if isinstance(each, Tensor))]
            rows[name] = list(dict.fromkeys(tracer.storage_of(each) for each in held))
        holders: dict[int, int] = {}
        for name in self._blocks:
            for row in rows[name]:
                holders[row] = holders.get(row, 0) + 1
        return Short(
            step=_without_modules(tracer.step(), set(self.left_out)),
            calls=tuple(calls),
            signatures=tuple(tracer.draft.signatures),
            entered=tuple(tracer.entered[i] for i in range(len(self.kept))),
            n_state=tracer.n_state,
            owned={name: [row for row in rows[name] if holders[row] == 1] for name in self._blocks},
            gradients=gradients,
        )

    def gradients(self) -> tuple[Any, ...]:
        """What the optimizer sees of each parameter's gradient now."""
        return tuple(None if each.grad is None else _like(each.grad) for each in self._model.parameters())


def optimizer_mark(tracer: Tracer) -> None:
    """Write one op that stands for the optimizer's whole phase: what is held until its end is held until this op."""
    tracer.draft.append(
        [("memtune.optimizer", 0, -1, int(Phase.OPTIMIZER), int(Resource.NOTHING), 0.0, 0, 0, 0, -1, 0)], [""], [], []
    )


# -- a block that is left out --------------------------------------------------------------------------------------------


def _note(seen: list[_Returned], block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Remember how the last block before those that are left out was called and what it returned; holds no tensor."""
    given = tree_leaves((args, kwargs))
    leaves, form = tree_flatten(output)
    free = {i: _like(each) for i, each in enumerate(given) if isinstance(each, Tensor)}
    arguments = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            argument = next((i for i, like in free.items() if like == _like(leaf)), None)
            if argument is None:
                raise Unlike("a block returns another kind of tensor than it is given")
            del free[argument]
            arguments.append(argument)
        elif isinstance(leaf, _PLAIN):
            arguments.append(-1)
        else:
            raise Unlike(f"a block returns a {type(leaf).__name__}")
    plain = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    seen[:] = [_Returned(tuple(map(_argument, given)), plain, tuple(arguments), form)]


def _passed_on(seen: list[_Returned], *args: Any, **kwargs: Any) -> Any:
    given = tree_leaves((args, kwargs))
    if not seen or tuple(map(_argument, given)) != seen[0].called:
        raise Unlike("blocks are called with other arguments")
    returned = zip(seen[0].leaves, seen[0].arguments, strict=True)
    return tree_unflatten([leaf if i < 0 else given[i] for leaf, i in returned], seen[0].form)


def _reason(error: BaseException) -> str:
    """Why a model cannot be recorded without some of its blocks; user code wraps what is raised inside it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, Unlike):
        cause = cause.__cause__
    return f"without some of them it raises {type(error).__name__}" if cause is None else str(cause)


def _like(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, tensor.requires_grad, type(tensor)


def _argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _like(value)
    return value if isinstance(value, _PLAIN) else id(value)


# -- which blocks are alike ------------------------------------------------------------------------------------------------


def _runs(model: nn.Module, blocks: Sequence[str]) -> list[_Run]:
    """Rows of at least `LEAST` blocks that are alike."""
    modules = [model.get_submodule(name) for name in blocks]
    found, first, counting = [], 0, None
    for i in range(1, len(modules) + 1):
        step = _counting(modules[i - 1], modules[i]) if i < len(modules) else None
        if step is not None and (i - 1 == first or step == counting):
            counting = step
            continue
        if i - first >= LEAST:
            found.append(_Run(first, i))
        first = i
    return found


def _counting(one: nn.Module, other: nn.Module) -> frozenset[str] | None:
    """None where two blocks are not alike, else the settings that count the blocks: one more in the second."""
    names = [name for name, _ in one.named_modules()]
    if names != [name for name, _ in other.named_modules()]:
        return None
    counting: set[str] = set()
    for name, mine, theirs in zip(names, one.modules(), other.modules(), strict=True):
        if _hooked(mine) or _hooked(theirs) or not _same_tensors(mine, theirs) or type(mine) is not type(theirs):
            return None
        ours, its = ({key: value for key, value in vars(each).items() if key not in _OWN_NAMES} for each in (mine, theirs))
        if ours.keys() != its.keys() or mine.training != theirs.training or "forward" in ours:
            return None
        for key, value in ours.items():
            if type(value) is int and type(its[key]) is int and its[key] == value + 1:
                counting.add(f"{name}.{key}")
            elif not _same(value, its[key]):
                return None
    return frozenset(counting)


def _hooked(module: nn.Module) -> bool:
    hooks = [value for name, value in vars(module).items() if name.endswith("hooks")]
    tensors = [each for each in module._parameters.values() if each is not None]
    return any(hooks) or any(each._backward_hooks or getattr(each, "_post_accumulate_grad_hooks", None) for each in tensors)


def _same_tensors(one: nn.Module, other: nn.Module) -> bool:
    for mine, theirs in ((one._parameters, other._parameters), (one._buffers, other._buffers)):
        if [*mine] != [*theirs]:
            return False
        for left, right in zip(mine.values(), theirs.values(), strict=True):
            if (left is None) != (right is None) or (left is not None and right is not None and _like(left) != _like(right)):
                return False
    return True


def _same(one: Any, other: Any) -> bool:
    """Whether two settings are the same, by what can be known of them."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, _PLAIN):
        return bool(one == other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return [*one] == [*other] and all(map(_same, one.values(), other.values()))
    if isinstance(one, functools.partial):
        return all(map(_same, (one.func, one.args, one.keywords), (other.func, other.args, other.keywords)))
    return False


# -- two recordings ------------------------------------------------------------------------------------------------------


def _without_modules(step: Step, names: set[str]) -> Step:
    """`step` without modules in which nothing ran."""
    kept = [i for i, name in enumerate(step.modules) if name not in names]
    number = np.full(len(step.modules), -1, np.int32)
    number[kept] = np.arange(len(kept))
    return replace(step, modules=tuple(step.modules[i] for i in kept), op_module=number[step.op_module])


def _difference(one: Step, other: Step) -> str:
    """The first column in which two steps differ, autograd's numbers up to where they begin; empty where none does."""
    for field in fields(Step):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if field.name == "op_node":
            mine, theirs = (np.where(each < 0, -1, each - each.max(initial=0)) for each in (mine, theirs))
        if not (np.array_equal(mine, theirs) if isinstance(mine, np.ndarray) else mine == theirs):
            return field.name
    return ""


def _other_hints(one: Hints, other: Hints) -> str:
    """What differs between the hints of two equal steps; empty where nothing does."""
    if one.signatures != other.signatures:
        return "what their ops are called with"
    numbers = {tuple(np.subtract(mine.nodes, theirs.nodes)) for mine, theirs in zip(one.calls, other.calls, strict=False)}
    mine, theirs = ([replace(call, nodes=(0, 0)) for call in each.calls] for each in (one, other))
    return "" if mine == theirs and len({number for pair in numbers for number in pair}) < 2 else "their calls"
