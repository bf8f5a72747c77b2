"""Runs a frozen schedule in place of a module's forward and backward: op → compute, free, move; no dispatch mode in the loop.

Rule 1. The first call with arguments of new shapes captures the region on fake tensors (`runtime.capture`). If its ops are
        those that the schedule is for, code is written for it once (`runtime.frozen_code`); else the plain module runs.
Rule 2. Before each run everything that the capture took for granted is checked (`runtime.guards`); if something differs, the
        region is captured once more, a few times at most; where that gives other ops, the plain module runs, and a warning
        says so once. So a difference costs memory and time, never a wrong gradient.
Rule 3. Autograd nodes stand for the region (`runtime.frozen_nodes`): `leave` hands out what forward made and takes the
        gradients in, so that the schedule alone holds them; `whole` runs the backward, and puts each parameter's gradient in
        place as soon as it is there. Where the caller asked for gradients instead (`autograd.grad`), or a parameter has got
        hooks since forward, they are returned.
Rule 4. On several ranks, and where a parameter has hooks, a chain of nodes runs the backward in pieces: one `land` for each
        parameter, in the order in which gradients are complete, then `end`. So autograd itself puts each gradient in place
        when it is there, and calls all hooks, those in C++ too, in the order of the plain backward: what averages or divides
        gradients works as beside the plain model, and ranks may differ in whether the schedule ran.
Rule 5. What forward was given and what it returned must not be written into before backward has read it.
Rule 6. A forward that has no backward of its own (packs that run forward alone) lets go of every value after its last reader.
Rule 7. What forward keeps goes through the claims on activations of the block that it is, where there are any: each value once
        forward has read it for the last time, each argument likewise; it comes back just before backward reads it.
Rule 8. Several threads may call the module: who looks up or captures does so alone, and none captures while another one is in
        the module's own code (`runtime.capture_lock`).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from memtune.errors import ApplyError
from memtune.runtime.capture import autocast_state, capture, named_state, no_autocast, shapes_of
from memtune.runtime.capture_lock import CaptureLock
from memtune.runtime.checked_code import CheckedCode
from memtune.runtime.frozen_code import Code, generate, not_by_element, state_read
from memtune.runtime.frozen_nodes import end, land, leave, whole
from memtune.runtime.gradient_guesses import guesses, make_alike
from memtune.runtime.guards import Guards, call_key
from memtune.runtime.own_checkpoint import hooks_of_table, nothing_stays
from memtune.runtime.parameter_gradients import is_accumulated, is_hooked, is_watched, put_in_place
from memtune.runtime.random_state import RandomState
from memtune.runtime.replaced_forward import ReplacedForward
from memtune.runtime.tape import CaptureError, GradientLike, LeavesError, Outside, Slot, Tape
from memtune.runtime.tiers import HOST, tier
from memtune.schedule import Action, Schedule, forward_alone, wrong_with

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


@dataclass
class _Captured:
    """A region as captured for arguments of certain shapes."""

    tape: Tape
    guards: Guards
    call: Callable[..., Tape]
    """Captures it once more, for other gradients."""
    token: Tensor
    """Flows from one node to the other, and back."""
    codes: dict[Any, CheckedCode]
    """Code by what the gradients look like that flow in; the forward is the same in all."""
    read: tuple[int, ...]
    """Parameters and buffers that backward reads."""
    reached: dict[Any, frozenset[int]] = field(default_factory=dict)
    """Parameters that have a gradient, by what the gradients look like that flow in; not there: all have."""
    alone: CheckedCode | None = None
    """The forward by itself (Rule 6), once it was asked for."""

    @property
    def first(self) -> CheckedCode:
        """The code that the region was captured with."""
        return next(iter(self.codes.values()))


@dataclass
class _Refused:
    """A region that could not be captured, or runs other ops than the schedule."""

    why: str
    guards: Guards
    once_more: bool = False
    """The module ran since, which may have set for good what its forward set."""


class FrozenRegion(ReplacedForward):
    """A module under a schedule; `install` makes its forward follow it.

    Args:
        module: The module whose forward and backward are the region.
        schedule: What to do in their place.
        device: Where the module computes.
        instead: What runs where the schedule cannot; the module's own forward where left out.
        lock: Of all that captures the module, where there is more.
    """

    _most_alike = 4
    """Captures for one way of calling; a module that changes ever again runs as it is from then on."""

    def __init__(
        self,
        module: nn.Module,
        schedule: Schedule,
        device: torch.device,
        instead: Callable[..., Any] | None = None,
        lock: CaptureLock | None = None,
    ) -> None:
        super().__init__(module)
        self._lock = lock or CaptureLock()
        self.schedule, self.runs = schedule, Runs()
        self._device, self._latest = device, weakref.WeakSet[FrozenRun]()
        self._captured: dict[Any, list[_Captured | _Refused]] = {}
        """By what the module is called with: one for each state that the module was in, the latest first."""
        self._has_said = self.tries_again = False
        """`tries_again`: the last call was refused for what may be otherwise the next time."""
        self._instead, self._says_why = instead or self._plain, instead is None
        self.is_claimed = False
        """Rule 7."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward under the schedule, or the plain one (Rules 1 and 2)."""
        if not torch.is_grad_enabled():
            return self._plain(*args, **kwargs)
        self.is_claimed = self.is_claimed or hooks_of_table() is not None
        with self._lock:
            captured = self._find(args, kwargs)
            run = captured if isinstance(captured, str) else self._begun(captured, args, kwargs)
        if isinstance(run, str):
            return self._instead(*args, **kwargs)
        inputs = tree_leaves((args, kwargs))
        del args, kwargs
        return run.start(inputs)

    def _begun(self, captured: _Captured, args: Any, kwargs: Any) -> FrozenRun:
        self.runs.frozen += 1
        run = self._run(captured, args, kwargs)
        self._latest.add(run)
        return run

    def _run(self, captured: _Captured, args: Any, kwargs: Any) -> FrozenRun:
        return FrozenRun(self, captured)

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock.running():
            return self._original(*args, **kwargs)

    def waiting_bytes(self) -> int:
        """What forwards hold that wait for their backward."""
        return held_bytes([each for run in self._runs() for each in run.waiting()])

    def _runs(self) -> list[FrozenRun]:
        with self._lock:
            return list(self._latest)

    def is_as_captured(self, captured: _Captured, state: list[Tensor]) -> bool:
        """Whether the module would do now what was captured, with the parameters and buffers of `state`."""
        with self._lock:
            if captured.guards.changed():
                return False
            return all(now is before for now, before in zip(captured.guards.tensors(), state, strict=True))

    def _find(self, args: Any, kwargs: Any) -> _Captured | str:
        """What was captured for such arguments and a module as it is now, or why the plain module runs."""
        key = call_key(args, kwargs)
        if key is None:
            return self._plainly("it is called with something that cannot be compared")
        known = self._captured.setdefault(key, []) if len(self._captured) < _MOST_CAPTURES else self._captured.get(key, [])
        changed, self.tries_again = "", False
        refused: _Refused | None = None
        for at, each in enumerate(known):
            if isinstance(each, _Refused) and each.once_more:
                refused = each
                continue
            changed = each.guards.changed()
            if not changed:
                if at:
                    known.insert(0, known.pop(at))  # the next call finds it at once
                return self._plainly(each.why) if isinstance(each, _Refused) else each
        if refused is not None:
            known.remove(refused)
        if len(known) >= self._most_alike:
            return self._plainly(changed)
        if self.runs.captures >= _MOST_CAPTURES:
            return self._plainly(changed or f"it was called with {_MOST_CAPTURES} different shapes already")
        if not self._lock.is_alone():
            waited = self._lock.wait_alone()  # another one may have captured it meanwhile
            return self._find(args, kwargs) if waited else self._plainly("other threads run it all the time")
        guards = Guards(self.module)
        why = guards.changed()  # no module with hooks inside is as it was
        if why:
            return self._plainly(why)
        self.runs.captures += 1
        self._leaves = False
        found = self._capture(args, kwargs, guards)
        if isinstance(found, str):
            self.tries_again = refused is None and self._leaves
            known.insert(0, _Refused(found, guards, self.tries_again))
            return self._plainly(found)
        known.insert(0, found)
        return found

    def _plainly(self, why: str) -> str:
        """Say once that a module that trains does so without its schedule."""
        self.runs.plain += 1
        self.runs.why_plain = why
        if self._says_why and self.module.training and not self._has_said and not self.tries_again:
            self._has_said = True
            warnings.warn(f"memtune runs the model as it is, without its schedule, which takes more memory: {why}", stacklevel=6)
        return why

    def _capture(self, args: Any, kwargs: Any, guards: Guards) -> _Captured | str:
        """Which outputs get which gradients is not known before backward: what gives the ops of the schedule.

        First the loss if there is one among them, else all, contiguous; then guesses.
        """
        for _, name, tensor in named_state(self.module):
            if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                return f"{name} wants a gradient, and is no parameter"
        call = partial(capture, self.module, self._original, shapes_of((args, kwargs)), autocast_state())
        first: Tape | None = None
        why = ""
        for wanted in self._wanted():
            try:
                first = call(wanted)
                break
            except CaptureError as error:
                why, self._leaves = f"it cannot be captured: {error}", isinstance(error, LeavesError)
        if first is None:
            return why
        for tape in chain([first], self._others(call, first)):
            if not self._differs(tape):
                codes = {_like(tape): self._coded(tape)}
                return _Captured(tape, guards, call, self._token(), codes, state_read(tape, self.schedule))
        return self._differs(first)

    def _others(self, call: Callable[..., Tape], first: Tape) -> Iterator[Tape]:
        """Captured with other gradients, as losses have them, where forward at least is the schedule's."""
        computed = (each.of for each in self.schedule.forward if each.action == Action.COMPUTE)
        if max(computed, default=-1) == first.graph.n_forward - 1:
            for gradients in guesses(first):
                with suppress(CaptureError):
                    yield call(gradients)

    def _wanted(self) -> tuple[dict[int, GradientLike] | Callable[[int, Tensor], bool], ...]:
        """Which outputs may get a gradient, to be tried in turn: see `capture`."""
        return _is_loss, _is_any

    def _token(self) -> Tensor:
        with tier(HOST):  # it is none of the model's bytes
            return torch.zeros((), device=self._device)

    def _differs(self, tape: Tape) -> str:
        if tape.graph.sha256 != self.schedule.graph:
            cast = " under autocast: what the schedule was made for is what loss() of model.py runs" if autocast_state() else ""
            return f"it runs other ops than the ones the schedule was made for ({tape.graph.n_ops} now{cast})"
        return wrong_with(tape.graph, self.schedule) or not_by_element(tape, self.schedule, self._device)

    def _coded(self, tape: Tape) -> CheckedCode:
        return CheckedCode(tape, partial(self._written, schedule=self.schedule, claimed=self.is_claimed))

    def _written(self, tape: Tape, schedule: Schedule, *, claimed: bool = False, checked: bool = False) -> Code:
        random_state = partial(RandomState.kept, self.module)
        return generate(tape, schedule, random_state, self._device, checked=checked, claimed=claimed)

    def alone_code(self, captured: _Captured) -> CheckedCode:
        """The code whose forward keeps nothing (Rule 6)."""
        with self._lock:
            if captured.alone is None:
                alone = forward_alone(captured.tape.graph, self.schedule)
                captured.alone = CheckedCode(captured.tape, partial(self._written, schedule=alone))
            return captured.alone

    def code_for(self, captured: _Captured, gradients: dict[int, Tensor]) -> tuple[CheckedCode, frozenset[int] | None]:
        """The code whose backward takes these gradients, and the parameters that they reach (None: all).

        Captures once more where they look new. Where that gives another program, the gradients are made to look as they did
        when the region was captured.
        """
        key = tuple(sorted((i, tuple(g.shape), g.stride(), g.dtype) for i, g in gradients.items()))
        with self._lock:
            self._capture_with(captured, key, gradients)
        coded = captured.codes.get(key, captured.first)
        make_alike(coded.tape, gradients, self._device)
        return coded, captured.reached.get(key)

    def _capture_with(self, captured: _Captured, key: Any, gradients: dict[int, Tensor]) -> None:
        if key in captured.codes or not self._lock.wait_alone() or captured.guards.changed():  # else as another module
            return
        try:
            tape = captured.call({i: GradientLike(tuple(g.shape), g.stride(), g.dtype) for i, g in gradients.items()})
        except CaptureError:
            tape = captured.tape
        same = _same_forward(tape, captured.tape) and tape.graph == captured.tape.graph
        same = same and not not_by_element(tape, self.schedule, self._device)
        coded = self._coded(tape) if same else captured.first
        captured.codes[key] = coded if coded.lands == captured.first.lands else captured.first
        if _same_forward(tape, captured.tape):
            captured.reached[key] = frozenset(number for number, _, _ in tape.landed)


