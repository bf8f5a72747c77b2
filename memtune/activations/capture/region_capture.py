"""Capture of a region: runs its forward and backward once on fake tensors and records the ops as a `Tape`.

A capture has no side effects: the ops run below all active modes, on fake copies of parameters, buffers and
inputs, and no attribute of the modules and no generator may have changed afterwards.

A captured region does not run the module's Python code again, so a forward that first draws in a later step
from Python's or numpy's generators (layer drop after a warm-up, augmentation of every tenth batch) would
silently stop drawing. Running it once cannot show such draws, but its code names the generators.
"""

from __future__ import annotations

import dis
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from memtune.activations.capture.executed_code import ExecutedCode, is_library
from memtune.activations.capture.guard_sources import nested_code
from memtune.activations.capture.packed_sequences import packing_by_known_lengths
from memtune.activations.capture.side_effects import no_side_effects
from memtune.activations.capture.tape import (
    CaptureError,
    GradientLike,
    Outside,
    Recorder,
    SideEffectError,
    Slot,
    Tape,
    distributions_are_valid,
    fakes_look_real,
)
from memtune.activations.recompute import without_hooks
from memtune.device import accelerator
from memtune.program import OpGraph
from memtune.runtime import EagerRecorder, is_python_generator, plain_type, undone_draws


def is_plain(tensor: Any) -> bool:
    """Return whether `tensor` is an ordinary strided one, real or fake."""
    return (
        isinstance(tensor, Tensor)
        and plain_type(tensor) in (Tensor, nn.Parameter, FakeTensor)
        and tensor.layout == torch.strided
    )


def named_state(module: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Return each parameter, then each buffer of `module`, once, as (its dictionary, its key, itself)."""
    found: list[tuple[dict[str, Any], str, Tensor]] = []
    for attribute in ("_parameters", "_buffers"):
        seen: set[int] = set()
        for each in module.modules():
            held: dict[str, Any] = getattr(each, attribute)
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found.append((held, name, tensor))
    return found


class _InputGradient(torch.autograd.Function):
    """Marks an input of the region: notes the gradient that arrives in backward, and stops it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Callable[[Tensor], None]) -> Tensor:
        ctx.note = note
        # A view: an output that is its input itself would not be a new node.
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.note(gradients[0])
        return None, None


