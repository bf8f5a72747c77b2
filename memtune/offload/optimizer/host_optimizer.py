"""The user's optimizer on host memory: masters and state on the host, D2H of gradients, H2D of weights.

The optimizer object remains the user's; its groups now have host copies, by which its state is keyed. Two
hooks frame
`step`: the first offloads gradients one after the other and frees each on the device when the next copy
starts, the second
copies new weights to the device. In between runs the optimizer's own `step`, or one native pass over each
parameter
(`host_update`). With `master`, bfloat16 parameters have float32 masters on the host: the memory of the
bfloat16 gradient
takes the new bfloat16 weight, which is copied to the device.

`grad_offload` and the parameter offloaders offload gradients earlier and have parameters updated before
`step`, on a thread
that overlaps with backward. A step may also delay its update to the next step (`delay_after`).

Source: ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune.errors import ApplyError
from memtune.offload.core import (
    PendingUpdates,
    model_order,
    not_one_by_one,
    optimizer_parameter,
    room_bytes,
    state_to_host,
    to_host_now,
)
from memtune.offload.gradients import ExternalWrites, watch_loads
from memtune.offload.optimizer.deferred_updates import DeferredUpdates, as_it_is, settle_reads
from memtune.offload.optimizer.native_update import (
    Moments,
    NativeUpdate,
    master_of,
    on_update_thread,
    refuse_closure,
)
from memtune.runtime import (
    HOST,
    Context,
    PartialStep,
    UncopiedHook,
    after_step,
    before_step,
    local,
    mark,
    replace_step,
    tier,
    tier_of,
    transfer,
    with_hooks,
)

Update = Literal["own", "native", "master"]


class HostOptimizer:
    """Moves an optimizer to the host.

    Args:
        context: Its model and optimizer; the optimizer is changed in place.
        update: `own`: the optimizer's own step. `native`: `host_update`. `master`: the same, with float32
            masters.
        moments: Format of a native update's moments.
        delay_after: Number of steps after which each update overlaps with the next step; None: never.
        resident: Parameters that the optimizer itself updates on the device, before the others.

    Raises:
        ApplyError: The native update does not support the optimizer or a parameter's type.
    """

    def __init__(
        self,
        context: Context,
        update: Update = "own",
        moments: Moments = "float32",
        late_after: int | None = None,
        stays: Collection[nn.Parameter] = (),
    ) -> None:
        placement = context.placement
        if stays:
            _refuse_parts(context.optimizer)
        self._stays = set(stays)
        self._native = None if update == "own" else NativeUpdate(context.optimizer, moments)
        self._master = update == "master"
        self._optimizer = context.optimizer
        self._device = context.device
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []  # (on the device, on the host)
        self._gradients: dict[
            nn.Parameter, Tensor
        ] = {}  # on the host, from when their copies start to the end of the step
        for group in self._optimizer.param_groups:
            group["params"] = [p if p in self._stays else self._host_copy(p) for p in group["params"]]
        place = model_order(context)
        self._pairs.sort(key=lambda pair: place.get(pair[0], len(place)))
        self._comes_and_goes: set[nn.Parameter] = set()
        self._updated: set[nn.Parameter] = set()  # on the host, before `step`
        self._under_way: list[Future[None]] = []
        self._waiting: PendingUpdates[tuple[list[Future[None]], list[Tensor]]] = PendingUpdates(
            self._room_bytes(context)
        )
        self._late_after, self._steps = late_after, 0
        self._late: dict[nn.Parameter, Tensor] | None = (
            None  # gradients of the step before, whose update is late
        )
        self._late_began = False
        self._leaves: DeferredUpdates | None = None
        self._whole = {
            shard: whole for whole, shard in placement.optimizer_params.items()
        }  # both have the shard's gradient
        placement.optimizer_params.update(self._pairs)
        context.events.weights_loaded.subscribe(self._reload)
        context.events.grads_cleared.subscribe(self._cleared)
        watch_loads(context, {device for device, _ in self._pairs}, self._loaded, before=self._hosts_change)
        context.model.register_state_dict_pre_hook(
            UncopiedHook(self._join)
        )  # those of blocks that come and go are in it
        self._half = PartialStep(context)
        self._begun: dict[nn.Parameter, int] | None = None
        """Versions of all that the step updates, from before its first update until the weights are on the
        device.
        """
        self._host = ExitStack()  # open while the optimizer computes, closed even if its step raises
        own = self._optimizer.step if self._native is None else with_hooks(self._optimizer, self._native_step)
        replace_step(self._optimizer, self._closing(own))
        before_step(self._optimizer, self._gradients_down, last=True)
        after_step(
            self._optimizer, self._weights_up
        )  # before those that hand the new weights on to other ranks
        if late_after is not None:
            self._settle_before_checkpoints(context)
        self._writes = ExternalWrites(context, (device for device, _ in self._pairs))

    def _room_bytes(self, context: Context) -> int:
        """Return the bound of gradients that wait for overlapped updates, from the trained parameters by
        block.
        """
        hosts = {device: host for device, host in self._pairs if host.requires_grad}
        block_of: dict[nn.Parameter, int] = {}
        for index, name in enumerate(context.blocks):
            for parameter in context.model.get_submodule(name).parameters():
                block_of.setdefault(context.placement.optimizer_param(parameter), index)
        return room_bytes(
            [host.nbytes for host in hosts.values()], [block_of.get(each, -1) for each in hosts]
        )

    def _settle_before_checkpoints(self, context: Context) -> None:
        context.model.register_state_dict_pre_hook(lambda *_: self._settle())
        context.model.register_load_state_dict_pre_hook(lambda *_: self._settle())
        self._optimizer.register_state_dict_pre_hook(lambda _: self._settle())
        self._optimizer.register_load_state_dict_pre_hook(lambda *_: self._settle())

    def _closing(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def closing(*args: Any, **kwargs: Any) -> Any:
            with self._host:
                try:
                    return step(*args, **kwargs)
                except BaseException:  # a hook of the user's after the step finds all of it done
                    self._half.is_it |= self._has_updated()
                    raise
                finally:
                    self._begun = None

        return closing

    def _updates(self) -> dict[nn.Parameter, int]:
        """Return the versions of all tensors that the optimizer's own step updates, on the host and on the
        device.
        """
        if self._native is not None:
            return {}
        return {each: each._version for each in (*self._stays, *(host for _, host in self._pairs))}

    def _has_updated(self) -> bool:
        """Return True if a step that raised has updated something.

        Native updates leave versions unchanged, so they always count.
        """
        return self._begun is not None and (self._native is not None or self._updates() != self._begun)

    @torch.no_grad()
    def _native_step(self, closure: None = None) -> None:
        with as_it_is(self._optimizer):
            self._update_all(self._optimizer)

    def _update_all(self, optimizer: Optimizer) -> None:
        native = self._native
        assert native is not None
        if self._late_after is not None and self._steps >= self._late_after:
            self.start_late()
            self._join()
            self._late, self._gradients = self._gradients, self._late or {}
            self._late_began = False
            native.make_state(optimizer, self._late.get)
        else:
            self._join()
            left = {} if self._leaves is None else self._leaves.take(self._gradients)
            native.step(optimizer, lambda host: None if host in self._updated else self._gradients.get(host))
            native.make_state(optimizer, left.get)
            if self._leaves is not None and not self._leaves.is_fake:
                self._leaves.start(self._run)
        self._steps += 1

    def _host_copy(self, parameter: nn.Parameter) -> nn.Parameter:
        host = to_host_now(local(parameter))
        if self._native is not None:
            host = master_of(host, self._master)
        copy = optimizer_parameter(parameter, host)
        mark(copy, HOST)
        state = self._optimizer.state.pop(parameter, None)
        if state is not None:
            self._optimizer.state[copy] = {name: state_to_host(value) for name, value in state.items()}
        self._pairs.append((parameter, copy))
        return copy

    def _gradients_down(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._half.refuse()
        refuse_others(optimizer, self._stays.union(host for _, host in self._pairs))
        if self._native is not None:
            refuse_closure(each for each in (*args, *kwargs.values()) if each is not optimizer)
        self._take_writes()
        on_the_way: nn.Parameter | None = None
        for parameter, host in self._pairs:
            if parameter.grad is None:
                if host.grad is not None:  # came down as it landed
                    self._gradients[host] = host.grad
                    if self._native is not None:
                        host.grad = None
                continue
            if on_the_way is not None:
                self._arrived(on_the_way)
            gradient = torch.ops.memtune.to_host(local(parameter.grad))
            mark(gradient, HOST)
            self._gradients[host] = gradient
            if self._native is None:
                host.grad = gradient
            on_the_way = host
            self._source = parameter
        if on_the_way is not None:
            self._arrived(on_the_way)
        self._begun = self._updates()
        if self._stays:
            self._update_on_device()
        self._host.enter_context(tier(HOST))

    def _update_on_device(self) -> None:
        """Run the optimizer's own step over the resident parameters; the others have no gradient."""
        waiting = [(host, host.grad) for _, host in self._pairs]
        for host, _ in waiting:
            host.grad = None
        type(self._optimizer).step.__wrapped__(self._optimizer)  # type: ignore[attr-defined]  # without hooks
        for host, gradient in waiting:
            host.grad = gradient
        for parameter in self._stays:
            parameter.grad = None

    def leave_down(self, parameters: Iterable[nn.Parameter]) -> None:
        """Leave these to an offloader, which copies their weights to the device and their gradients to the
        host.
        """
        self._comes_and_goes.update(parameters)

    def expect(self, parameters: Iterable[nn.Parameter]) -> None:
        """Do nothing: all that an update needs is in host memory already."""

    def update(self, parameters: Iterable[nn.Parameter], *, at_once: bool = True) -> None:
        """Update these model parameters from the gradients of their host copies, which are freed.

        Args:
            parameters: On the device.
            at_once: Return when the updates are done. Otherwise they overlap with later computation until
                `step`, which
                copies the weights; gradients wait within the bound of `update_triggers.Waiting`, and earlier
                ones are used up
                first where these would exceed it.
        """
        native, wanted = self._native, set(parameters)
        assert native is not None
        gradients = {
            host: host.grad for device, host in self._pairs if device in wanted and host.grad is not None
        }
        if at_once:
            self._run(gradients, None)
        else:
            self._run_beside(gradients)
        for host in gradients:
            host.grad = None

    def _run_beside(self, gradients: dict[nn.Parameter, Tensor]) -> None:
        used_up = []
        for host, gradient in gradients.items():
            self._updated.add(host)
            if gradient.dtype is not host.dtype:  # its memory takes the new weight
                self._gradients[host] = gradient
            else:
                used_up.append(gradient)
        n_bytes = sum(gradient.nbytes for gradient in used_up)
        self._finish(self._waiting.let_go(n_bytes))
        under_way: list[Future[None]] = []
        self._run(gradients, under_way)
        self._waiting.put((under_way, used_up), n_bytes)

    def _finish(self, turns: Iterable[tuple[list[Future[None]], list[Tensor]]]) -> None:
        """Wait for these updates and free their gradients; raise the error of a failed one."""
        for updates, _ in turns:
            for each in updates:
                each.result()

    def _run(self, gradients: dict[nn.Parameter, Tensor], under_way: list[Future[None]] | None) -> None:
        assert self._native is not None
        with (
            tier(HOST),
            torch.no_grad(),
            as_it_is(self._optimizer),
            nullcontext() if under_way is None else on_update_thread(under_way),
        ):
            self._native.step(self._optimizer, gradients.get)

    def leave_late(self, context: Context, blocks: dict[int, list[nn.Parameter]]) -> DeferredUpdates:
        """Updates of these blocks of the model begin when `step` ends and go on after it, those of the first
        block first.

        Whoever reads their weights waits for them; a state dict, and loading one, does, and so does who reads
        `optimizer.state`.

        Args:
            context: Of the model.
            blocks: Their parameters.
        """
        held = dict(self._pairs)
        fake = any(isinstance(host.data, FakeTensor) for host in held.values())
        hosts = {
            block: [held[each] for each in mine if each in held] for block, mine in sorted(blocks.items())
        }
        self._leaves = DeferredUpdates(hosts, is_fake=fake)
        self._settle_before_checkpoints(context)
        if not fake:
            settle_reads(self._optimizer, self._settle)
        return self._leaves

    def start_late(self) -> None:
        """Begin the update that the last step left, if it did, beside what comes next."""
        self._take_writes()
        if self._leaves is not None:
            self._leaves.start(self._run)
        if self._late and not self._late_began:
            self._late_began = True
            self._run(self._late, self._under_way)

    def _join(self) -> None:
        """Wait for overlapped and delayed updates; raise the error of a failed one."""
        self._finish(self._waiting.rest())
        while self._under_way:
            self._under_way.pop(0).result()

    def _settle(self) -> None:
        """Finish all deferred and delayed updates and copy their weights to the device."""
        if self._leaves is not None:
            self._leaves.start(self._run)
            self._leaves.finish_all()
        if self._late:
            self.start_late()
            self._join()
            late, self._late, self._late_began = self._late, None, False
            self._up(late, set(late))

    def _arrived(self, host: nn.Parameter) -> None:
        transfer.finish(self._gradients[host])
        self._source.grad = None
        if self._source in self._whole:
            self._whole[self._source].grad = None

    def _weights_up(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._host.close()
        self._up(self._gradients, self._updated_now())
        self._gradients = {}
        self._updated.clear()
        self._begun = None
        for (
            value
        ) in self._state():  # made inside `tier(HOST)`; where no native ledger noticed (fake tensors), say so
            if value.device.type == "cpu" and tier_of(value) != HOST:
                mark(value, HOST)

    def _updated_now(self) -> set[nn.Parameter]:
        """Return the host copies with new weights."""
        late = self._late is not None
        return {host for _, host in self._pairs if not late or host in self._gradients}

    @torch.no_grad()
    def _up(self, gradients: dict[nn.Parameter, Tensor], hosts: set[nn.Parameter]) -> None:
        """Copy the new weights of `hosts` to the device and free `gradients` one by one.

        A bfloat16 weight is in the memory of its gradient.
        """
        for parameter, host in self._pairs:
            if parameter in self._comes_and_goes and host.grad is gradients.pop(host, None):
                host.grad = None
        for parameter, host in self._pairs:
            gradient = gradients.pop(host, None)
            if host in hosts and parameter not in self._comes_and_goes:
                narrow = host.dtype is not parameter.dtype
                if not narrow or gradient is not None:
                    torch.ops.memtune.copy_to_device_(local(parameter), gradient if narrow else host)
                    self._writes.wrote(parameter)
            if host.grad is gradient:
                host.grad = None

    def _cleared(self, parameters: Iterable[nn.Parameter]) -> None:
        """Drop the gradients that a step took before it raised; those of early updates are in use."""
        for each in parameters:
            if each in self._gradients and each not in self._updated:
                del self._gradients[each]

    def _reload(self) -> None:
        """Copy loaded weights and state to the host; they replace early updates."""
        self._join()
        self._updated.clear()
        self._gradients.clear()
        self._loaded([parameter for parameter, _ in self._pairs])
        for state in self._states():
            state.update({name: state_to_host(value) for name, value in state.items()})

    def _hosts_change(self) -> None:
        """Finish running updates before a load, which they would overwrite."""
        self._settle()
        self._join()

    @torch.no_grad()
    def _loaded(self, parameters: Collection[nn.Parameter]) -> None:
        """Copy these weights of the device to their host copies."""
        wanted = (
            set(parameters) - self._comes_and_goes
        )  # whoever brings those up has written their host copies
        if wanted:
            self._join()
        for parameter, host in self._pairs:
            if parameter in wanted:
                host.copy_(to_host_now(local(parameter)))
                self._writes.wrote(parameter)
                if host in self._updated:  # its narrow weight is not wanted any more
                    self._gradients.pop(host, None)

    def _take_writes(self) -> None:
        """Copy weights that the user has written on the device to the host, so that the next update starts
        from them.

        Raises:
            ApplyError: An update of one is delayed or was made early.
        """
        written = set(self._writes.by_others(self._comes_and_goes))
        if written and (
            self._is_late() or any(host in self._updated for device, host in self._pairs if device in written)
        ):
            raise written_while_updating(len(written))
        if written:
            self._loaded(written)

    def _is_late(self) -> bool:
        return bool(self._late)

    def _states(self) -> list[dict[str, Any]]:
        with as_it_is(self._optimizer):
            return [
                state for parameter, state in self._optimizer.state.items() if parameter not in self._stays
            ]

    def _state(self) -> list[Tensor]:
        return [v for state in self._states() for v in state.values() if isinstance(v, Tensor)]

    def check(self) -> dict[str, Any]:
        """Return the bytes of weights and state on the host.

        Raises:
            ApplyError: A state tensor of the optimizer is on the device.
        """
        values = self._state()
        strayed = [
            v
            for v in values
            if v.is_cuda or (self._device.type == "cpu" and tier_of(v) != HOST and v.numel() > 1)
        ]
        if strayed:
            raise ApplyError(
                f"{len(strayed)} tensors of the optimizer's state are still on {self._device}.", code="MT309"
            )
        return {
            "parameters": len(self._pairs),
            "host_bytes": sum(host.nbytes for _, host in self._pairs) + sum(v.nbytes for v in values),
        }


def _refuse_parts(optimizer: Optimizer) -> None:
    if why := not_one_by_one(optimizer):
        raise ApplyError(
            f"{type(optimizer).__name__} cannot update some parameters on the device and others on the host.",
            evidence=f"{why}.",
            fix=(
                "ratio: 1.0 (zero_offload), device_cache: false (angel_ptm) or  device_updates: false"
                " (patrickstar, elixir)  for offload.states"
            ),
            code="MT318",
        )


def refuse_others(optimizer: Optimizer, known: Collection[nn.Parameter]) -> None:
    """Refuse a step if the optimizer has a parameter that is not `known`, whose gradient no component would
    offload.

    Raises:
        ApplyError: It has one.
    """
    others = [each for group in optimizer.param_groups for each in group["params"] if each not in known]
    if others:
        raise ApplyError(
            f"{len(others)} parameters were added to the optimizer after apply, and would never be updated.",
            evidence=f"Shapes: {', '.join(str(tuple(each.shape)) for each in others[:3])}.",
            fix="optimizer.add_param_group before memtune.apply, or a second optimizer for them",
            code="MT318",
        )


def written_while_updating(n_written: int) -> ApplyError:
    """Return the error for weights written on the device although a running update replaces them."""
    return ApplyError(
        f"{n_written} weights were written on the device while an update of theirs is under way.",
        evidence="It would undo the write, or be undone.",
        fix="write weights by load_state_dict; or updates at the end of the step, not late",
        code="MT318",
    )


def add_gradient(held: nn.Parameter, arrived: Tensor) -> None:
    """Add a micro-batch's gradient, which has arrived on the host, to the sum of those before it."""
    if held.grad is None:
        held.grad = arrived
    else:
        with tier(HOST):
            held.grad.add_(arrived)
