"""Record the optimizer's step over fake tensors once per parameter signature instead of once per parameter.

On CPU torch's optimizers update their parameters one at a time, so a model of equal blocks repeats the same
few ops. The result equals a full recording, row for row, because of three rules:

1. The *signature* of a parameter: shapes, strides and dtypes of its value, gradient and state, and which of
  these share memory. The ops of its update depend only on its signature and its param group.
2. A temporary may live in a local variable until the next parameter's update replaces it. So each sequence of
  three neighbouring signatures is recorded, for its first parameter: no temporary of the first update may
  outlive the second.
3. The ops of three neighbours must be those of each one alone, one after the other, and touch only their own
  parameter. If that does not hold, or the optimizer is not one of torch's, the step is recorded in full, and
  `disabled_reason` says why.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from memtune.autotune.record.foreach_record import foreach_phase
from memtune.autotune.record.step_builder import RowSlice
from memtune.autotune.record.tracer import Tracer
from memtune.autotune.translate import FOREACH_OPTIMIZERS
from memtune.program import Kind, Phase, Step

_NEIGHBOURS = 3
_ONE_PARAMETER_AT_A_TIME = FOREACH_OPTIMIZERS - {"RAdam"}
"""RAdam runs other ops from its sixth step on."""
Group = dict[str, Any]


class _RelativeStorage(NamedTuple):
    """A storage made by a parameter's update: op (from the update's first), columns, and last op."""

    op: int
    size_bytes: int
    tier: int
    kind: int
    until: int


@dataclass(frozen=True)
class _Segment:
    """The ops of one parameter's update.

    Storages are numbered: the parameter's own first, then those the ops make.
    """

    ops: list[Any]
    signatures: list[str]
    uses: list[tuple[int, int, int]]
    made: list[_RelativeStorage]


class OptimizerDedup:
    """Steps a torch optimizer over fake tensors for a few of its parameters and writes the rows of all.

    Create it before memtune hooks into the optimizer: existing hooks are the user's and disable it (rule 3).

    Attributes:
        disabled_reason: Why the step is recorded in full; empty while it is not.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, blocks: list[str]) -> None:
        self._model, self._optimizer, self._blocks = model, optimizer, blocks
        self._segments: dict[tuple[Hashable, ...], _Segment] = {}
        self._foreach: dict[Hashable, Step | None] = {}
        self.whole = _not_by_parameter(optimizer)

    @property
    def n_recorded(self) -> int:
        """Return how many sequences of neighbouring signatures have been recorded."""
        return len(self._segments)

    def first_step(self) -> None:
        """Create the optimizer's state.

        Step two parameters of each signature, copy their state to the others.
        """
        if self.whole or self._optimizer.state:
            self._optimizer.step()
            return
        state: dict[Tensor, dict[str, Any]] = {}
        for group in self._optimizer.param_groups:
            sorts: dict[Hashable, list[Tensor]] = {}
            for parameter in _trained(group):
                sorts.setdefault(_signature(parameter, {}), []).append(parameter)
            with _only(self._optimizer, group, [each for alike in sorts.values() for each in alike[:2]]):
                self._optimizer.step()
            made = self._optimizer.state
            if any(len({_signature(each, made[each]) for each in alike[:2]}) > 1 for alike in sorts.values()):
                self.whole = "parameters that are alike have other state"
                return self._first_step_again()
            of = {parameter: alike[0] for alike in sorts.values() for parameter in alike}
            state |= {
                each: made[each] if each in made else _copied(made[of[each]]) for each in _trained(group)
            }
        self._optimizer.state.clear()
        self._optimizer.state.update(state)

    def _first_step_again(self) -> None:
        self._optimizer.state.clear()
        self._optimizer.step()

    def step(self, tracer: Tracer) -> None:
        """Record the optimizer phase into `tracer`."""
        if not self.whole:
            groups = [_trained(group) for group in self._optimizer.param_groups]
            sorts = self._sorts(groups)
            if self._learn(tracer, groups, sorts):
                tracer.phase = Phase.OPTIMIZER
                for group, (parameters, kinds) in enumerate(zip(groups, sorts, strict=True)):
                    for i, parameter in enumerate(parameters):
                        segment = self._segments[group, *kinds[i : i + _NEIGHBOURS]]
                        _write(
                            tracer,
                            segment,
                            [tracer.storage_of(each) for each in _tensors(parameter, self._state(parameter))],
                        )
                return
        self._optimizer.step()

    def foreach(self) -> Step | None:
        """Return `foreach_phase`; recorded again only if a gradient or buffer has changed."""
        if self.whole:
            return foreach_phase(self._model, self._optimizer, self._blocks)
        sorts = self._sorts([_trained(group) for group in self._optimizer.param_groups])
        buffers = tuple(each.untyped_storage().nbytes() for each in self._model.buffers())
        key = tuple(map(tuple, sorts)), buffers
        if key not in self._foreach:
            self._foreach[key] = foreach_phase(self._model, self._optimizer, self._blocks)
        return self._foreach[key]

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state.get(parameter, {})
        return state

    def _sorts(self, groups: list[list[Tensor]]) -> list[list[Hashable]]:
        return [[_signature(parameter, self._state(parameter)) for parameter in group] for group in groups]

    def _learn(self, tracer: Tracer, groups: list[list[Tensor]], sorts: list[list[Hashable]]) -> bool:
        """Record all sequences that are still missing; return False if a rule does not hold."""
        wanted: dict[tuple[Hashable, ...], tuple[int, list[Tensor]]] = {}
        for group, (parameters, kinds) in enumerate(zip(groups, sorts, strict=True)):
            for i in range(len(parameters)):
                key = group, *kinds[i : i + _NEIGHBOURS]
                if key not in self._segments:
                    wanted.setdefault(key, (group, parameters[i : i + _NEIGHBOURS]))
        if not wanted:
            return True
        own = Tracer(self._model, self._optimizer, self._blocks, stand_ins=False)
        with tracer.paused(), own.recording():
            own.phase = Phase.OPTIMIZER
            for parameter in self._model.parameters():
                if isinstance(parameter.grad, Tensor):
                    own.adopt(parameter.grad, Kind.GRADIENT)
            for key, (group, neighbours) in wanted.items():
                segment = self._recorded(own, self._optimizer.param_groups[group], neighbours)
                if isinstance(segment, str):
                    self.whole = segment
                    return False
                self._segments[key] = segment
        return True

    def _recorded(self, own: Tracer, group: Group, neighbours: list[Tensor]) -> _Segment | str:
        """Return the ops of the first of `neighbours`, or the rule that does not hold."""
        alone = []
        for parameter in neighbours:
            rows = self._rows(own, group, [parameter])
            segment = _segment(rows, self._storages(own, parameter), 0, len(rows.ops), len(rows.ops))
            if segment is None:
                return "the step of a parameter touches what is not its own"
            alone.append(segment)
        rows = self._rows(own, group, neighbours)
        counts = [len(each.ops) for each in alone]
        if rows.signatures != [each for segment in alone for each in segment.signatures]:
            return "parameters do not take their steps one after the other"
        together, first = [], 0
        for i, parameter in enumerate(neighbours):
            until = first + sum(counts[i : i + 2])
            together.append(_segment(rows, self._storages(own, parameter), first, first + counts[i], until))
            first += counts[i]
        found = together[0]
        if any(each is None for each in together[: _NEIGHBOURS - 1]) or found is None:
            return "what the step of a parameter makes outlives the next one's"
        return found

    def _rows(self, own: Tracer, group: Group, parameters: list[Tensor]) -> RowSlice:
        start = own.draft.extent()
        with _only(self._optimizer, group, parameters):
            self._optimizer.step()
        return own.draft.rows(start)

    def _storages(self, own: Tracer, parameter: Tensor) -> list[int]:
        return [own.storage_of(each) for each in _tensors(parameter, self._state(parameter))]