def capture(
    module: nn.Module,
    forward: Callable[..., Any],
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    autocast: Sequence[Callable[[], AbstractContextManager[Any]]],
    gradients: dict[int, GradientLike] | Callable[[int, Tensor], bool],
    executed: ExecutedCode | None = None,
) -> Tape:
    """Run `forward` and its backward on fake copies of all tensors; return the recorded ops.

    Args:
        module: Module of the region, whose parameters and buffers are replaced by fakes meanwhile.
        forward: Its forward.
        arguments: Arguments of the current call, by position and by name; fakes (`shapes_of`) are enough.
        autocast: The result of `autocast_now` when the module was called.
        gradients: Layout of the gradient of each output that gets one; or a predicate on outputs, for
            contiguous ones.
        executed: Notes the code that runs.

    Raises:
        CaptureError: It cannot be captured; the message names the op and the reason.
    """
    with (
        # The order matters: no mode of the caller sees the capture's ops, and side effects are undone last.
        _disable_current_modes(),
        without_hooks(),
        FakeTensorMode() as fake,
        torch.enable_grad(),
        _no_random_draws(module, forward),
        _unchanged(module),
        no_side_effects(module, SideEffectError),
        fakes_look_real(),
        distributions_are_valid(),
        _observed(executed),
    ):
        # Inside the fake mode, so that it sees fake tensors.
        recorder = Recorder()
        ready_gradients: list[tuple[int, int, Slot]] = []
        arrived: dict[int, Slot] = {}
        with _faked_state(module, fake, recorder, ready_gradients):
            leaves, spec = tree_flatten(arguments)
            faked: dict[int, Tensor] = {}
            for number, leaf in enumerate(leaves):
                # `leaves` are fakes already (`shapes_of`): a capture holds no user tensor.
                if isinstance(leaf, Tensor) and id(leaf) not in faked:
                    # By identity: the same tensor as two arguments must remain one.
                    faked[id(leaf)] = _faked_input(leaf, number, fake, recorder, arrived)
            given = tree_unflatten(
                [faked[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
            )
            with packing_by_known_lengths(recorder.known), EagerRecorder(recorder):
                with ExitStack() as stack:
                    # As autocast was at the call: a capture may run later, in backward, outside of the
                    # caller's context.
                    for context in (no_autocast, *autocast):
                        stack.enter_context(context())
                    out = forward(*given[0], **given[1])
                return _with_backward(recorder, out, gradients, fake, ready_gradients, arrived)


def _with_backward(
    recorder: Recorder,
    out: Any,
    gradients: dict[int, GradientLike] | Callable[[int, Tensor], bool],
    fake: FakeTensorMode,
    ready_gradients: list[tuple[int, int, Slot]],
    arrived: dict[int, Slot],
) -> Tape:
    leaves, spec = tree_flatten(out)
    # Another object may hide tensors, which would be returned without a gradient.
    odd = next(
        (leaf for leaf in leaves if not isinstance(leaf, Tensor | int | float | str | bool | None)), None
    )
    if odd is not None:
        raise CaptureError(f"its forward returns a {type(odd).__name__}")
    outputs = tuple(recorder.slot(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    n_forward = len(recorder.calls)
    differentiable = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    asked = [
        i
        for i in differentiable
        if (i in gradients if isinstance(gradients, dict) else gradients(i, leaves[i]))
    ]
    if not asked:
        raise CaptureError("no output of its forward can be differentiated")
    flowing = []
    for i in asked:
        like = gradients[i] if isinstance(gradients, dict) else _contiguous_like(leaves[i])
        # Below the recorder's mode: the loss makes these tensors, so they are no op of the region.
        with _disable_current_modes(), fake:
            gradient = torch.empty_strided(like.size, like.stride, dtype=like.dtype, device=leaves[i].device)
        recorder.register_outside(gradient, Outside("gradient", i))
        flowing.append(gradient)
    roots = [leaves[i] for i in asked]
    # Python's references would keep values alive that the real backward frees.
    del out, leaves
    with no_autocast():
        torch.autograd.backward(roots, flowing)
    names = tuple(str(call.func) for call in recorder.calls)
    makes, reads, writes = (
        tuple(map(tuple, part)) for part in (recorder.makes, recorder.reads, recorder.writes)
    )
    graph = OpGraph(
        names, n_forward, makes, reads, writes, frozenset(recorder.random), frozenset(recorder.once)
    )
    return Tape(
        graph=graph,
        calls=tuple(recorder.calls),
        outputs=outputs,
        output_spec=spec,
        differentiable=tuple(differentiable),
        with_gradient=tuple(asked),
        ready_gradients=tuple(ready_gradients),
        input_gradients=tuple(sorted(arrived.items())),
        constants=tuple(recorder.constants),
        given=recorder.given,
    )


def _contiguous_like(out: Tensor) -> GradientLike:
    stride = torch._prims_common.make_contiguous_strides_for(out.shape)
    return GradientLike(tuple(out.shape), tuple(stride), out.dtype)


def _faked_input(
    leaf: Tensor, number: int, fake: FakeTensorMode, recorder: Recorder, arrived: dict[int, Slot]
) -> Tensor:
    if not is_plain(leaf):
        raise CaptureError(f"one of its arguments is a {type(leaf).__name__}")
    twin = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    recorder.register_outside(twin, Outside("input", number))
    if not leaf.requires_grad:
        return twin

    def note(gradient: Tensor) -> None:
        arrived[number] = recorder.slot(gradient)

    arrive: Any = _InputGradient.apply
    arriving: Tensor = arrive(twin.requires_grad_(), note)
    return arriving


@contextmanager
def _faked_state(
    module: nn.Module, fake: FakeTensorMode, recorder: Recorder, ready_gradients: list[tuple[int, int, Slot]]
) -> Iterator[None]:
    """Replace every parameter and buffer of `module` by a fake twin in this context."""
    state = named_state(module)
    twins: dict[int, Tensor] = {}
    for number, (_, name, tensor) in enumerate(state):
        if not is_plain(tensor):
            raise CaptureError(f"{name} is a {type(tensor).__name__}")
        twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        # A frozen parameter that forward updates (a momentum encoder) is state like a buffer.
        kind = "parameter" if isinstance(tensor, nn.Parameter) and tensor.requires_grad else "buffer"
        recorder.register_outside(twin, Outside(kind, number))
        if isinstance(tensor, nn.Parameter):
            twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
            if tensor.requires_grad:
                twin.register_post_accumulate_grad_hook(_grad_ready_hook(number, recorder, ready_gradients))
        twins[id(tensor)] = twin
    held_by: list[dict[str, Any]] = [
        held for each in module.modules() for held in (each._parameters, each._buffers)
    ]
    undo = [(held, dict(held)) for held in held_by]
    set_inside = ""
    try:
        for held, before in undo:
            # In place: handles and tied modules reference these dictionaries.
            held.update({name: twins[id(tensor)] for name, tensor in before.items() if tensor is not None})
        yield
        # Only after a forward that ended: an error of its own says more.
        set_inside = next((name for held, before in undo for name in _set_in(held, before, twins)), "")
    finally:
        for held, before in undo:
            _put_back(held, before)
    if set_inside:
        raise CaptureError(f"its forward sets the parameter or buffer {set_inside}")


def _set_in(held: dict[str, Any], before: dict[str, Any], twins: dict[int, Tensor]) -> Iterator[str]:
    """Yield the names that a forward has set in `held` or removed; its tensors were twins before."""
    for name in {**before, **held}:
        tensor = before.get(name)
        if (name in held) is not (name in before) or held[name] is not (
            None if tensor is None else twins[id(tensor)]
        ):
            yield name


def _put_back(held: dict[str, Any], before: dict[str, Any]) -> None:
    """Restore the items of `held`, in their order."""
    held.clear()
    held.update(before)


def _grad_ready_hook(
    number: int, recorder: Recorder, ready_gradients: list[tuple[int, int, Slot]]
) -> Callable[[Tensor], None]:
    def note(parameter: Tensor) -> None:
        assert parameter.grad is not None
        ready_gradients.append((number, len(recorder.calls) - 1, recorder.slot(parameter.grad)))

    return note


@contextmanager
def _no_random_draws(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Refuse draws from generators of Python and numpy, which a captured region could not repeat."""
    # They are restored in any case, so that the run that follows draws the same numbers.
    with undone_draws(module) as drawn:
        yield
        if drawn():
            raise CaptureError("its forward draws random numbers in Python")
        if named := draws_named_in(module, forward):
            raise CaptureError(f"its forward draws random numbers in Python in some steps: it names {named}")


@contextmanager
def _observed(executed: ExecutedCode | None) -> Iterator[None]:
    """Refuse what the code changes outside of its modules, and what gives something else each time."""
    if executed is None:
        yield
        return
    changed = ""
    try:
        with executed.observed():
            yield
    finally:
        changed = executed.undo()
    if changed:
        raise SideEffectError(f"its forward {changed}")
    if executed.why:
        raise CaptureError(f"its forward {executed.why}")


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Refuse a forward that sets attributes of modules, and restore them."""
    before = [
        # Not the private dictionaries of parameters, buffers and hooks: `_faked_state` and the guards see
        # these.
        (each, {k: v for k, v in vars(each).items() if k[0] != "_" or not isinstance(v, dict)})
        for each in module.modules()
    ]
    try:
        yield
    finally:
        changed = ""
        for each, attributes in before:
            for name in [
                n
                for n in vars(each)
                if n not in attributes and (n[0] != "_" or not isinstance(vars(each)[n], dict))
            ]:
                changed = name
                del vars(each)[name]
            for name, value in attributes.items():
                if vars(each).get(name) is not value:
                    changed = changed if _is_flat_weight(each, name) else name
                    vars(each)[name] = value
        if changed:
            raise CaptureError(f"its forward sets the attribute {changed}")


def _is_flat_weight(module: nn.Module, name: str) -> bool:
    # Recurrent layers build this list again in forward where weights have changed, as they have for the
    # fakes.
    return isinstance(module, nn.RNNBase) and name.startswith("_flat_weight")


def shapes_of(values: Any) -> Any:
    """Return `values` with fake tensors instead of tensors; the same fake for the same tensor."""
    twins: dict[int, Tensor] = {}

    def twin(leaf: Any) -> Any:
        if not is_plain(leaf):
            return leaf
        if id(leaf) not in twins:
            twins[id(leaf)] = torch.empty_strided(
                leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device
            )
            twins[id(leaf)].requires_grad_(leaf.requires_grad)
        return twins[id(leaf)]

    with _disable_current_modes(), FakeTensorMode():
        return tree_map(twin, values)


class no_autocast(AbstractContextManager[None]):
    """Context that disables autocast, because the ops of a tape contain their casts."""

    def __enter__(self) -> None:
        self._kinds = [kind for kind in accelerator.types() if torch.is_autocast_enabled(kind)]
        for kind in self._kinds:
            torch.set_autocast_enabled(kind, False)

    def __exit__(self, *_: object) -> None:
        for kind in self._kinds:
            torch.set_autocast_enabled(kind, True)


def draws_named_in(module: nn.Module, forward: Any) -> str:
    """Return the generator of Python or numpy that `forward`, of `module`, or a submodule's names, or ''."""
    seen = set[CodeType]()
    # An instance may have a forward of its own, which may be memtune's, in place of that of its class.
    every = ((of, each) for each in module.modules() for of in (each.forward, type(each).forward))
    return next((name for of, each in [(forward, module), *every] for name in _named_by(of, each, seen)), "")


def _named_by(value: Any, owner: Any, seen: set[CodeType]) -> Iterator[str]:
    """Yield the generators that the code of `value` names, and that of the functions and classes it names.

    Args:
        value: Any object; only functions, methods and classes outside of torch and numpy have such code.
        owner: The instance or class whose method it is.
        seen: Code that has been looked at.
    """
    if isinstance(value, (MethodType, staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    # Of libraries, torch's draws are ops, and a user's code names the generators of the others.
    if not isinstance(value, (type, FunctionType)) or is_library(value.__module__):
        return
    if isinstance(value, type):
        for each in vars(value).values():
            yield from _named_by(each, value, seen)
        return
    if value.__code__ in seen:
        return
    seen.add(value.__code__)
    outside = {**value.__globals__, **inspect.getclosurevars(value).nonlocals}
    for code in nested_code(value.__code__):
        for each in dis.get_instructions(code):
            name, found = each.argval, None
            if each.opname == "IMPORT_NAME" and name in ("random", "numpy.random"):
                yield name
            elif each.opname in ("LOAD_GLOBAL", "LOAD_DEREF"):
                found = outside.get(name)
            elif each.opname in ("LOAD_ATTR", "LOAD_METHOD"):  # of any object: one of them may be the owner
                found = inspect.getattr_static(owner, name, None)
            if _is_generator(found) and (found is not np or "random" in code.co_names):
                yield name
            yield from _named_by(found, owner, seen)


def _is_generator(value: Any) -> bool:
    """Return True for numpy, modules of generators, generators of Python and numpy, and their methods."""
    if isinstance(value, (MethodType, BuiltinFunctionType)):
        value = value.__self__
    return any(value is each for each in (random, np, np.random)) or is_python_generator(value)
