"""Region that runs a static schedule in place of a module's forward and backward; the loop has no dispatch
mode.

The first call with arguments of new shapes captures the region on fake tensors
(`activations.capture.region_capture`). If its ops are those of the schedule, code is generated once
(`activations.schedules.codegen`); otherwise the plain module runs. Before each run the guards are checked
(`activations.capture.guards`). If one differs, the region is captured again, a few times at most; if that
gives other ops, the plain module runs, with one warning. So a difference costs memory and time, never a wrong
gradient.

Autograd nodes replace the region in the graph. `_RegionOutputs` returns forward's outputs and receives their
gradients, so that the schedule alone holds them; `_Whole` runs the backward and accumulates each
parameter's gradient as soon as it is ready. If the caller asked for gradients (`autograd.grad`), or a
parameter has got hooks since forward, they are returned instead.

On several ranks, and if a parameter has hooks, a chain of nodes runs the backward in pieces: one `_GradNode`
per parameter, in the order in which gradients are complete, then `_End`. Autograd itself then
accumulates each gradient when it is ready and calls all hooks, including those in C++, in the order of the
plain backward. So components that average or shard gradients work as with the plain model, and ranks may
differ in whether the schedule ran.

Invariant: inputs and outputs of forward must not be written into before backward has read them (version
check).

Concurrency: several threads may call the module. One thread at a time looks up or captures, and none captures
while another one runs the module's own code (`activations.capture.capture_lock`).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from memtune import refusals
from memtune.activations.capture import (
    CaptureError,
    CaptureLock,
    ExecutedCode,
    GradientLike,
    Guards,
    Outside,
    SideEffectError,
    Slot,
    Tape,
    accumulate_grad,
    call_key,
    capture,
    guess_layouts,
    is_accumulated,
    is_hooked,
    is_watched,
    match_layouts,
    named_state,
    no_autocast,
    shapes_of,
)
from memtune.activations.recompute import hooks_of_table, saves_are_dropped
from memtune.activations.schedules.codegen import CheckedCode, Code, generate, not_by_element, state_read
from memtune.errors import ApplyError
from memtune.program import Action, Schedule, find_schedule_error, forward_only
from memtune.runtime import HOST, RandomState, ReplacedForward, autocast_now, tier

_MOST_CAPTURES = 16
"""Captures of one region; a module that keeps getting new shapes runs plainly afterwards."""


@dataclass
class Runs:
    """Counters of the executor's work, for the audit."""

    frozen: int = 0
    plain: int = 0
    captures: int = 0
    why_plain: str = ""
    """Reason why the plain module ran instead of the schedule, the last time."""


@dataclass
class _Captured:
    """A region as captured for arguments of certain shapes."""

    tape: Tape
    guards: Guards
    call: Callable[..., Tape]
    """Function that captures it again, for other gradients."""
    token: Tensor
    """Tensor that flows from one node to the other, and back."""
    codes: dict[Any, CheckedCode]
    """Code by layout of the incoming gradients; the forward is the same in all."""
    read: tuple[int, ...]
    """Parameters and buffers that backward reads."""
    reached: dict[Any, frozenset[int]] = field(default_factory=dict)
    """Parameters that have a gradient, by layout of the incoming gradients; a missing layout means all."""
    alone: CheckedCode | None = None
    """Code of a forward without backward, made at first use."""

    @property
    def first(self) -> CheckedCode:
        """Code that the region was captured with."""
        return next(iter(self.codes.values()))


@dataclass
class _Refused:
    """A region that could not be captured, or runs other ops than the schedule."""

    why: str
    guards: Guards
    once_more: bool = False
    """Capture it again: the module has run since, and may have set what its first forward sets."""


