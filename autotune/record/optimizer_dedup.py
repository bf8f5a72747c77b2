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
  `disabled_reason` is set.
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
    float_bytes: int


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
    """Steps a torch optimizer over fake tensors for a few of its parameters and appends the rows of all.

    Create it before memtune hooks into the optimizer: existing hooks are the user's and disable it (rule 3).

    Attributes:
        disabled_reason: Why the step is recorded in full; empty while it is not.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, blocks: list[str]) -> None:
        self._model, self._optimizer, self._blocks = model, optimizer, blocks
        self._segments: dict[tuple[Hashable, ...], _Segment] = {}
        self._alone: dict[tuple[Hashable, ...], _Segment] = {}  # by group and signature
        self._foreach: dict[Hashable, Step | None] = {}
        self.disabled_reason = _reason_not_per_parameter(optimizer)

    def first_step(self) -> None:
        """Create the optimizer's state: step two parameters of each signature, copy to the others."""
        if self.disabled_reason or self._optimizer.state:
            self._optimizer.step()
            return
        state: dict[Tensor, dict[str, Any]] = {}
        for group in self._optimizer.param_groups:
            by_signature: dict[Hashable, list[Tensor]] = {}
            for parameter in _with_gradient(group):
                by_signature.setdefault(_signature(parameter, {}), []).append(parameter)
            first_two = [each for equal in by_signature.values() for each in equal[:2]]
            with _restricted_to(self._optimizer, group, first_two):
                self._optimizer.step()
            made = self._optimizer.state
            # State may depend on more than the signature (the position in the group): two samples would
            # differ.
            if any(
                len({_signature(each, made[each]) for each in equal[:2]}) > 1
                for equal in by_signature.values()
            ):
                self.disabled_reason = "parameters of equal signature have different state"
                return self._step_all_again()
            model_of = {parameter: equal[0] for equal in by_signature.values() for parameter in equal}
            state |= {
                each: made[each] if each in made else _copied(made[model_of[each]])
                for each in _with_gradient(group)
            }
        self._optimizer.state.clear()
        self._optimizer.state.update(state)

    def _step_all_again(self) -> None:
        self._optimizer.state.clear()
        self._optimizer.step()

    def step(self, tracer: Tracer) -> None:
        """Record the optimizer phase into `tracer`."""
        if not self.disabled_reason:
            groups = [_with_gradient(group) for group in self._optimizer.param_groups]
            signatures = self._signatures(groups)
            if self._record_missing(tracer, groups, signatures):
                tracer.phase = Phase.OPTIMIZER
                for group, (parameters, kinds) in enumerate(zip(groups, signatures, strict=True)):
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
        """Return the result of `foreach_phase`, recorded again only if a signature or buffer size changed."""
        if self.disabled_reason:
            return foreach_phase(self._model, self._optimizer, self._blocks)
        signatures = self._signatures([_with_gradient(group) for group in self._optimizer.param_groups])
        buffers = tuple(each.untyped_storage().nbytes() for each in self._model.buffers())
        key = tuple(map(tuple, signatures)), buffers
        if key not in self._foreach:
            self._foreach[key] = foreach_phase(self._model, self._optimizer, self._blocks)
        return self._foreach[key]

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state.get(parameter, {})
        return state

    def _signatures(self, groups: list[list[Tensor]]) -> list[list[Hashable]]:
        return [[_signature(parameter, self._state(parameter)) for parameter in group] for group in groups]

    def _record_missing(
        self, tracer: Tracer, groups: list[list[Tensor]], signatures: list[list[Hashable]]
    ) -> bool:
        """Record all sequences that are still missing; return False if a rule does not hold."""
        wanted: dict[tuple[Hashable, ...], tuple[int, list[Tensor]]] = {}
        for group, (parameters, kinds) in enumerate(zip(groups, signatures, strict=True)):
            for i in range(len(parameters)):
                key = group, *kinds[i : i + _NEIGHBOURS]
                if key not in self._segments:
                    wanted.setdefault(key, (group, parameters[i : i + _NEIGHBOURS]))
        if not wanted:
            return True
        # No placeholders: an optimizer runs without gradients, so autograd saves nothing.
        scratch = Tracer(self._model, self._optimizer, self._blocks, placeholders=False)
        with tracer.paused(), scratch.recording():
            scratch.phase = Phase.OPTIMIZER
            for parameter in self._model.parameters():
                if isinstance(parameter.grad, Tensor):
                    scratch.adopt(parameter.grad, Kind.GRADIENT)
            for key, (group, neighbours) in wanted.items():
                segment = self._record_segment(scratch, group, key[1:], neighbours)
                if isinstance(segment, str):
                    self.disabled_reason = segment
                    return False
                self._segments[key] = segment
        return True

    def _record_segment(
        self, scratch: Tracer, number: int, kinds: Sequence[Hashable], neighbours: list[Tensor]
    ) -> _Segment | str:
        """Return the ops of the first of `neighbours` of these signatures, or the rule that does not hold."""
        group = self._optimizer.param_groups[number]
        alone = []
        for kind, parameter in zip(kinds, neighbours, strict=True):
            # Alone first: its ops show where in the common run one parameter's end.
            if (number, kind) not in self._alone:
                rows = self._record_step(scratch, group, [parameter])
                segment = _segment(rows, self._storages(scratch, parameter), 0, len(rows.ops), len(rows.ops))
                if segment is None:
                    return "a parameter's update uses storages that do not belong to it"
                self._alone[number, kind] = segment
            alone.append(self._alone[number, kind])
        rows = self._record_step(scratch, group, neighbours)
        counts = [len(each.ops) for each in alone]
        if rows.signatures != [each for segment in alone for each in segment.signatures]:
            return "parameters are not updated one after the other"
        together, first = [], 0
        for i, parameter in enumerate(neighbours):
            # Rule 2: a temporary may live until the update after it has ended.
            until = first + sum(counts[i : i + 2])
            together.append(
                _segment(rows, self._storages(scratch, parameter), first, first + counts[i], until)
            )
            first += counts[i]
        found = together[0]
        if any(each is None for each in together[: _NEIGHBOURS - 1]) or found is None:
            return "a temporary of a parameter's update outlives the next update"
        return found

    def _record_step(self, scratch: Tracer, group: Group, parameters: list[Tensor]) -> RowSlice:
        start = scratch.draft.extent()
        with _restricted_to(self._optimizer, group, parameters):
            self._optimizer.step()
        return scratch.draft.rows(start)

    def _storages(self, scratch: Tracer, parameter: Tensor) -> list[int]:
        return [scratch.storage_of(each) for each in _tensors(parameter, self._state(parameter))]