def _not_by_parameter(optimizer: Optimizer) -> str:
    """Return why the optimizer does not step one parameter after the other, as far as can be seen.

    '' if it does.
    """
    kind = type(optimizer)
    if kind.__module__.split(".")[:2] != ["torch", "optim"] or kind.__name__ not in _ONE_PARAMETER_AT_A_TIME:
        return f"{kind.__name__} is not among the optimizers known to step through parameters one at a time"
    if any(
        group.get(name)
        for group in optimizer.param_groups
        for name in ("foreach", "fused", "capturable", "differentiable")
    ):
        return "its kernels take many parameters at once"
    if any(isinstance(value, Tensor) for group in optimizer.param_groups for value in group.values()):
        return "it has a setting that is a tensor"
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    if "step" in vars(optimizer) or any(hooks) or _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        return "other code runs with it"
    plain = all(type(each) is FakeTensor for group in optimizer.param_groups for each in group["params"])
    return "" if plain else "its parameters are not plain fake tensors"


@contextmanager
def _only(optimizer: Optimizer, group: Group, parameters: Sequence[Tensor]) -> Iterator[None]:
    """Restrict `optimizer` to these parameters of one group."""
    groups = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": list(parameters)}]
    try:
        yield
    finally:
        optimizer.param_groups = groups