class ScheduledRegion(ReplacedForward):
    """Module under a schedule; `install` replaces its forward.

    Args:
        module: The module whose forward and backward are the region.
        schedule: The schedule to run instead.
        device: Device of the module.
        instead: Function called if the schedule cannot run; default: the module's own forward.
        lock: The module's capture lock, if several regions capture it.
    """

    _most_alike = 4
    """Captures per way of calling; a module that keeps changing runs plainly afterwards."""

    def __init__(
        self,
        module: nn.Module,
        schedule: Schedule,
        device: torch.device,
        instead: Callable[..., Any] | None = None,
        lock: CaptureLock | None = None,
    ) -> None:
        super().__init__(module)
        self._lock, self._is_copy = lock or CaptureLock(), False
        self.schedule, self.runs = schedule, Runs()
        self._device, self._latest = device, weakref.WeakSet[ScheduledRun]()
        self._captured: dict[Any, list[_Captured | _Refused]] = {}
        """By arguments: one for each state that the module was in, the latest first."""
        self._has_warned = self.tries_again = False
        """`tries_again`: the last call was refused for a reason that may not apply the next time."""
        self._instead, self._warns = instead or self._plain, instead is None
        self.is_claimed = False
        """Values kept for backward pass through an activation table: each value and argument is packed after
        its last read in forward, and unpacked just before backward reads it."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("module", "_original", "_had_own")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copied or pickled module (averaged weights, a target network) runs plainly: captures are of the
        # original's tensors.
        vars(self).update(state, _lock=CaptureLock(), _is_copy=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward by the schedule, or the plain one."""
        # The schedule trades memory between forward and backward; alone, a forward frees as it goes.
        if self._is_copy or not torch.is_grad_enabled():
            return self._plain(*args, **kwargs)
        # Permanent: code with and without claims differs, and a region under a table is under it in each
        # step.
        self.is_claimed = self.is_claimed or hooks_of_table() is not None
        with self._lock:
            # Looked up under the lock, run outside: only captures exclude each other.
            captured = self._find(args, kwargs)
            run = captured if isinstance(captured, str) else self._begin_run(captured)
        if isinstance(run, str):
            return self._instead(*args, **kwargs)
        inputs = tree_leaves((args, kwargs))
        del args, kwargs
        # The run frees its inputs after their last reader, so this frame must not hold them.
        return run.start(inputs)

    def _begin_run(self, captured: _Captured) -> ScheduledRun:
        self.runs.frozen += 1
        run = ScheduledRun(self, captured)
        self._latest.add(run)
        return run

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock.running():
            return self._original(*args, **kwargs)

    def waiting_bytes(self) -> int:
        """Return the bytes held by forwards that wait for their backward."""
        with self._lock:
            runs = list(self._latest)
        values = (each for run in runs for saved in run.saved for each in saved)
        storages = (each.untyped_storage() for each in values if isinstance(each, Tensor))
        return sum({each._cdata: each.nbytes() for each in storages}.values())  # each storage once

    def _find(self, args: Any, kwargs: Any) -> _Captured | str:
        """Return the capture for these arguments and this module state, or why the plain module runs."""
        key = call_key(args, kwargs)
        if key is None:
            return self._warn_of_plain_run(
                "an argument, or a TorchFunctionMode around it, cannot be compared with those of other calls"
            )
        known = (
            self._captured.setdefault(key, [])
            if len(self._captured) < _MOST_CAPTURES
            else self._captured.get(key, [])
        )
        changed, self.tries_again = "", False
        refused: _Refused | None = None
        for at, each in enumerate(known):
            # Looked at last: a capture whose guards hold is better than a second attempt.
            if isinstance(each, _Refused) and each.once_more:
                refused = each
                continue
            changed = each.guards.changed()
            if not changed:
                if at:
                    known.insert(0, known.pop(at))  # move to front: the next call probably matches it too
                return self._warn_of_plain_run(each.why) if isinstance(each, _Refused) else each
        if refused is not None:
            known.remove(refused)
        if len(known) >= self._most_alike:
            return self._warn_of_plain_run(changed)
        if self.runs.captures >= _MOST_CAPTURES:
            return self._warn_of_plain_run(
                changed or f"it was called with {_MOST_CAPTURES} different shapes already"
            )
        if not self._lock.is_alone():
            # Waiting releases the lock, so another thread may have captured meanwhile: look up again.
            waited = self._lock.wait_alone()
            return (
                self._find(args, kwargs)
                if waited
                else self._warn_of_plain_run("other threads run it all the time")
            )
        guards = Guards(self.module)
        why = guards.changed()  # new guards already fail if a submodule has hooks
        if why:
            return self._warn_of_plain_run(why)
        self.runs.captures += 1
        # Set by `_capture` if only a side effect prevented it, which a second forward may not have.
        self._leaves = False
        found = self._capture(args, kwargs, guards)
        if isinstance(found, str):
            self.tries_again = refused is None and self._leaves
            known.insert(0, _Refused(found, guards, self.tries_again))
            return self._warn_of_plain_run(found)
        known.insert(0, found)
        return found

    def _warn_of_plain_run(self, why: str) -> str:
        """Warn once that a module in training runs without its schedule."""
        self.runs.plain += 1
        self.runs.why_plain = why
        if self._warns and self.module.training and not self._has_warned and not self.tries_again:
            self._has_warned = True
            warnings.warn(
                f"memtune runs the model without its schedule, which takes more memory: {why}", stacklevel=6
            )
        return why

    def _capture(self, args: Any, kwargs: Any, guards: Guards) -> _Captured | str:
        """Capture the region with gradients of outputs that give the schedule's ops, before any backward."""
        # First the loss if an output is one, else all outputs, contiguous; then guesses.
        for _, name, tensor in named_state(self.module):
            if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                return f"{name} requires a gradient, but is no parameter"
        call = partial(capture, self.module, self._original, shapes_of((args, kwargs)), autocast_now())
        executed = ExecutedCode(self.module)
        first: Tape | None = None
        why = ""
        # Backward has not run yet, so it is unknown which outputs get gradients.
        for wanted in self._wanted():
            try:
                first = call(wanted, executed)
                break
            except CaptureError as error:
                why, self._leaves = f"it cannot be captured: {error}", isinstance(error, SideEffectError)
        if first is None:
            return why
        guards.watch(executed)
        for tape in chain([first], self._captures_of_other_layouts(call, first)):
            if not self._differs(tape):
                # By gradient layout: another layout makes another first op of backward (a copy).
                codes = {_like(tape): self._coded(tape)}
                return _Captured(tape, guards, call, self._token(), codes, state_read(tape, self.schedule))
        return self._differs(first)

    def _captures_of_other_layouts(self, call: Callable[..., Tape], first: Tape) -> Iterator[Tape]:
        """Yield captures with other gradient layouts, if at least the forward is the schedule's."""
        computed = (each.target for each in self.schedule.forward if each.action == Action.COMPUTE)
        if max(computed, default=-1) == first.graph.n_forward - 1:
            for gradients in guess_layouts(first):
                with suppress(CaptureError):
                    yield call(gradients)

    def _wanted(self) -> tuple[dict[int, GradientLike] | Callable[[int, Tensor], bool], ...]:
        """Return predicates on outputs that may get a gradient, in the order to try (see `capture`)."""
        return (lambda _, out: out.dim() == 0), (lambda _, out: True)

    def _token(self) -> Tensor:
        with tier(HOST):  # not accounted as device memory: the prediction has no such tensor
            return torch.zeros((), device=self._device)

    def _differs(self, tape: Tape) -> str:
        if tape.graph.sha256 != self.schedule.graph:
            cast = (
                " under autocast: the schedule was made for the ops that loss() of model.py runs"
                if autocast_now()
                else ""
            )
            return f"it runs other ops than the ones the schedule was made for ({tape.graph.n_ops} now{cast})"
        return find_schedule_error(tape.graph, self.schedule) or not_by_element(
            tape, self.schedule, self._device
        )

    def _coded(self, tape: Tape) -> CheckedCode:
        return CheckedCode(
            tape, partial(self._generated_code, schedule=self.schedule, claimed=self.is_claimed)
        )

    def _generated_code(
        self, tape: Tape, schedule: Schedule, *, claimed: bool = False, checked: bool = False
    ) -> Code:
        random_state = partial(RandomState.kept, self.module)
        return generate(tape, schedule, random_state, self._device, checked=checked, claimed=claimed)

    def alone_code(self, captured: _Captured) -> CheckedCode:
        """Return the code whose forward keeps nothing, for a forward without backward (packs)."""
        # It frees every value after its last reader.
        with self._lock:
            if captured.alone is None:
                alone = forward_only(captured.tape.graph, self.schedule)
                captured.alone = CheckedCode(captured.tape, partial(self._generated_code, schedule=alone))
            return captured.alone

    def code_for(
        self, captured: _Captured, gradients: dict[int, Tensor]
    ) -> tuple[CheckedCode, frozenset[int] | None]:
        """Return the code whose backward takes these gradients, and the parameters it reaches (None: all)."""
        # New layouts are captured again. If that gives another program, the gradients are converted
        # to the layouts of the first capture.
        key = tuple(sorted((i, tuple(g.shape), g.stride(), g.dtype) for i, g in gradients.items()))
        with self._lock:
            self._capture_with(captured, key, gradients)
        coded = captured.codes.get(key, captured.first)
        match_layouts(coded.tape, gradients, self._device)
        return coded, captured.reached.get(key)

    def _capture_with(self, captured: _Captured, key: Any, gradients: dict[int, Tensor]) -> None:
        # With changed guards a capture would record another program.
        # A key that failed is in `codes` as well, so each layout is captured once.
        if key in captured.codes or not self._lock.wait_alone() or captured.guards.changed():
            return
        try:
            tape = captured.call(
                {i: GradientLike(tuple(g.shape), g.stride(), g.dtype) for i, g in gradients.items()}
            )
        except CaptureError:
            tape = captured.tape
        same = _same_forward(tape, captured.tape) and tape.graph == captured.tape.graph
        same = same and not not_by_element(tape, self.schedule, self._device)
        coded = self._coded(tape) if same else captured.first
        # The chain of nodes was built in the order of the first code, before backward.
        captured.codes[key] = coded if coded.ready_order == captured.first.ready_order else captured.first
        if _same_forward(tape, captured.tape):
            captured.reached[key] = frozenset(number for number, _, _ in tape.ready_gradients)