def _reason_not_per_parameter(optimizer: Optimizer) -> str:
    """Return why the optimizer may not step one parameter after the other; '' if nothing indicates that."""
    kind = type(optimizer)
    if kind.__module__.split(".")[:2] != ["torch", "optim"] or kind.__name__ not in _ONE_PARAMETER_AT_A_TIME:
        return f"{kind.__name__} is not among the optimizers known to step through parameters one at a time"
    if any(
        group.get(name)
        for group in optimizer.param_groups
        for name in ("foreach", "fused", "capturable", "differentiable")
    ):
        return "its kernels update many parameters at once (foreach, fused, capturable or differentiable)"
    if any(isinstance(value, Tensor) for group in optimizer.param_groups for value in group.values()):
        return "one of its settings is a tensor"
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    if "step" in vars(optimizer) or any(hooks) or _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        return "hooks or a replaced step() run with it"
    plain = all(type(each) is FakeTensor for group in optimizer.param_groups for each in group["params"])
    return "" if plain else "its parameters are not plain fake tensors"


@contextmanager
def _restricted_to(optimizer: Optimizer, group: Group, parameters: Sequence[Tensor]) -> Iterator[None]:
    """Restrict `optimizer` to these parameters of one group."""
    groups = optimizer.param_groups
    # A copy of the group: its settings are shared, its list of parameters is not.
    optimizer.param_groups = [{**group, "params": list(parameters)}]
    try:
        yield
    finally:
        optimizer.param_groups = groups


def _with_gradient(group: Group) -> list[Tensor]:
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
        # An update may branch on plain values of the state, such as a step counter.
        tuple((name, None if isinstance(value, Tensor) else repr(value)) for name, value in state.items()),
    )


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def _segment(rows: RowSlice, operands: list[int], first: int, last: int, until: int) -> _Segment | None:
    """Return ops `first` to `last` of `rows`, None if they use storages other than `operands` and those they
    make, or make one that lives after op `until`.
    """
    made = [each for each in rows.made if first <= each.op < last]
    # Reversed: of operands that share a storage the first number is kept.
    number = {storage: i for i, storage in reversed(list(enumerate(operands)))}
    number |= {each.storage: len(operands) + i for i, each in enumerate(made)}
    uses = [(op - first, storage, written) for op, storage, written in rows.uses if first <= op < last]
    if any(storage not in number for _, storage, _ in uses) or any(each.until >= until for each in made):
        return None
    return _Segment(
        rows.ops[first:last],
        rows.signatures[first:last],
        [(op, number[storage], written) for op, storage, written in uses],
        [
            _RelativeStorage(
                each.op - first, each.size_bytes, each.tier, each.kind, each.until - first, each.float_bytes
            )
            for each in made
        ],
    )


def _write(tracer: Tracer, segment: _Segment, operands: list[int]) -> None:
    """Append `segment` to the recording of `tracer`, for a parameter with these storages."""
    start = tracer.draft.extent()
    # The operands first, as `_segment` has numbered them.
    number = [*operands, *range(start.storages, start.storages + len(segment.made))]
    tracer.draft.append(
        segment.ops,
        segment.signatures,
        [(start.ops + op, number[storage], written) for op, storage, written in segment.uses],
        [
            (
                each.size_bytes,
                each.tier,
                each.kind,
                start.ops + each.op,
                start.ops + each.until,
                each.float_bytes,
            )
            for each in segment.made
        ],
    )