def _trained(group: Group) -> list[Tensor]:
    return [parameter for parameter in group["params"] if parameter.grad is not None]


def _tensors(parameter: Tensor, state: dict[str, Any]) -> list[Tensor]:
    assert parameter.grad is not None
    return [parameter, parameter.grad, *(value for value in state.values() if isinstance(value, Tensor))]


def _signature(parameter: Tensor, state: dict[str, Any]) -> Hashable:
    tensors = _tensors(parameter, state)
    storages = [each.untyped_storage() for each in tensors]
    addresses = [each._cdata for each in storages]
    return (
        tuple(
            (each.shape, each.stride(), each.dtype, each.storage_offset(), each.layout, type(each))
            for each in tensors
        ),
        tuple((each.nbytes(), addresses.index(each._cdata)) for each in storages),
        tuple((name, None if isinstance(value, Tensor) else repr(value)) for name, value in state.items()),
    )


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def _segment(rows: RowSlice, outside: list[int], first: int, last: int, until: int) -> _Segment | None:
    """Return ops `first` to `last` of `rows`.

    None if they use other storages or make one that lives after op `until`.
    """
    made = [each for each in rows.made if first <= each.op < last]
    number = {storage: i for i, storage in reversed(list(enumerate(outside)))}
    number |= {each.storage: len(outside) + i for i, each in enumerate(made)}
    uses = [(op - first, storage, written) for op, storage, written in rows.uses if first <= op < last]
    if any(storage not in number for _, storage, _ in uses) or any(each.until >= until for each in made):
        return None
    return _Segment(
        rows.ops[first:last],
        rows.signatures[first:last],
        [(op, number[storage], written) for op, storage, written in uses],
        [
            _RelativeStorage(each.op - first, each.size_bytes, each.tier, each.kind, each.until - first)
            for each in made
        ],
    )


def _write(tracer: Tracer, segment: _Segment, outside: list[int]) -> None:
    """Append `segment` to the recording of `tracer`, for a parameter with these storages."""
    start = tracer.draft.extent()
    number = [*outside, *range(start.storages, start.storages + len(segment.made))]
    tracer.draft.append(
        segment.ops,
        segment.signatures,
        [(start.ops + op, number[storage], written) for op, storage, written in segment.uses],
        [
            (each.size_bytes, each.tier, each.kind, start.ops + each.op, start.ops + each.until)
            for each in segment.made
        ],
    )