def _same_forward(one: Tape, other: Tape) -> bool:
    """Return whether both forwards are equal, including numbers and constants."""
    n = one.graph.n_forward
    if (
        n != other.graph.n_forward
        or len(one.constants) != len(other.constants)
        or one.calls[:n] != other.calls[:n]
    ):
        return False
    return all(map(torch.equal, one.constants, other.constants))


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _like(tape: Tape) -> Any:
    slots = [(i, tape.given[Outside("gradient", i)]) for i in tape.with_gradient]
    return tuple(sorted((i, slot.size, slot.stride, slot.dtype) for i, slot in slots))


class ScheduledRun:
    """One forward of a region and the backward that follows it."""

    def __init__(self, region: ScheduledRegion, captured: _Captured) -> None:
        self.region, self._captured, self.token = region, captured, captured.token
        self._state: list[Tensor] = captured.guards.tensors()
        self.inputs: list[Any] = []
        self.outputs: tuple[Tensor, ...] = ()
        self.saved: list[tuple[Any, ...]] = []
        self._versions = 0
        self.gradients: dict[int, Tensor] = {}
        tape = captured.tape
        self.differentiable, self.tape_outputs = tape.differentiable, tape.outputs
        self._numbers = captured.first.ready_order
        self._backward: Generator[int, None, list[Tensor]] | None = None
        self._read_later: list[Tensor] = []
        """Parameters that backward reads after it has yielded their gradients, when hooks may update them."""
        self._read_versions: list[int] = []
        self._ready: list[Tensor] = []
        self._reached: frozenset[int] | None = None
        """Parameters that have a gradient; None: all."""
        self._back: tuple[Callable[[Any], Tensor], ...] = ()
        """The unpack function of the activation table, if there is one."""

    def start(self, inputs: list[Any]) -> Any:
        """Run forward; the returned tensors have the region's autograd nodes as their history."""
        tape = self._captured.tape
        flow = [inputs[n] for n, _ in tape.input_gradients]
        self.inputs = inputs
        with torch.no_grad():
            self.forward()
        # DDP and FSDP2 expect each gradient as soon as it is ready, by autograd's own nodes.
        if is_watched(self._state[number] for number in self._numbers):
            token = _apply(_End, self, *flow) if flow else self.token
            # Autograd runs the chain from its end, so the node built last is the first to run.
            for number in reversed(self._numbers):
                token = _apply(_GradNode, self, number, token, self._state[number])
        else:
            token = _apply(_Whole, self, *(self._state[n] for n in self._numbers), *flow)
        tensors = iter(_apply(_RegionOutputs, self, token))
        return tree_unflatten(
            [next(tensors) if isinstance(leaf, Slot) else leaf for leaf in tape.outputs], tape.output_spec
        )

    def forward(self) -> None:
        """Run the schedule's forward."""
        alone = saves_are_dropped()
        # A checkpoint around the region drops what it saves and runs it again with gradients.
        code = self.region.alone_code(self._captured) if alone else self._captured.first
        keep: tuple[Callable[[Tensor], Any], ...] = ()
        if self.region.is_claimed and not alone:
            hooks = hooks_of_table() or (_identity, _identity)
            keep, self._back = hooks[:1], hooks[1:]
        with no_autocast():
            self.outputs, saved = code.forward(self._state, self.inputs, *keep)
        self.inputs = []
        if alone:
            return
        self.saved = [saved]
        # Counters only grow, so a sum suffices.
        self._versions = self._sum_of_versions()

    def _sum_of_versions(self) -> int:
        saved = sum(each._version for each in self.saved[0] if isinstance(each, Tensor))
        read = (self._state[n] for n in self._captured.read)
        # Inference tensors have no version counter, and cannot be written into here.
        return saved + sum(each._version for each in read if not each.is_inference())

    def gradient_of(self, number: int) -> Tensor | None:
        """Return the gradient of parameter `number`, the next in order, which the caller alone holds; None if
        the loss does not reach it.
        """
        reached = self._run_on()
        assert reached == number, (reached, number)
        if number == self._numbers[-1] and not self._captured.tape.input_gradients:
            # See `_End`: it exists only if inputs need gradients.
            self._run_on()  # no later node would run the rest of backward
        return self._handed_out(number, self._ready.pop())

    def _handed_out(self, number: int, gradient: Tensor) -> Tensor | None:
        """Return the gradient for autograd."""
        # None if the loss does not reach the parameter, but zeros if it has hooks, which run in
        # plain training too.
        return gradient if self._state[number]._backward_hooks or self._has_gradient(number) else None

    def _has_gradient(self, number: int) -> bool:
        return self._reached is None or number in self._reached

    def gradients_of_inputs(self) -> list[Tensor]:
        """Return the gradients of the inputs that require one, at the end of backward."""
        gradients = self._run_on()
        assert isinstance(gradients, list), gradients
        return gradients

    def run_backward(self, node: Any) -> list[Tensor | None]:
        """Run backward; return gradients of parameters, None if accumulated here, then of inputs."""
        edge = dict(zip(self._numbers, (edge for edge, _ in node.next_functions), strict=False))
        found: dict[int, Tensor | None] = dict.fromkeys(self._numbers)
        while not isinstance(reached := self._run_on(), list):
            gradient = self._ready.pop()
            parameter = self._state[reached]
            if is_hooked(parameter) or not self._has_gradient(reached):
                found[reached] = self._handed_out(reached, gradient)
            elif parameter.is_leaf and is_accumulated(edge[reached]):
                accumulate_grad(parameter, gradient)
            else:
                found[reached] = gradient
            del gradient  # else it would be live while backward runs on to the next one
        return [*found.values(), *reached]

    def _run_on(self) -> int | list[Tensor]:
        """Run to the next gradient of a parameter, or to the end."""
        if self._backward is None:
            self._backward = self._begin()
        if self._read_later and self._read_versions != [each._version for each in self._read_later]:
            raise self._updated_early()
        try:
            with no_autocast():
                return next(self._backward)
        except StopIteration as end:
            self._backward = None
            found: list[Tensor] = end.value
            return found

    def _begin(self) -> Generator[int, None, list[Tensor]]:
        self._check()
        coded, self._reached = self.region.code_for(self._captured, self.gradients)
        self._read_later = [self._state[number] for number in coded.read_later]
        self._read_versions = [each._version for each in self._read_later]
        flowing = [self.gradients.get(i) for i in range(len(coded.tape.outputs))]
        # The generated code empties its list, so this must not be a second reference.
        self.gradients = {}
        return coded.backward(self._state, self.saved, flowing, self._ready, *self._back)

    def _check(self) -> None:
        self._require_first_order()
        if not self.saved:
            raise refusals.error_of(refusals.second_backward())
        if self._sum_of_versions() != self._versions:
            raise ApplyError(
                "a tensor that backward needs was written into after the model's forward.",
                evidence="One of: the weights, a buffer, an input of the model, an output of the model.",
                fix="write x = x + y instead of x += y, and step the optimizer after backward",
                code="MT326",
            )

    def _updated_early(self) -> ApplyError:
        versions = zip(self._read_later, self._read_versions, strict=True)
        updated = {id(each) for each, version in versions if each._version != version}
        names = [name for name, each in self.region.module.named_parameters() if id(each) in updated]
        return ApplyError(
            f"{', '.join(names)} was updated inside backward, before the schedule had read it for the last"
            " time.",
            evidence="The schedule was planned without such updates; this step is incomplete.",
            fix="execution: {order: {kind: program}}, or plan again with the updates: memtune search",
            code="MT326",
        )

    def _require_first_order(self) -> None:
        if torch.is_grad_enabled():
            raise refusals.error_of(refusals.second_order("a schedule"))