def _same_forward(one: Tape, other: Tape) -> bool:
    """Whether forward does the same, numbers and constants included."""
    n = one.graph.n_forward
    if n != other.graph.n_forward or len(one.constants) != len(other.constants) or one.calls[:n] != other.calls[:n]:
        return False
    return all(map(torch.equal, one.constants, other.constants))


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _is_loss(_: int, out: Tensor) -> bool:
    return out.dim() == 0


def _is_any(_: int, out: Tensor) -> bool:
    return True


def _like(tape: Tape) -> Any:
    slots = [(i, tape.given[Outside("gradient", i)]) for i in tape.asked]
    return tuple(sorted((i, slot.size, slot.stride, slot.dtype) for i, slot in slots))


def held_bytes(values: Iterable[Any]) -> int:
    """Of the tensors among `values`, each storage once."""
    storages = (each.untyped_storage() for each in values if isinstance(each, Tensor))
    return sum({each._cdata: each.nbytes() for each in storages}.values())


class FrozenRun:
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
        self._numbers = captured.first.lands
        self._backward: Generator[int, None, list[Tensor]] | None = None
        self._landed: list[Tensor] = []
        self._reached: frozenset[int] | None = None
        """Parameters that have a gradient; None: all."""
        self.in_pieces = False
        """A chain of nodes runs its backward (Rule 4)."""
        self._back: tuple[Callable[[Any], Tensor], ...] = ()
        """How what was kept comes back, where others say where it is (Rule 7)."""

    def start(self, inputs: list[Any]) -> Any:
        """Run forward; what it returns has the chain of nodes for its history (Rule 3)."""
        tape = self._captured.tape
        flow = [inputs[n] for n, _ in tape.input_gradients]
        self.inputs = inputs
        with torch.no_grad():
            self.forward()
        self.in_pieces = is_watched(self._state[number] for number in self._numbers)
        if self.in_pieces:
            token = end(self, *flow) if flow else self.token
            for number in reversed(self._numbers):
                token = land(self, number, token, self._state[number])
        else:
            token = whole(self, *(self._state[n] for n in self._numbers), *flow)
        tensors = iter(leave(self, token))
        return tree_unflatten([next(tensors) if isinstance(leaf, Slot) else leaf for leaf in tape.outputs], tape.output_spec)

    def forward(self) -> None:
        """The schedule's forward."""
        alone = nothing_stays()
        code = self.region.alone_code(self._captured) if alone else self._captured.first
        keep: tuple[Callable[[Tensor], Any], ...] = ()
        if self.region.is_claimed and not alone:
            hooks = hooks_of_table() or (_as_it_is, _as_it_is)
            keep, self._back = hooks[:1], hooks[1:]
        with no_autocast():
            self.outputs, saved = code.forward(self._state, self.inputs, *keep)
        self.inputs = []
        if alone:
            return
        self.saved = [saved]
        self._versions = self._sum_of_versions()

    def waiting(self) -> list[Any]:
        """What it holds for its backward."""
        return [each for held in self.saved for each in held]

    def is_written(self) -> bool:
        """Whether something that backward needs was written into since forward."""
        return self._sum_of_versions() != self._versions

    def _sum_of_versions(self) -> int:
        saved = sum(each._version for each in self.saved[0] if isinstance(each, Tensor))
        read = (self._state[n] for n in self._captured.read)
        return saved + sum(each._version for each in read if not each.is_inference())  # those cannot be written into

    def gradient_of(self, number: int) -> Tensor | None:
        """The gradient of a parameter, whose turn it is; nobody else holds it. None: the loss leaves it out."""
        reached = self._run_on()
        assert reached == number, (reached, number)
        if number == self._numbers[-1] and not self._captured.tape.input_gradients:
            self._run_on()  # nothing that follows is waited for
        return self._handed_out(number, self._landed.pop())

    def _handed_out(self, number: int, gradient: Tensor) -> Tensor | None:
        """What autograd gets: no zeros where the loss leaves a parameter out, but to hooks, which it would call with None."""
        return gradient if self._state[number]._backward_hooks or self._has_gradient(number) else None

    def _has_gradient(self, number: int) -> bool:
        return self._reached is None or number in self._reached

    def gradients_of_inputs(self) -> list[Tensor]:
        """Of those that want one; backward is through."""
        gradients = self._run_on()
        assert isinstance(gradients, list), gradients
        return gradients

    def all_gradients(self, node: Any) -> list[Tensor | None]:
        """Run backward: gradients of parameters, None where they were put in place, then of inputs."""
        edge = dict(zip(self._numbers, (edge for edge, _ in node.next_functions), strict=False))
        found: dict[int, Tensor | None] = dict.fromkeys(self._numbers)
        while not isinstance(reached := self._run_on(), list):
            gradient = self._landed.pop()
            parameter = self._state[reached]
            if is_hooked(parameter) or not self._has_gradient(reached):
                found[reached] = self._handed_out(reached, gradient)
            elif parameter.is_leaf and is_accumulated(edge[reached]):
                put_in_place(parameter, gradient)
            else:
                found[reached] = gradient
            del gradient
        return [*found.values(), *reached]

    def _run_on(self) -> int | list[Tensor]:
        """Run to the next gradient of a parameter, or to the end."""
        if self._backward is None:
            self._backward = self._begin()
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
        flowing = [self.gradients.get(i) for i in range(len(coded.tape.outputs))]
        self.gradients = {}
        return coded.backward(self._state, self.saved, flowing, self._landed, *self._back)

    def _check(self) -> None:
        self._require_first_order()
        if not self.saved:
            raise ApplyError(
                "backward runs a second time, but the schedule has let go of what it needs.",
                fix="add the losses up before one backward(), or choose recompute: {kind: none}", code="MT326",
            )  # fmt: skip
        if self.is_written():
            raise ApplyError(
                "something that backward needs was written into after the model's forward.",
                evidence="One of: the weights, a buffer, an input of the model, an output of the model.",
                fix="write x = x + y instead of x += y, and step the optimizer after backward", code="MT326",
            )  # fmt: skip

    def _require_first_order(self) -> None:
        if torch.is_grad_enabled():
            raise ApplyError(
                "gradients of gradients do not work under a frozen schedule.", fix="choose recompute: {kind: none}", code="MT326"
            )
