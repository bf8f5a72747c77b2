"""An optimizer's step as one native pass over each parameter in host memory (`csrc/optim`).

The optimizer object, its groups and the names of its state remain the user's: schedulers, checkpoints and
`load_state_dict` work as before. With float32 throughout, AdamW's weights and moments have the bits of
torch's fused AdamW on CPU, except for one rounding of the second moment in a tensor's last few elements (less
than a vector). torch's loops over tensors (`foreach` or not) differ from both by a rounding of the square
root where torch takes it from MKL.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memtune import _native, refusals
from memtune.errors import ApplyError
from memtune.program import Resource
from memtune.runtime import HOST, SeamOp, in_huge_pages, is_observed, mark, register, tier

Moments = Literal["float32", "bfloat16", "int8"]
DTYPES: Final[dict[Moments, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.uint8,
}
OWN: Final = "offload: {states: {kind: optimizer_cpu, update: user}}"
"""A config that updates with any optimizer, in any type."""
BLOCK: Final[int] = _native.MOMENT_BLOCK
"""Elements of an 8-bit moment that share a scale."""
_FIRST: Final = {"adamw": "exp_avg", "lion": "exp_avg", "sgd": "momentum_buffer"}
_SECOND: Final = {"adamw": "exp_avg_sq", "adagrad": "sum"}


def update_(
    rule: str,
    moments: str,
    weight: Tensor,
    gradient: Tensor,
    out: Tensor | None,
    first: Tensor | None,
    second: Tensor | None,
    first_scale: Tensor | None,
    second_scale: Tensor | None,
    step: Tensor | None,
    settings: list[float],
    maximize: bool,
    seed: int,
) -> None:
    """Implement `torch.ops.memtune.host_update_`: one step of `rule` over one parameter.

    Args:
        rule: `adamw` with `settings` (lr, beta1, beta2, eps, weight_decay), `sgd` (lr, momentum, dampening,
            weight_decay, nesterov), `adagrad` (lr, lr_decay, eps, weight_decay), `lion` (lr, beta1, beta2,
            weight_decay).
        moments: Format of `first` and `second`; 8-bit ones have a scale per `BLOCK` elements.
        weight: The float32 master.
        gradient: float32 or bfloat16.
        out: Memory of the new bfloat16 weight; may be `gradient`.
        first: First moment, momentum, or None.
        second: Second moment, sum of squares, or None.
        first_scale: Of `first`.
        second_scale: Of `second`.
        step: Number of steps done, one float, which is incremented; None for rules that do not count.
        settings: Hyperparameters.
        maximize: Maximize the objective.
        seed: Of stochastic rounding, together with `step`.
    """
    # Tensors may have any strides. Those whose strides differ from the weight's are copied during the
    # update, and so is a weight with gaps.
    # Read on the calling thread: OpenMP keeps the number per thread.
    threads = torch.get_num_threads()

    def update() -> None:
        count = 1.0
        # Adam counts before it corrects the bias, as torch does.
        if step is not None:
            # On the update thread, in order with the update: a state dict that waits for it sees both or
            # neither.
            step.add_(1)
            count = step.item()
        sign = -1.0 if maximize else 1.0
        numbers = _native.OptimizerNumbers(
            **_NUMBERS[rule](count, *settings), sign=sign, seed=_seed(seed, int(count), moments)
        )
        # The kernel takes rows; any common order of elements will do, since the rules are elementwise.
        rows = _FlatViews(weight)
        arrays = (
            rows.flatten(weight),
            rows.flatten(gradient, changes=False),
            rows.flatten(out),
            rows.flatten(first),
            rows.flatten(second),
        )
        _native.optimizer_update(rule, moments, *arrays, first_scale, second_scale, numbers, threads)
        rows.write_back()

    _run(update)


register(
    "host_update_(str rule, str moments, Tensor(a!) weight, Tensor gradient, Tensor(b!)? out, Tensor(c!)?"
    " first, Tensor(d!)? second, Tensor(e!)? first_scale, Tensor(f!)? second_scale, Tensor(g!)? step, float[]"
    " settings, bool maximize, int seed) -> ()",
    SeamOp(Resource.HOST_THREADS),
    update_,
)


_Optional = Tensor | None
_Job = tuple[int, list[float], bool, _Optional, Tensor, Tensor, _Optional, _Optional, tuple[_Optional, ...]]
"""Update of one dense parameter: seed, settings (one list for all of a group), whether to maximize, step,
weight, gradient, first and second moment, and the scales of these if they have any.