# Autograd nodes of a region under a schedule. Only a token flows between them, so that the engine holds none
# of the region's tensors.
def _apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)


class _Whole(torch.autograd.Function):
    """Node whose backward is the region's; `flow` are parameters, then inputs, with gradients."""

    @staticmethod
    def forward(ctx: Any, run: ScheduledRun, *flow: Tensor) -> Tensor:
        ctx.run = run
        return run.token.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, *ctx.run.run_backward(ctx)


class _End(_Whole):
    """Last node of a chain; its backward runs the rest of the region's. `flow` are inputs with gradients."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, *ctx.run.gradients_of_inputs()


class _GradNode(torch.autograd.Function):
    """Node whose backward returns the gradient of one parameter; a token flows through it."""

    @staticmethod
    def forward(ctx: Any, run: ScheduledRun, number: int, token: Tensor, parameter: Tensor) -> Tensor:
        ctx.run, ctx.number = run, number
        return run.token.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, None, ctx.run.token, ctx.run.gradient_of(ctx.number)


class _RegionOutputs(torch.autograd.Function):
    """Node behind a region's outputs: keeps their gradients for the region, returns a token's."""

    @staticmethod
    def forward(ctx: Any, run: ScheduledRun, token: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        # Not zeros for an output without a gradient: it has other ops in backward than one with zeros.
        ctx.set_materialize_grads(False)
        outputs = run.outputs
        # Autograd and the caller hold them from here on.
        run.outputs = ()
        numbers = [n for n, leaf in enumerate(run.tape_outputs) if isinstance(leaf, Slot)]
        ctx.numbers = numbers
        ctx.mark_non_differentiable(
            *(out for n, out in zip(numbers, outputs, strict=True) if n not in run.differentiable)
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        run = ctx.run
        run.gradients = {n: g for n, g in zip(ctx.numbers, gradients, strict=True) if g is not None}
        return None, run.token
