"""Runs a frozen schedule in place of a module's forward and backward: op → compute, free, move; no dispatch mode in the loop.

Rule 1. The first call with arguments of new shapes captures the region on fake tensors (`runtime.tape`). If its ops are
        those that the schedule is for, code is written for it once (`runtime.frozen_code`); else the plain module runs.
Rule 2. Before each run everything that the capture took for granted is checked (`runtime.guards`); if something differs, the
        plain module runs. So a difference costs memory and time, never a wrong gradient.
Rule 3. Two autograd nodes stand for the region: `_Leave` hands out what forward made and takes the gradients in, so that the
        schedule alone holds them; `_Region` runs the backward.
Rule 4. A parameter's gradient is put in place as soon as it is there, as autograd's accumulation does; hooks that wait for
        that may be called by autograd only when the whole backward is through. Where the caller asked for gradients instead
        (`autograd.grad`), they are returned.
Rule 5. What forward was given and what it returned must not be written into before backward has read it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_unflatten

from memtune.errors import ApplyError
from memtune.runtime.frozen_code import Code, LayoutError, generate, not_by_element
from memtune.runtime.guards import Guards, call_key
from memtune.runtime.random_state import RandomState
from memtune.runtime.replaced_forward import ReplacedForward
from memtune.runtime.tape import CaptureError, GradientLike, Outside, Slot, Tape, autocast_state, capture, no_autocast, shapes_of
from memtune.runtime.tiers import HOST, tier
from memtune.schedule import Schedule, wrong_with

_MOST_CAPTURES = 16
"""Of one region; a module that is called with ever new shapes runs as it is from then on."""


@dataclass
class Runs:
    """What the executor has done so far, for the audit."""

    frozen: int = 0
    plain: int = 0
    captures: int = 0
    why_plain: str = ""
    """Why the plain module ran in place of the schedule, the last time."""


class _Coded:
    """Code for one tape; the first forward and the first backward are run with what ops return being checked."""

    def __init__(self, tape: Tape, generated: Callable[..., Code]) -> None:
        self.tape, self._generated = tape, generated
        self._checked: Code | None = generated(tape, checked=True)
        self._code = generated(tape)
        self._ran = [False, False]

    def forward(self, *args: Any) -> Any:
        """`Code.forward`."""
        return self._run(0, *args)

    def backward(self, *args: Any) -> Any:
        """`Code.backward`."""
        return self._run(1, *args)

    def _run(self, which: int, *args: Any) -> Any:
        checked = self._checked
        if checked is None or self._ran[which]:
            return (self._code.backward if which else self._code.forward)(*args)
        try:
            out = (checked.backward if which else checked.forward)(*args)
        except LayoutError as error:
            raise ApplyError(
                "a frozen schedule cannot run this model.",
                evidence=f"{error}.",
                fix="choose recompute: {kind: full}",
                code="MT327",
            ) from error
        self._ran[which] = True
        if all(self._ran):
            self._checked = None
        return out


@dataclass
class _Captured:
    """A region as captured for arguments of certain shapes."""

    tape: Tape
    guards: Guards
    call: Callable[..., Tape]
    """Captures it once more, for other gradients."""
    token: Tensor
    """Flows from one node to the other, and back."""
    codes: dict[Any, _Coded]
    """Code by what the gradients look like that flow in; the forward is the same in all."""

    @property
    def first(self) -> _Coded:
        """The code that the region was captured with."""
        return next(iter(self.codes.values()))


class FrozenRegion(ReplacedForward):
    """A module under a schedule; `install` makes its forward follow it.

    Args:
        module: The module whose forward and backward are the region.
        schedule: What to do in their place.
        device: Where the module computes.
        instead: What runs where the schedule cannot; the module's own forward where left out.
    """

    def __init__(
        self, module: nn.Module, schedule: Schedule, device: torch.device, instead: Callable[..., Any] | None = None
    ) -> None:
        super().__init__(module)
        self.schedule, self.runs = schedule, Runs()
        self._device, self._latest = device, weakref.WeakSet[_Run]()
        self._captured: dict[Any, _Captured | str] = {}
        self._instead = instead or self._original

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward under the schedule, or the plain one (Rules 1 and 2)."""
        if not torch.is_grad_enabled():
            return self._original(*args, **kwargs)
        captured = self._find(args, kwargs)
        why = captured if isinstance(captured, str) else captured.guards.changed()
        if isinstance(captured, str) or why:
            self.runs.plain += 1
            self.runs.why_plain = why
            return self._instead(*args, **kwargs)
        inputs = tree_leaves((args, kwargs))
        self.runs.frozen += 1
        del args, kwargs
        run = _Run(self, captured)
        self._latest.add(run)
        return run.start(inputs)

    def waiting_bytes(self) -> int:
        """What forwards hold that wait for their backward."""
        saved = [each for run in self._latest for held in run.saved for each in held if isinstance(each, Tensor)]
        return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in saved}.values())

    def _find(self, args: Any, kwargs: Any) -> _Captured | str:
        key = call_key(args, kwargs)
        if key is None:
            return "it is called with something that cannot be compared"
        if key not in self._captured:
            if self.runs.captures >= _MOST_CAPTURES:
                return f"it was called with {_MOST_CAPTURES} different shapes already"
            self.runs.captures += 1
            self._captured[key] = self._capture(args, kwargs)
        return self._captured[key]

    def _capture(self, args: Any, kwargs: Any) -> _Captured | str:
        """Which outputs get a gradient is not known before backward: the loss if there is one among them, else all."""
        why = ""
        call = partial(capture, self.module, self._original, shapes_of((args, kwargs)), autocast_state())
        for wanted in (_is_loss, _is_any):
            try:
                tape = call(wanted)
            except CaptureError as error:
                why = f"it cannot be captured: {error}"
                continue
            why = self._differs(tape)
            if not why:
                return _Captured(tape, Guards(self.module), call, self._token(), {_like(tape): self._coded(tape)})
        return why

    def _token(self) -> Tensor:
        with tier(HOST):  # it is none of the model's bytes
            return torch.zeros((), device=self._device)

    def _differs(self, tape: Tape) -> str:
        if tape.graph.sha256 != self.schedule.graph:
            return f"it runs other ops than the ones the schedule was made for ({tape.graph.n_ops} now)"
        return wrong_with(tape.graph, self.schedule) or not_by_element(tape, self.schedule, self._device)

    def _coded(self, tape: Tape) -> _Coded:
        random_state = partial(RandomState.capture, self.module)
        return _Coded(tape, partial(generate, schedule=self.schedule, random_state=random_state, device=self._device))

    def code_for(self, captured: _Captured, gradients: dict[int, Tensor]) -> _Coded:
        """The code whose backward takes these gradients; captures once more where they look new.

        Where that gives another program, the gradients are made to look as they did when the region was captured.
        """
        key = tuple(sorted((i, tuple(g.shape), g.stride(), g.dtype) for i, g in gradients.items()))
        if key not in captured.codes:
            try:
                tape = captured.call({i: GradientLike(tuple(g.shape), g.stride(), g.dtype) for i, g in gradients.items()})
            except CaptureError:
                tape = captured.tape
            same = tape.graph == captured.tape.graph and not not_by_element(tape, self.schedule, self._device)
            captured.codes[key] = self._coded(tape) if same else captured.first
        coded = captured.codes[key]
        _make_alike(coded.tape, gradients, self._device)
        return coded


