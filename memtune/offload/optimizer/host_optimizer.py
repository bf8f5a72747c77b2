"""The user's optimizer on host memory: masters and state on the host, D2H of gradients, H2D of weights.

The optimizer object remains the user's; its groups now have host copies, by which its state is keyed. A step:

    _offload_gradients (pre-step hook)       D2H copy of each gradient, then freed on the device
    optimizer.step() or _native_step         the user's step, or one native pass per parameter
    _copy_weights_to_device (post-step hook) H2D copy of each new weight

With `master`, bfloat16 parameters have float32 masters on the host; the host memory of the bfloat16 gradient
takes the new bfloat16 weight, which is copied to the device.

`grad_offload` and the parameter offloaders offload gradients earlier and have parameters updated before
`step`, on a thread that overlaps with backward (`update`). A step may also leave updates to the next step:
delayed by a step (`delay_after`; lossy), or deferred to the next forward (`defer`; exact).

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
from memtune.device import platform_of
from memtune.errors import ApplyError
from memtune.offload.core import (
    PendingUpdates,
    changed_type_error,
    host_values,
    model_order,
    not_one_by_one,
    optimizer_parameter,
    own_grad,
    room_bytes,
    set_own_grad,
    state_to_host,
    to_host_now,
)
from memtune.offload.gradients import ExternalWrites, watch_loads
from memtune.offload.optimizer.deferred_updates import DeferredUpdates, sync_reads, without_sync
from memtune.offload.optimizer.native_update import Moments, NativeUpdate, master_of, on_update_thread
from memtune.runtime import (
    HOST,
    Context,
    PartialStep,
    UncopiedHook,
    after_step,
    before_step,
    copy_to_device_together,
    groups,
    local,
    locals_of,
    mark,
    replace_step,
    tier,
    tier_of,
    to_host_together,
    transfer,
    untrack_data,
    with_hooks,
)

Update = Literal["user", "native", "master"]


class HostOptimizer:
    """Moves an optimizer to the host.

    Args:
        context: Its model and optimizer; the optimizer is changed in place.
        update: `user`: the user's own `step`. `native`: one native pass per parameter (`native_update`).
            `master`: the same, with float32 masters.
        moments: Format of a native update's moments.
        delay_after: Number of steps after which each update overlaps with the next step; None: never.
        resident: Parameters that the optimizer itself updates on the device, before the others.

    Raises:
        ApplyError: The native update does not support the optimizer or a parameter's type.

    Attributes:
        pairs: Each parameter on the device and on the host.
        gradients: By host copy: host gradients of this step, from the start of their D2H copies to its end.
        update_all: Makes the native updates of a step; `LockFreeOptimizer` sets it, and the next two.
        sync: Finishes all updates, before state is read or loaded.
        is_delayed: Returns True if the weights on the device lack an update.
    """

    def __init__(
        self,
        context: Context,
        update: Update = "user",
        moments: Moments = "float32",
        delay_after: int | None = None,
        resident: Collection[nn.Parameter] = (),
    ) -> None:
        placement = context.placement
        # Refused before any state moves, so that a failed `apply` has nothing to restore here.
        if resident:
            _refuse_parts(context.optimizer)
        self._resident = set(resident)
        self.native = None if update == "user" else NativeUpdate(context.optimizer, moments)
        self._master = update == "master"
        self.optimizer = context.optimizer
        self._device = context.device
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self.gradients: dict[nn.Parameter, Tensor] = {}
        for group in self.optimizer.param_groups:
            # The group objects remain: schedulers hold references to them.
            group["params"] = [
                p if p in self._resident else self._host_copy(context, p) for p in group["params"]
            ]
        # The order of the model, as in the pass; a user's groups may have another one.
        place = model_order(context)
        self.pairs.sort(key=lambda pair: place.get(pair[0], len(place)))
        # Copied by a parameter offloader, and by this optimizer.
        self._with_offloader: set[nn.Parameter] = set()  # the optimizer's own
        self._copied = list(self.pairs)
        self._dtypes = {parameter: parameter.dtype for parameter, _ in self.pairs}
        self._known = self._resident.union(host for _, host in self.pairs)
        self._updated_by_user = [*self._resident, *(host for _, host in self.pairs)]
        self._has_narrow = any(host.dtype is not parameter.dtype for parameter, host in self.pairs)
        self._state_ids: list[int] = []
        self._updated: set[nn.Parameter] = set()  # host copies updated before `step`
        self._running: list[Future[None]] = []  # delayed updates
        # Updates that overlap with backward: their futures and the gradients that they read.
        self._waiting: PendingUpdates[tuple[list[Future[None]], list[Tensor]]] = PendingUpdates(
            self._room_bytes(context)
        )
        self._delay_after, self._steps = delay_after, 0
        self._delayed: dict[nn.Parameter, Tensor] | None = None  # gradients of the last step's delayed update
        self._delayed_began = False
        self._deferred: DeferredUpdates | None = None
        self.update_all, self.sync = self._update_in_step, self._finish_updates
        self.is_delayed: Callable[[], bool] = lambda: bool(self._delayed)
        # A shard's gradient is also set on its full parameter, and must be freed in both.
        self._full_parameter = {shard: full for full, shard in placement.optimizer_params.items()}
        placement.optimizer_params.update(self.pairs)
        self._versions_before_step: list[int] | None = None
        """Versions of all that a step updates, from its first update until weights are on the device."""
        self._host_tier = ExitStack()  # open while the optimizer computes, closed even if its step raises
        self._install(context)
        self._writes = ExternalWrites(context, (device for device, _ in self.pairs))

    def _install(self, context: Context) -> None:
        """Subscribe to loads and clears, and replace the optimizer's step."""
        context.events.weights_loaded.subscribe(self._on_weights_loaded)
        context.events.grads_cleared.subscribe(self._on_grads_cleared)
        watch_loads(
            context, {device for device, _ in self.pairs}, self._copy_to_host, before=self._finish_before_load
        )
        # The state dict has host weights of offloaded blocks, which running updates write.
        context.model.register_state_dict_pre_hook(UncopiedHook(self._join))
        # After `_on_weights_loaded`, which may raise: the step then remains partial.
        self.partial_step = PartialStep(context)
        # A native step runs the step hooks itself (`with_hooks`); the user's own `step` is wrapped by torch
        # already.
        own = self.optimizer.step if self.native is None else with_hooks(self.optimizer, self._native_step)
        replace_step(self.optimizer, self._with_cleanup(own))
        # `last`: checks and reductions that were registered before must see the gradients on the device.
        before_step(self.optimizer, self._offload_gradients, last=True)
        # `after_step` puts it before the hooks registered so far, such as ZeRO's all-gather of new weights.
        after_step(self.optimizer, self._copy_weights_to_device)
        if self._delay_after is not None:
            self.sync_before_checkpoints(context)

    def _room_bytes(self, context: Context) -> int:
        """Return the bound of gradients that wait for overlapped updates, by the trained blocks."""
        hosts = {device: host for device, host in self.pairs if host.requires_grad}
        block_of: dict[nn.Parameter, int] = {}
        for index, name in enumerate(context.blocks):
            for parameter in context.model.get_submodule(name).parameters():
                block_of.setdefault(context.placement.optimizer_param(parameter), index)
        return room_bytes(
            [host.nbytes for host in hosts.values()], [block_of.get(each, -1) for each in hosts]
        )

    def sync_before_checkpoints(self, context: Context) -> None:
        """Finish deferred and delayed updates before any state dict is read or loaded."""
        context.model.register_state_dict_pre_hook(UncopiedHook(lambda: self.sync()))
        context.model.register_load_state_dict_pre_hook(UncopiedHook(lambda: self.sync()))
        self.optimizer.register_state_dict_pre_hook(lambda _: self.sync())
        self.optimizer.register_load_state_dict_pre_hook(lambda *_: self.sync())

    def _with_cleanup(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return `step` with the host tier closed after it, and a partial update detected if it raises."""

        def run_step(*args: Any, **kwargs: Any) -> Any:
            with self._host_tier:
                try:
                    return step(*args, **kwargs)
                except BaseException:
                    # False if the error is a user's post-step hook's: `_copy_weights_to_device` has run by
                    # then.
                    self.partial_step.is_it |= self._has_updated()
                    raise
                finally:
                    self._versions_before_step = None

        return run_step

    def _update_versions(self) -> list[int]:
        """Return the versions of all tensors, host and device, that the optimizer's own step updates."""
        if self.native is not None:
            return []
        return [each._version for each in self._updated_by_user]

    def _has_updated(self) -> bool:
        """Return True if a step that raised has updated something."""
        # Native updates leave versions unchanged, so they always count.
        return self._versions_before_step is not None and (
            self.native is not None or self._update_versions() != self._versions_before_step
        )

    @torch.no_grad()
    def _native_step(self) -> None:
        with without_sync(self.optimizer):
            self.update_all()

    def _update_in_step(self) -> None:
        """Run this step's native updates, except those made early, deferred or delayed."""
        native, optimizer = self.native, self.optimizer
        assert native is not None
        # One-step delayed update (ZeRO-Offload, section 5.2): off in the first steps, whose gradients change
        # rapidly.
        if self._delay_after is not None and self._steps >= self._delay_after:
            self.start_deferred()
            self._join()
            # The weights copied to the device next are those of the last step's gradients; this step's wait.
            self._delayed, self.gradients = self.gradients, self._delayed or {}
            self._delayed_began = False
            # State exists from the first step on, as in torch, though its update comes later.
            native.make_state(optimizer, self._delayed.get)
        else:
            # Overlapped updates of this step end before the others, so that at most one thread writes
            # weights.
            self._join()
            deferred = {} if self._deferred is None else self._deferred.defer(self.gradients)
            gradients, updated = self.gradients, self._updated
            native.step(
                optimizer,
                (lambda host: None if host in updated else gradients.get(host)) if updated else gradients.get,
            )
            if deferred:
                native.make_state(optimizer, deferred.get)
            # On fake tensors they start with the next micro-batch, so that a recorder sees the overlap.
            if self._deferred is not None and not self._deferred.is_fake:
                self._deferred.start(self._run_updates)
        self._steps += 1

    def _host_copy(self, context: Context, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter that the optimizer gets instead of `parameter`; move its state to the host."""
        host = host_values(context, parameter)
        if self.native is not None:
            host = master_of(host, self._master)
        copy = optimizer_parameter(parameter, host)
        mark(copy, HOST)
        state = self.optimizer.state.pop(parameter, None)
        if state is not None:
            self.optimizer.state[copy] = {name: state_to_host(value) for name, value in state.items()}
        self.pairs.append((parameter, copy))
        return copy

    def _offload_gradients(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Copy the gradients that are still on the device to the host, one group at a time; pre-step hook."""
        self.partial_step.refuse()
        refuse_added_parameters(optimizer, self._known)
        self._adopt_external_writes()
        here: list[tuple[nn.Parameter, nn.Parameter]] = []
        for pair in self.pairs:
            host = pair[1]
            if own_grad(pair[0]) is not None:
                here.append(pair)
            elif (gradient := own_grad(host)) is not None:  # offloaded during backward
                self.gradients[host] = gradient
                if self.native is not None:
                    # The native step reads `_gradients`; `host.grad` would be a second reference that
                    # outlives the update.
                    set_own_grad(host, None)
        in_flight: list[tuple[nn.Parameter, nn.Parameter]] = []
        for part in groups(_own_gradients(here)):
            # Frees the previous group before the next copies start, so one group at a time exists twice.
            self._finish_copies(in_flight)
            in_flight = here[part]
            self._start_copies(in_flight)
        self._finish_copies(in_flight)
        self._versions_before_step = self._update_versions()
        if self._resident:
            self._update_on_device()
        # State that the optimizer creates in its first step is created inside, and so counted on the host.
        self._host_tier.enter_context(tier(HOST))

    def _start_copies(self, pairs: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
        """Start the D2H copies of the gradients of `pairs`."""
        for (_, host), gradient in zip(pairs, to_host_together(_own_gradients(pairs)), strict=True):
            self.gradients[host] = gradient
            if self.native is None:
                set_own_grad(host, gradient)

    def _update_on_device(self) -> None:
        """Run the optimizer's own step over the resident parameters; the others have no gradient."""
        waiting = [(host, host.grad) for _, host in self.pairs]
        for host, _ in waiting:
            # Without a gradient torch's optimizers skip a parameter, which leaves the host's for the step
            # proper.
            set_own_grad(host, None)
        # The unwrapped step: its hooks run once, around the whole step, and must not run for this part.
        type(self.optimizer).step.__wrapped__(self.optimizer)  # type: ignore[attr-defined]
        for host, gradient in waiting:
            set_own_grad(host, gradient)
        for parameter in self._resident:
            # As in `zero_grad`: the update has used it, and the memory is needed before the host's part ends.
            parameter.grad = None

    def leave_to_offloader(self, parameters: Iterable[nn.Parameter]) -> None:
        """Leave the copies of these parameters, H2D and D2H, to a parameter offloader."""
        left = {id(each) for each in parameters}
        mine = [pair for pair in self._copied if id(pair[0]) in left]
        self._with_offloader.update(host for _, host in mine)
        self._copied = [pair for pair in self._copied if id(pair[0]) not in left]
        self._writes.ignore_rows(parameter for parameter, _ in mine)
        for parameter, _ in mine:
            untrack_data(parameter)  # a write through `data` is to the host copy itself

    def update(self, parameters: Iterable[nn.Parameter], *, at_once: bool = True) -> None:
        """Update these model parameters from the gradients of their host copies, which are freed.

        Args:
            parameters: On the device.
            at_once: Return when the updates are done. Otherwise they overlap with later computation until
                `step`, which copies the weights to the device. Waiting gradients are bounded by
                `PendingUpdates`: earlier updates finish first where these would exceed the bound.
        """
        native, wanted = self.native, set(parameters)
        assert native is not None
        gradients = {
            host: host.grad for device, host in self.pairs if device in wanted and host.grad is not None
        }
        self._updated.update(gradients)
        if at_once:
            self._run_updates(gradients, None)
        else:
            self._run_overlapped(gradients)
        # Only the update thread may still hold the gradients; it drops each after its update.
        for host in gradients:
            set_own_grad(host, None)

    def _run_overlapped(self, gradients: dict[nn.Parameter, Tensor]) -> None:
        used_gradients = []
        for host, gradient in gradients.items():
            if gradient.dtype is not host.dtype:
                # bfloat16: the update writes the new weight into it, which `copy_weights` reads.
                self.gradients[host] = gradient
            else:
                used_gradients.append(gradient)
        n_bytes = sum(gradient.nbytes for gradient in used_gradients)
        # Wait before these updates start: the bound depends on sizes only, so the pass predicts host memory.
        self._finish(self._waiting.make_room(n_bytes))
        futures: list[Future[None]] = []
        self._run_updates(gradients, futures)
        self._waiting.add((futures, used_gradients), n_bytes)

    def _finish(self, rounds: Iterable[tuple[list[Future[None]], list[Tensor]]]) -> None:
        """Wait for these updates and free their gradients; raise the error of a failed one."""
        for updates, _ in rounds:
            for each in updates:
                each.result()

    def _run_updates(self, gradients: dict[nn.Parameter, Tensor], futures: list[Future[None]] | None) -> None:
        assert self.native is not None
        with (
            tier(HOST),
            torch.no_grad(),
            without_sync(self.optimizer),
            nullcontext() if futures is None else on_update_thread(futures),
        ):
            self.native.step(self.optimizer, gradients.get)

    def defer(self, context: Context, blocks: dict[int, list[nn.Parameter]]) -> DeferredUpdates:
        """Defer the updates of `blocks`: they start when `step` ends and overlap with the next forward.

        Host weights of a block must be read only after `DeferredUpdates.finish`. State dicts, loads and reads
        of `optimizer.state` wait for all deferred updates.

        Args:
            context: Its model and optimizer; hooks for checkpoints are registered.
            blocks: Parameters by block, in the order of use.
        """
        if not blocks:
            return DeferredUpdates({})
        # Fake tensors have no thread to wait for: a recorder runs the updates in line.
        host_of = dict(self.pairs)
        fake = any(isinstance(host.data, FakeTensor) for host in host_of.values())
        hosts = {
            block: [host_of[each] for each in mine if each in host_of]
            for block, mine in sorted(blocks.items())
        }
        self._deferred = DeferredUpdates(hosts, is_fake=fake)
        self.sync_before_checkpoints(context)
        if not self._deferred.is_fake:
            sync_reads(self.optimizer, self._finish_updates)
        return self._deferred

    def start_deferred(self) -> None:
        """Start the updates that the last step left; they overlap with this step's forward and backward."""
        # First: an update that starts from a stale master would overwrite the user's weights.
        self._adopt_external_writes()
        if self._deferred is not None:
            self._deferred.start(self._run_updates)
        if self._delayed and not self._delayed_began:
            self._delayed_began = True
            self._run_updates(self._delayed, self._running)

    def _join(self) -> None:
        """Wait for overlapped and delayed updates; raise the error of a failed one."""
        self._finish(self._waiting.drain())
        while self._running:
            self._running.pop(0).result()

    def _finish_updates(self) -> None:
        """Finish all deferred and delayed updates and copy their weights to the device."""
        # `start` before `finish_all`: deferred updates that no micro-batch has started yet would otherwise be
        # lost.
        if self._deferred is not None:
            self._deferred.start(self._run_updates)
            self._deferred.finish_all()
        if self._delayed:
            self.start_deferred()
            self._join()
            # Set to None first: `is_delayed` must not see an update that is done.
            delayed, self._delayed, self._delayed_began = self._delayed, None, False
            self.copy_weights(delayed, set(delayed))

    def _finish_copies(self, pairs: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> None:
        """Wait for the D2H copies into the gradients of `pairs`, then free their sources on the device."""
        transfer.finish_all(self.gradients[host] for _, host in pairs)
        for parameter, _ in pairs:
            set_own_grad(parameter, None)
        for parameter, _ in pairs if self._full_parameter else ():
            if parameter in self._full_parameter:
                self._full_parameter[parameter].grad = None

    def _copy_weights_to_device(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Copy all new weights to the device and free the host gradients; post-step hook."""
        self._host_tier.close()
        # If updates are delayed, the new weights are those of the last step's gradients.
        self.copy_weights(self.gradients, None if self._delayed is None else set(self.gradients))
        self.gradients = {}
        self._updated.clear()
        self._versions_before_step = None
        self._mark_state()

    def _mark_state(self) -> None:
        """Mark new state as in host memory."""
        # It was allocated inside `tier(HOST)`, which marks real tensors through the native ledger only.
        state = self._state_tensors()
        ids = list(map(id, state))
        if ids != self._state_ids:
            self._state_ids = ids
            for value in state:
                if value.device.type == "cpu" and tier_of(value) != HOST:
                    mark(value, HOST)

    @torch.no_grad()
    def copy_weights(self, gradients: dict[nn.Parameter, Tensor], hosts: set[nn.Parameter] | None) -> None:
        """Copy the new weights of `hosts` (None: of all) to the device; free `gradients` group by group."""
        # A bfloat16 weight is in the memory of its gradient.
        # No copies for these: the offloader loads the new weights before their next use.
        for host in self._with_offloader.intersection(gradients):
            _drop(gradients, host)
        new = self._copied
        if hosts is not None or self._has_narrow:
            # Without a gradient a bfloat16 weight was not updated, and has no new value on the host.
            new = [
                (parameter, host)
                for parameter, host in self._copied
                if (hosts is None or host in hosts) and (host.dtype is parameter.dtype or host in gradients)
            ]
        weights = locals_of(parameter for parameter, _ in new)
        for part in groups(weights):
            copy_to_device_together(
                weights[part],
                [
                    gradients[host] if self._has_narrow and host.dtype is not parameter.dtype else host
                    for parameter, host in new[part]
                ],
            )
            for _, host in new[part]:
                _drop(gradients, host)
        for host in list(gradients):
            _drop(gradients, host)
        self._writes.note_writes([parameter for parameter, _ in new])

    def _on_grads_cleared(self, parameters: Iterable[nn.Parameter]) -> None:
        """Drop the gradients that a step took before it raised; those of early updates are in use."""
        for each in parameters if self.gradients else ():
            if each in self.gradients and each not in self._updated:
                del self.gradients[each]

    def _on_weights_loaded(self) -> None:
        """Copy loaded weights and state to the host; they replace early updates."""
        # In this order: an update that still runs would write into the loaded values.
        self._join()
        self._updated.clear()
        self.gradients.clear()
        self._copy_to_host([parameter for parameter, _ in self.pairs])
        for state in self._state_dicts():
            state.update({name: state_to_host(value) for name, value in state.items()})

    def _finish_before_load(self) -> None:
        """Finish running updates before a load, which they would overwrite."""
        self.sync()
        self._join()

    @torch.no_grad()
    def _copy_to_host(self, parameters: Collection[nn.Parameter]) -> None:
        """Copy these weights of the device to their host copies."""
        # An offloaded parameter shows its host copy, so that is written already.
        wanted = {id(each) for each in parameters}
        mine = [pair for pair in self._copied if id(pair[0]) in wanted]
        if mine:
            self._join()
        for parameter, host in mine:
            if parameter.dtype is not self._dtypes[parameter]:
                raise changed_type_error(parameter, self._dtypes[parameter], parameter.shape)
            host.copy_(to_host_now(local(parameter)))
            if host in self._updated:
                # The loaded weight replaces the early update's bfloat16 weight, which must not be copied.
                self.gradients.pop(host, None)
        self._writes.note_writes(list(parameters))

    def _adopt_external_writes(self) -> None:
        """Copy weights that the user has written on the device to the host; the next update starts from them.

        Raises:
            ApplyError: An update of one is delayed or was made early.
        """
        written = set(self._writes.take_external())
        if written and (
            self.is_delayed()
            or any(host in self._updated for device, host in self.pairs if device in written)
        ):
            raise write_during_update_error(len(written))
        if written:
            self._copy_to_host(written)

    def _state_dicts(self) -> list[dict[str, Any]]:
        with without_sync(self.optimizer):
            return [
                state for parameter, state in self.optimizer.state.items() if parameter not in self._resident
            ]

    def _state_tensors(self) -> list[Tensor]:
        return [v for state in self._state_dicts() for v in state.values() if isinstance(v, Tensor)]

    def check(self) -> dict[str, Any]:
        """Return the bytes of weights and state on the host.

        Raises:
            ApplyError: A state tensor of the optimizer is on the device.
        """
        values = self._state_tensors()
        strayed = [
            v
            for v in values
            if not platform_of(v.device).is_host
            or (self._device.type == "cpu" and tier_of(v) != HOST and v.numel() > 1)
        ]
        if strayed:
            raise ApplyError(
                f"{len(strayed)} tensors of the optimizer's state are still on {self._device}.", code="MT309"
            )
        return {
            "parameters": len(self.pairs),
            "host_bytes": sum(host.nbytes for _, host in self.pairs) + sum(v.nbytes for v in values),
        }


def _own_gradients(pairs: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> list[Tensor]:
    """Return the parts on this rank of the gradients of the model's parameters in `pairs`, which have one."""
    found = (own_grad(parameter) for parameter, _ in pairs)
    with transfer.without_grad():  # parts of DTensors without their autograd wrappers
        return locals_of(each for each in found if each is not None)


def _drop(gradients: dict[nn.Parameter, Tensor], host: nn.Parameter) -> None:
    """Free the gradient of `host` in `gradients`."""
    held = own_grad(host)
    if gradients.pop(host, None) is held and held is not None:
        set_own_grad(host, None)


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


def refuse_added_parameters(optimizer: Optimizer, known: Collection[nn.Parameter]) -> None:
    """Refuse a step if the optimizer has a parameter that is not `known`: no component offloads its gradient.

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


def write_during_update_error(n_written: int) -> ApplyError:
    """Return the error for weights written on the device although a running update replaces them."""
    return ApplyError(
        f"{n_written} weights were written on the device while an update of theirs is running.",
        evidence="The update would overwrite the write, or be overwritten.",
        fix="write weights by load_state_dict; or updates at the end of the step, not deferred or delayed",
        code="MT318",
    )