A tuple: every step makes one for each parameter.
"""
_Given = tuple[int, dict[str, Any], nn.Parameter, Tensor]
"""Seed, group, weight and gradient."""
_update_all: Any = getattr(_native, "optimizer_update_all", None)  # builds of older sources lack it


@functools.cache
def _zero_dim_one(dtype: torch.dtype) -> Tensor:
    # Made once: this thread would free it at some time after the step.
    return torch.ones((), dtype=dtype)


def _update_together(rule: str, moments: str, jobs: list[_Job]) -> None:
    """Do the same as `update_` for each of `jobs`, in one native call."""
    threads = torch.get_num_threads()

    def update() -> None:
        steps = [job[3] for job in jobs if job[3] is not None]
        counts = [1.0] * len(jobs)
        if steps:
            # Of a tensor: a number would become one for each of them, as without `alpha`.
            torch._foreach_add_(steps, _zero_dim_one(steps[0].dtype), alpha=1.0)
            counts = [each.item() for each in steps]
        numbers: dict[tuple[int, float, int], tuple[int, Any]] = {}
        rows, is_rounded, before = [], moments != "float32", (-1, -1.0, -1)
        for (number, settings, maximize, _, weight, gradient, first, second, scales), count in zip(
            jobs, counts, strict=True
        ):
            seed = _seed(number, int(count), moments) if is_rounded else 0
            # Parameters of one group and step share their numbers: bias corrections are computed once.
            key = id(settings), count, seed
            if key != before:
                before = key
                if key not in numbers:
                    sign = -1.0 if maximize else 1.0
                    own = _native.OptimizerNumbers(**_NUMBERS[rule](count, *settings), sign=sign, seed=seed)
                    numbers[key] = len(numbers), own
                place = numbers[key][0]
            at, narrow = gradient.data_ptr(), gradient.dtype is torch.bfloat16
            rows.append(
                (
                    weight.numel(),
                    weight.data_ptr(),
                    at,
                    at if narrow else 0,
                    0 if first is None else first.data_ptr(),
                    0 if second is None else second.data_ptr(),
                    *([0 if each is None else each.data_ptr() for each in scales] if scales else (0, 0)),
                    int(narrow),
                    place,
                )
            )
        _update_all(rule, moments, rows, [own for _, own in numbers.values()], threads)

    _run(update)


def _run(update: Callable[[], None]) -> None:
    """Run `update` here, or on the update thread inside `on_update_thread`."""
    futures: list[Future[None]] | None = getattr(_local, "futures", None)
    if futures is None:
        update()
    else:
        # A list, which `_once` empties: the executor drops a call's arguments only after its future is done.
        futures.append(_threads().submit(_call_and_release, [update]))


def _call_and_release(call: list[Callable[[], None]]) -> None:
    """Make the call and drop its references before its future is done, so the gradient is freed by then."""
    call.pop()()


_local = threading.local()
_pool: ThreadPoolExecutor | None = None


def _threads() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(1, thread_name_prefix="memtune-update")
    return _pool


def wait_for_updates() -> None:
    """Wait until the update thread has run all updates; before a fork too, whose child has no such thread."""
    if _pool is not None:
        # One thread runs them in order, so an empty task ends after all. At interpreter exit the pool refuses
        # it, and has waited for all.
        with suppress(RuntimeError):
            _pool.submit(int).result()


def _forget_in_child() -> None:
    global _pool
    _pool = None


# A child has the pool object but not its thread; a task that is submitted there would never run.
os.register_at_fork(before=wait_for_updates, after_in_child=_forget_in_child)


@contextmanager
def on_update_thread(futures: list[Future[None]]) -> Iterator[None]:
    """Run the updates that this thread calls inside on a thread, in order; append their futures to `futures`.

    Wait for them before reading a weight or a moment, or changing a gradient.
    """
    _local.futures = futures
    try:
        yield
    finally:
        _local.futures = None


class _FlatViews:
    """Tensors of one shape as 1-d views, all in the memory order of the weight."""

    def __init__(self, weight: Tensor) -> None:
        # `empty_like` keeps the memory order of the weight and leaves out its gaps.
        # Elementwise updates need one common order of elements, not any particular one.
        like = weight if weight.is_contiguous() else torch.empty_like(weight, device="meta")
        self._stride, self._contiguous = like.stride(), like.is_contiguous()
        self._copies: list[tuple[Tensor, Tensor]] = []

    def flatten(self, tensor: Tensor | None, *, changes: bool = True) -> Tensor | None:
        """Return the 1-d view of `tensor`, or of a copy that `back` writes back if `changes`."""
        if tensor is None:
            return None
        tensor = row = tensor.detach()
        alike = tensor.is_contiguous() if self._contiguous else tensor.stride() == self._stride
        if not alike:
            with tier(HOST):
                row = torch.empty_strided(tensor.size(), self._stride, dtype=tensor.dtype).copy_(tensor)
            if changes:
                self._copies.append((tensor, row))
        return row.as_strided((row.numel(),), (1,))

    def write_back(self) -> None:
        """Write the copies back to their tensors."""
        for tensor, row in self._copies:
            tensor.copy_(row)


# A hash, not `seed + count`: neighbouring parameters and steps must not round alike.
def _seed(seed: int, count: int, moments: str) -> int:
    if moments == "float32":  # only narrow moments are rounded stochastically
        return 0
    return int.from_bytes(hashlib.blake2b(f"{seed},{count}".encode(), digest_size=8).digest(), "little")


def _adamw(
    step: float, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float
) -> dict[str, Any]:
    # torch's lerp starts from the nearer end; the same order of operations gives the same bits.
    weight = 1 - beta1
    return {
        "decay": 1 - lr * weight_decay,
        "first": weight if weight < 0.5 else weight - 1,
        "from_gradient": weight >= 0.5,
        "second": beta2,
        "rest": 1 - beta2,
        "correction": (1 - beta2**step) ** 0.5,
        "eps": eps,
        "rate": -(lr / (1 - beta1**step)),
    }


def _sgd(
    step: float, lr: float, momentum: float, dampening: float, weight_decay: float, nesterov: float
) -> dict[str, Any]:
    return {
        "decay": weight_decay,
        "first": momentum,
        "second": 1 - dampening,
        "ahead": momentum if nesterov else 1.0,
        "from_gradient": bool(nesterov),
        "rate": -lr,
    }


def _adagrad(step: float, lr: float, lr_decay: float, eps: float, weight_decay: float) -> dict[str, Any]:
    return {"decay": weight_decay, "eps": eps, "rate": -(lr / (1 + (step - 1) * lr_decay))}


def _lion(step: float, lr: float, beta1: float, beta2: float, weight_decay: float) -> dict[str, Any]:
    decay = 1 - lr * weight_decay
    return {
        "decay": decay,
        "first": 1 - beta2,
        "rest": beta2,
        "second": 1 - beta1,
        "ahead": beta1,
        "rate": -lr,
    }


_NUMBERS: Final[dict[str, Callable[..., dict[str, Any]]]] = {
    "adamw": _adamw,
    "sgd": _sgd,
    "adagrad": _adagrad,
    "lion": _lion,
}


class NativeUpdate:
    """Replaces an optimizer's own `step`, without its hooks.

    Args:
        optimizer: torch's AdamW, Adam without weight decay, SGD or Adagrad, or a class `Lion` with its usual
            groups and state.
        moments: Format of the moments.

    Raises:
        ApplyError: The optimizer is another one, or has a setting that the native update lacks.
    """

    def __init__(self, optimizer: Optimizer, moments: Moments) -> None:
        self.rule, self._moments = _rule_of(optimizer), moments
        self._complete: dict[nn.Parameter, int] = {}
        """Number of moments in the complete state of each parameter."""
        self._dense: dict[nn.Parameter, tuple[Tensor | None, Tensor | None, bool]] = {}
        """Moments by parameter, and whether they and the weight are dense."""
        # A load replaces the state tensors, whose layout is remembered.
        optimizer.register_load_state_dict_post_hook(self._forget)
        for group in optimizer.param_groups:
            _refuse_settings(optimizer, group)

    def _forget(self, optimizer: Optimizer) -> None:
        """Drop what is known of a state that has been replaced."""
        self._complete.clear()
        self._dense.clear()

    def step(self, optimizer: Optimizer, gradient_of: Callable[[nn.Parameter], Tensor | None]) -> None:
        """Update every parameter that has a gradient; a bfloat16 gradient's memory takes the new weight."""
        given: list[_Given] = []
        seed = 0
        for group in optimizer.param_groups:
            moments = len(self.moment_names(group))
            for parameter in group["params"]:
                gradient = gradient_of(parameter)
                if gradient is not None:
                    # The user may have cleared `optimizer.state`, to restart its moments.
                    if self._complete.get(parameter) != moments or (
                        moments and not optimizer.state.get(parameter)
                    ):
                        self._complete_state(optimizer, group, parameter)
                    given.append((seed, group, parameter, gradient))
                seed += 1
        if given and _update_all is not None and not is_observed(given[0][2]):
            # Or every access to a subclass of `Parameter` asks its class for `__torch_function__`.
            with torch._C.DisableTorchFunctionSubclass():
                given = self._step_together(optimizer, given)
        for seed, group, parameter, gradient in given:
            self.one(group, parameter.detach(), gradient, optimizer.state[parameter], seed)

    def _step_together(self, optimizer: Optimizer, given: list[_Given]) -> list[_Given]:
        """Update all dense parameters of `given` in one native call; return the others."""
        first, second = _FIRST.get(self.rule, ""), _SECOND.get(self.rule, "")
        scales = (f"{first}_scale", f"{second}_scale") if self._moments == "int8" else ()
        counts, dense = self.counts_steps, self._dense
        settings: dict[int, tuple[list[float], bool]] = {}
        jobs: list[_Job] = []
        others: list[_Given] = []
        states = optimizer.state
        for each in given:
            seed, group, weight, gradient = each
            state = states[weight]
            moments = state.get(first), state.get(second)
            # By identity of the moments: the user may have replaced or cleared `optimizer.state`.
            known = dense.get(weight)
            if known is None or known[0] is not moments[0] or known[1] is not moments[1]:
                known = dense[weight] = *moments, self._are_dense(weight, moments)
            if not (known[2] and weight.is_contiguous() and gradient.is_contiguous()):
                others.append(each)
                continue
            own = settings.get(id(group))
            if own is None:
                own = settings[id(group)] = self._settings(group), bool(group.get("maximize", False))
            of_moments = tuple(map(state.get, scales))
            step = state["step"] if counts else None
            jobs.append((seed, *own, step, weight, gradient, *moments, of_moments))
        if jobs:
            _update_together(self.rule, self._moments, jobs)
        return others

    def _are_dense(self, weight: Tensor, moments: Iterable[Tensor | None]) -> bool:
        """Return whether the native call can read and write these by their addresses."""
        dtype = DTYPES[self._moments]
        return weight.is_contiguous() and all(
            each is None or (each.is_contiguous() and each.dtype is dtype and each.numel() == weight.numel())
            for each in moments
        )

    def make_state(self, optimizer: Optimizer, gradient_of: Callable[[nn.Parameter], Tensor | None]) -> None:
        """Create the missing state of every parameter that has a gradient."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if gradient_of(parameter) is not None:
                    self._complete_state(optimizer, group, parameter)

    def _complete_state(self, optimizer: Optimizer, group: dict[str, Any], parameter: nn.Parameter) -> None:
        self._make_state(optimizer.state[parameter], parameter, group)
        self._complete[parameter] = len(self.moment_names(group))  # SGD may get its momentum later

    def one(
        self, group: dict[str, Any], weight: Tensor, gradient: Tensor, state: dict[str, Any], seed: int
    ) -> None:
        """Update one float32 `weight` and its `state`; a bfloat16 gradient's memory takes the new weight."""
        first, second = _FIRST.get(self.rule, ""), _SECOND.get(self.rule, "")
        torch.ops.memtune.host_update_(
            self.rule,
            self._moments,
            weight,
            gradient,
            gradient if gradient.dtype is torch.bfloat16 else None,
            *(state.get(name) for name in (first, second, f"{first}_scale", f"{second}_scale", "step")),
            self._settings(group),
            bool(group.get("maximize", False)),
            seed,
        )

    def numbers(self, group: dict[str, Any], steps: int) -> dict[str, Any]:
        """Return the arguments of `_native.OptimizerNumbers` for a parameter's `steps`-th step."""
        return {
            **_NUMBERS[self.rule](float(steps), *self._settings(group)),
            "sign": -1.0 if group.get("maximize") else 1.0,
        }

    def moment_names(self, group: dict[str, Any]) -> list[str]:
        """Return the names of the state tensors that are as large as the parameter."""
        if self.rule == "sgd" and group["momentum"] == 0:
            return []
        return [name for name in (_FIRST.get(self.rule), _SECOND.get(self.rule)) if name]

    @property
    def counts_steps(self) -> bool:
        """True if the state includes the number of steps."""
        return self.rule in ("adamw", "adagrad")

    def _settings(self, group: dict[str, Any]) -> list[float]:
        lr = float(group["lr"])
        if self.rule == "adamw":
            return [lr, *map(float, group["betas"]), group["eps"], group["weight_decay"]]
        if self.rule == "sgd":
            return [
                lr,
                group["momentum"],
                group["dampening"],
                group["weight_decay"],
                float(group["nesterov"]),
            ]
        if self.rule == "adagrad":
            return [lr, group["lr_decay"], group["eps"], group["weight_decay"]]
        return [lr, *map(float, group["betas"]), group["weight_decay"]]

    def _make_state(self, state: dict[str, Any], parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """Create missing state in the chosen format, as torch does at the first step."""
        names = self.moment_names(group)
        fresh = not any(state.get(name) is not None for name in names)
        with tier(HOST):
            if self.counts_steps and "step" not in state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
            for name in names:
                value = state.get(name)
                dtype = DTYPES[self._moments]
                if value is None:
                    state[name] = zeros_in_order_of(parameter, dtype)
                elif value.dtype is not dtype:
                    # Made by the user's optimizer, or loaded: `load_state_dict` casts state to the
                    # parameter's type.
                    state[name] = value.to(dtype)
                if self._moments == "int8" and f"{name}_scale" not in state:
                    state[f"{name}_scale"] = torch.zeros(-(-parameter.numel() // BLOCK))
        for value in state.values() if fresh else ():
            if isinstance(value, Tensor):
                mark(value, HOST)


def master_of(host: Tensor, narrow_too: bool) -> Tensor:
    """Return the tensor that the native update works on: `host` if it is float32, a float32 copy of bfloat16.

    Raises:
        ApplyError: It has another type.
    """
    if host.dtype is torch.float32:
        return host
    if host.dtype is torch.bfloat16 and narrow_too:
        with tier(HOST):
            return in_huge_pages(torch.empty_like(host, dtype=torch.float32)).copy_(host)
    fix = "update: master" if host.dtype is torch.bfloat16 else OWN
    raise refusals.error_of(refusals.float32_weights(fix), f"A parameter is of {host.dtype}.")


def zeros_in_order_of(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return zeros with the memory order of `like`, without its gaps."""
    if like.is_contiguous():
        return in_huge_pages(torch.zeros(like.shape, dtype=dtype))
    return in_huge_pages(torch.zeros_like(like, dtype=dtype, requires_grad=False))


def no_native_update_for(optimizer: Optimizer) -> str:
    """Return the reason why `NativeUpdate` cannot replace `optimizer`'s step; empty if it can."""
    try:
        NativeUpdate(optimizer, "float32")
    except ApplyError as error:
        what = error.what[:1].lower() + error.what[1:].rstrip(".")
        return f"{what}{f' ({error.evidence})' if error.evidence else ''}"
    return ""


def _rule_of(optimizer: Optimizer) -> str:
    name = type(optimizer).__name__
    if type(optimizer) in (torch.optim.AdamW, torch.optim.Adam):
        return "adamw"
    if type(optimizer) is torch.optim.SGD:
        return "sgd"
    if type(optimizer) is torch.optim.Adagrad:
        return "adagrad"
    if name == "Lion" and all(
        {"lr", "betas", "weight_decay"} <= group.keys() for group in optimizer.param_groups
    ):
        return "lion"
    raise ApplyError(
        f"There is no native update for the optimizer {name}.",
        evidence="native: AdamW, Adam without weight decay, SGD, Adagrad, Lion",
        fix=OWN,
        code="MT318",
    )


def _refuse_settings(optimizer: Optimizer, group: dict[str, Any]) -> None:
    wrong = [name for name in ("amsgrad", "differentiable", "capturable") if group.get(name)]
    if (
        type(optimizer) is torch.optim.Adam
        and group["weight_decay"] != 0
        and not group.get("decoupled_weight_decay")
    ):
        wrong.append("weight_decay of Adam")
    wrong += [
        name
        for name in ("lr", "betas")
        if any(isinstance(v, Tensor) for v in _as_tuple(group[name] if name in group else ()))
    ]
    if wrong:
        raise ApplyError(
            f"The native update does not know {', '.join(wrong)} of {type(optimizer).__name__}.",
            fix=OWN,
            code="MT318",
        )


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)