def _is_loss(_: int, out: Tensor) -> bool:
    return out.dim() == 0


def _is_any(_: int, out: Tensor) -> bool:
    return True


def _like(tape: Tape) -> Any:
    slots = [(i, tape.given[Outside("gradient", i)]) for i in tape.asked]
    return tuple(sorted((i, slot.size, slot.stride, slot.dtype) for i, slot in slots))


def _make_alike(tape: Tape, gradients: dict[int, Tensor], device: torch.device) -> None:
    """Give `gradients` the outputs and strides that `tape` was captured with."""
    unplanned = sorted(set(gradients) - set(tape.asked))
    if unplanned:
        raise ApplyError(
            f"A gradient flows into output {unplanned[0]} of the model, which was not so when its schedule was made.",
            fix="use the same outputs in the loss in each step, or choose recompute: {kind: full}",
            code="MT328",
        )
    for i in tape.asked:
        slot = tape.given[Outside("gradient", i)]
        if i not in gradients:
            gradients[i] = torch.zeros(slot.size, dtype=slot.dtype, device=device)
        elif gradients[i].stride() != slot.stride:
            gradients[i] = torch.empty_strided(slot.size, slot.stride, dtype=slot.dtype, device=device).copy_(gradients[i])


class _Run:
    """One forward of a region and the backward that follows it."""

    def __init__(self, region: FrozenRegion, captured: _Captured) -> None:
        self.region, self._captured, self.token = region, captured, captured.token
        self._state: list[Tensor] = captured.guards.tensors()
        self.inputs: list[Any] = []
        self.outputs: tuple[Tensor, ...] = ()
        self.saved: list[tuple[Any, ...]] = []
        self._versions = 0
        self.gradients: dict[int, Tensor] = {}
        tape = captured.tape
        self.differentiable, self.tape_outputs = tape.differentiable, tape.outputs
        self._numbers = list(dict.fromkeys(number for number, _, _ in tape.landed))

    def start(self, inputs: list[Any]) -> Any:
        """Run forward; what it returns has `_Leave` for its history."""
        tape = self._captured.tape
        flow = [self._state[n] for n in self._numbers] + [inputs[n] for n, _ in tape.input_gradients]
        self.inputs = inputs
        token = _apply(_Region, self, *flow)
        tensors = iter(_apply(_Leave, self, token))
        return tree_unflatten([next(tensors) if isinstance(leaf, Slot) else leaf for leaf in tape.outputs], tape.output_spec)

    def forward(self) -> Tensor:
        """The schedule's forward."""
        with no_autocast():
            self.outputs, saved = self._captured.first.forward(self._state, self.inputs)
        self.inputs = []
        self.saved = [saved]
        self._versions = self._sum_of_versions()
        return self.token.detach()

    def _sum_of_versions(self) -> int:
        saved = sum(each._version for each in self.saved[0] if isinstance(each, Tensor))
        return saved + sum(self._state[n]._version for n in self._numbers)

    def backward(self, node: Any) -> list[Tensor | None]:
        """The schedule's backward: gradients of what flowed in, None where they were put in place."""
        self._check()
        coded = self.region.code_for(self._captured, self.gradients)
        flowing = [self.gradients.get(i) for i in range(len(coded.tape.outputs))]
        self.gradients = {}
        returned: dict[int, Tensor | None] = {
            number: None
            for number, (edge, _) in zip(self._numbers, node.next_functions, strict=False)
            if not _is_accumulated(self._state[number], edge)
        }
        state = self._state

        def land(number: int, gradient: Tensor) -> None:
            if number in returned:
                returned[number] = gradient
            else:
                put_in_place(state[number], gradient)

        with no_autocast():
            of_inputs = coded.backward(state, self.saved, flowing, land)
        return [*(returned.get(number) for number in self._numbers), *of_inputs]

    def _check(self) -> None:
        if torch.is_grad_enabled():
            raise ApplyError(
                "gradients of gradients do not work under a frozen schedule.", fix="choose recompute: {kind: none}", code="MT326"
            )
        if not self.saved:
            raise ApplyError(
                "backward runs a second time, but the schedule has let go of what it needs.",
                fix="add the losses up before one backward(), or choose recompute: {kind: none}", code="MT326",
            )  # fmt: skip
        if self._sum_of_versions() != self._versions:
            raise ApplyError(
                "something that backward needs was written into after the model's forward.",
                evidence="One of: the weights, an input of the model, an output of the model.",
                fix="write x = x + y instead of x += y, and step the optimizer after backward", code="MT326",
            )  # fmt: skip


def _is_accumulated(parameter: Tensor, edge: Any) -> bool:
    """Whether the gradient goes into `parameter.grad` and nobody wants to see it before (Rule 4)."""
    if parameter._backward_hooks:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(edge))
    except RuntimeError:  # autograd.grad: it is returned to the caller
        return False


def put_in_place(parameter: Tensor, gradient: Tensor) -> None:
    """Accumulate `gradient` as autograd's own node does."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
    hooks: dict[int, Callable[[Tensor], None]] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    if hooks and not _engine_calls_hooks():
        for hook in list(hooks.values()):
            hook(parameter)


@cache
def _engine_calls_hooks() -> bool:
    """Whether autograd calls these hooks at the end of backward although no gradient came to it; some versions do."""
    called: list[Tensor] = []
    with _disable_current_modes(), torch.enable_grad():
        leaf = torch.zeros((), requires_grad=True)
        leaf.register_post_accumulate_grad_hook(called.append)
        token = _apply(_Nothing, leaf)
        torch.autograd.backward(token, torch.zeros(()))
    return bool(called)


def _apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)


class _Nothing(torch.autograd.Function):
    """Hands no gradient on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None


class _Region(torch.autograd.Function):
    """The node whose backward is the region's; what flows through it is a token."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *flow: Tensor) -> Tensor:
        ctx.run = run
        return run.forward()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, *ctx.run.backward(ctx)


class _Leave(torch.autograd.Function):
    """The node behind the region's outputs: keeps their gradients for the region, gives back a token (Rule 3)."""

    @staticmethod
    def forward(ctx: Any, run: _Run, token: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        outputs, run.outputs = run.outputs, ()
        numbers = [n for n, leaf in enumerate(run.tape_outputs) if isinstance(leaf, Slot)]
        ctx.numbers = numbers
        ctx.mark_non_differentiable(*(out for n, out in zip(numbers, outputs, strict=True) if n not in run.differentiable))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        run = ctx.run
        run.gradients = {n: g for n, g in zip(ctx.numbers, gradients, strict=True) if g is not None}
        return None, run.token
