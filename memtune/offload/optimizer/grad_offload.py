"""Gradient offload during backward, in buckets, with host updates that overlap with it (ZeRO-Offload).

The pipeline of a gradient; the pass `offload.optimizer.grad_offload_pass` predicts it op by op:

    grad-ready hook --> bucket --full--> D2H copy --next bucket full--> host sum --trigger--> host update
                                                                           '--no trigger--> optimizer.step()

`optimizer.step()` copies all new weights to the device (H2D), so no weight on the device changes within a
step.

Invariants:

- The device holds two buckets at most: the one being filled and the one in D2H copies
  (`offload.gradients.OffloadedGradients`).
- Updates inside backward run on one thread. Gradients that wait for them are bounded by `PendingUpdates`.
- The smallest gradient is the sentinel: it is resident until the step. Where gradients cannot be shown
  (`runtime.shown_grad`) or some are used inside backward, code of the user's that scales gradients after
  backward changes either the sentinel or only the host sums, and both raise MT364; torch's functions that
  clip change all (`offload.gradients.grad_clipping`).
- A backward that raises after it has begun updates is a step that cannot be undone: it is refused until a
  state dict is loaded.

Source: Ren et al. 2021, ZeRO-Offload (arXiv:2101.06840).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from memtune import refusals
from memtune.errors import ApplyError
from memtune.offload.core import Trigger, own_grad, resident_count, sentinel_index
from memtune.offload.gradients import OffloadedGradients, SentinelGradient
from memtune.runtime import (
    BackwardEnd,
    Context,
    EarlyUpdates,
    UncopiedHook,
    before_step,
    call_when_grad_ready,
    hide_spent,
    local,
    show_as_spent,
    weakly,
)

_OTHER = "offload: {states: {kind: optimizer_cpu}} with trigger: end_of_step"


class Updates(Protocol):
    """A host optimizer that updates parameters inside backward, from gradients on the host."""

    def start_deferred(self) -> None:
        """Start the updates that the last step deferred, if any."""

    def update(self, parameters: Iterable[nn.Parameter], *, at_once: bool) -> None:
        """Update these from the gradients of the optimizer's parameters.

        Args:
            parameters: The model's, or this rank's rows of them.
            at_once: Return when the updates are done; otherwise they overlap with later computation.
        """


class GradientOffload:
    """Offloads the gradients of `context`'s model when they are ready.

    Args:
        context: Its model; grad-ready hooks are registered on its parameters.
        check: Returns facts about the optimizer, for the audit.
        bucket_bytes: Size of a bucket; 0: each gradient is a bucket.
        trigger: When the host updates.
        updates: Makes the updates; None: all are in the step.
        resident: Parameters that the optimizer itself updates on the device.
        expect: Called with parameters whose D2H copies start, and whose updates follow.
    """

    def __init__(
        self,
        context: Context,
        check: Callable[[], dict[str, Any]],
        bucket_bytes: int,
        trigger: Trigger,
        updates: Updates | None = None,
        resident: Collection[nn.Parameter] = (),
        expect: Callable[[list[nn.Parameter]], None] | None = None,
    ) -> None:
        placement = context.placement
        self._check, self._updates, self._expect, self._trigger = check, updates, expect, trigger
        self._before_grad_use = context.events.before_grad_use
        trained = _trained(context)
        # Bytes are those of the largest rank's rows, so that all ranks choose the same sentinel.
        offloaded = {
            p: n_bytes
            for p, n_bytes in trained.items()
            if placement.optimizer_params.get(p, p) not in resident
        }
        # The smallest costs the least memory; it is chosen by bytes alone, so that ranks agree without
        # communication.
        self._sentinel = SentinelGradient(
            list(offloaded)[sentinel_index(list(offloaded.values()))],
            use_placeholder=placement.world_size == 1,
        )
        mine = [p for p in offloaded if p in placement.optimizer_params]
        pairs = {p: _rows_and_host(context, p) for p in mine if p is not self._sentinel.parameter}
        self._device_rows = {parameter: rows for parameter, (rows, _) in pairs.items()}
        self._hosts = {parameter: host_param for parameter, (_, host_param) in pairs.items()}
        for parameter, host_param in self._hosts.items():
            if host_param.dtype is not parameter.dtype:
                # A float32 master. Its gradient is bfloat16, as the weight on the device: `.grad` would
                # refuse it.
                host_param.grad_dtype = parameter.dtype
        self._block_of = self._blocks_by_parameter(context)
        self._blocks = [
            [p for p, block in self._block_of.items() if block == index]
            for index in range(len(context.blocks))
        ]
        self._missing: dict[int, set[nn.Parameter]] = {}  # by block: not on the host in this micro-batch
        self._offloaded_ids = {id(each) for each in self._hosts}
        self._is_last = False  # inside the last micro-batch, whose gradients may be used for updates
        self._backward_end = BackwardEnd(self._backward_ends, self._backward_raised)
        self._early_updates = EarlyUpdates(context, "parameter")
        resident = [parameter for parameter in trained if parameter not in self._hosts]
        # ZeRO's ranks have rows of a gradient whose weight is whole: there is none to show.
        shows = all(local(p).shape == local(host).shape for p, host in self._hosts.items())
        self._gradients = OffloadedGradients(
            context,
            self._hosts,
            resident,
            _OTHER,
            bucket_bytes=bucket_bytes,
            shows=shows,
            before_copies=self._expect_updates,
            arrived=self._arrived,
        )
        self._divided = [] if shows else [p for p in offloaded if p is not self._sentinel.parameter]
        self._sentinel_missing = self._is_shown = False
        self._install(context)

    def _install(self, context: Context) -> None:
        """Subscribe to what happens to gradients and weights, and register hooks."""
        context.events.grads_cleared.subscribe(self._on_grads_cleared)
        # Weakly, and not copied: the model must not keep the offloader, and a deep copy must not offload into
        # it.
        context.undo.callback(
            context.model.register_forward_pre_hook(UncopiedHook(weakly(self._forward_begins))).remove
        )
        self._register_grad_hooks(context)
        # A context that was there, such as DDP's `no_sync`, runs inside this one.
        self._outer_sync, context.loop.sync = context.loop.sync, self.sync
        before_step(context.optimizer, self._step_begins)
        context.events.weights_loaded.subscribe(self._backward_end.settle)

    def _blocks_by_parameter(self, context: Context) -> dict[nn.Parameter, int]:
        """Return the first block of each offloaded parameter."""
        found: dict[nn.Parameter, int] = {}
        for index, name in enumerate(context.blocks):
            for parameter in context.model.get_submodule(name).parameters():
                if parameter in self._hosts:
                    found.setdefault(parameter, index)
        return found

    def _register_grad_hooks(self, context: Context) -> None:
        if context.events.grad_ready.has_emitter:
            # Several ranks: the reduction emits the event when a reduced gradient is in `.grad`.
            context.events.grad_ready.subscribe(weakly(self._on_grad_ready))
        elif context.placement.world_size > 1:
            raise ApplyError(
                "Gradients cannot be offloaded during backward here: ranks change them between backward and"
                " the step.",
                fix=(
                    "sharding: {states: {kind: fsdp}}, ddp, zero1 or zero2, with nothing under"
                    " sharding.parallel"
                ),
                code="MT315",
            )
        else:
            watched = (*self._hosts, self._sentinel.parameter)
            call_when_grad_ready(context, dict.fromkeys(watched, weakly(self._on_grad_ready)))

    @contextmanager
    def sync(self, last: bool) -> Iterator[None]:
        """Return the context of a micro-batch; during backward of the last one the host updates.

        Raises:
            ApplyError: A backward with updates has raised, and no state dict has been loaded since.
        """
        # Only `Tuned.step` and `Tuned.micro_batch` announce the last micro-batch; in other loops
        # `optimizer.step()` updates all.
        self._backward_end.settle()
        self._early_updates.step_begins()
        # Updates that the last step left read no gradient of this one, so they overlap with its forward.
        if self._updates is not None:
            self._updates.start_deferred()
        self._is_last = last
        # By micro-batch: a block is complete only when all of its gradients have arrived again.
        self._missing = {index: set(block) for index, block in enumerate(self._blocks)}
        try:
            with nullcontext() if self._outer_sync is None else self._outer_sync(last):
                yield
        finally:
            self._is_last = False

    def _on_grad_ready(self, parameter: Tensor) -> None:
        """Offload a ready gradient; the sentinel's stays; grad-ready hook."""
        gradient = parameter.grad
        # Queued by the first gradient: autograd accepts a callback only while a backward runs.
        self._backward_end.expect()
        if gradient is None:
            return  # the user's hook has used and freed it
        if id(parameter) not in self._offloaded_ids:
            if parameter is self._sentinel.parameter:
                self._sentinel.on_grad_ready()
            # A reduced gradient is a view of its unit's buffer, which would stay allocated until the step.
            with torch.no_grad():
                parameter.grad = _own_memory(gradient)
            return
        assert isinstance(parameter, nn.Parameter)
        self._early_updates.require_first(parameter)
        # Autograd starts the next micro-batch with a new gradient.
        parameter.grad = None
        self._gradients.add(parameter, gradient)

    def _expect_updates(self, parameters: list[nn.Parameter]) -> None:
        if self._is_last and self._expect is not None:
            # An optimizer on SSD reads its records while the gradients are copied.
            self._expect([self._device_rows[parameter] for parameter in parameters])

    def _arrived(self, parameters: list[nn.Parameter]) -> None:
        """Update what the trigger says, now that these gradients are in their sums."""
        # In earlier micro-batches the sums are not complete, and nothing may use them.
        if not self._is_last:
            return
        self._emit_grad_use(parameters)
        if ready := self._ready_to_update(parameters):
            assert self._updates is not None, "the trigger is in backward"
            for parameter in ready:  # a part may have been ready while an earlier one was in flight
                self._early_updates.require_first(parameter)
            self._early_updates.add(ready, ready)
            self._updates.update([self._device_rows[parameter] for parameter in ready], at_once=False)

    def _emit_grad_use(self, arrived: Iterable[nn.Parameter]) -> None:
        """Notify listeners (gradient checks, `GradScaler`) of gradients whose sums are complete."""
        for parameter in arrived:
            gradient = self._hosts[parameter].grad
            assert gradient is not None
            self._before_grad_use.emit(parameter, gradient)

    def _ready_to_update(self, arrived: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters that the trigger updates now that the gradients `arrived` are on the host."""
        if self._trigger == "per_gradient":
            return list(arrived)
        ready: list[nn.Parameter] = []
        for parameter in arrived if self._trigger == "per_layer" else ():
            block = self._block_of.get(parameter, -1)
            missing = self._missing.get(block, set())
            missing.discard(parameter)
            if block >= 0 and not missing:
                ready += self._blocks[block]
        return ready

    @torch.no_grad()
    def _backward_ends(self) -> None:
        """Offload the last, partly filled bucket and note the versions of all gradients."""
        self._gradients.send()
        # For the bucket just sent: after backward all sums are complete, and the user may clip them.
        self._gradients.finish_copies()
        self._sentinel.record_version()
        self._gradients.show()
        self._is_shown = True
        for parameter in self._divided:
            show_as_spent(parameter, partial(_divided_error, parameter.shape))
        self._sentinel_missing = self._sentinel.parameter.grad is None
        self._early_updates.backward_ends()

    def _backward_raised(self) -> None:
        """Drop the gradients of a backward that raised; refuse the step if it has updated parameters."""
        # Gradients accumulated before the error are the user's to clear (`zero_grad`), as in any loop.
        self._gradients.abandon()
        self._early_updates.raised()
        self._hide_gradients()
        self._sentinel_missing = False

    def _forward_begins(self) -> None:
        """Refuse gradients that were changed since the last backward, before this forward's are added."""
        if torch.is_grad_enabled():
            self._backward_end.settle()
            # Recompute calls the model's forward inside backward; gradients are changing then anyway.
            if not self._backward_end.is_near:
                self._gradients.require_unchanged()
                self._hide_gradients()

    def _hide_gradients(self) -> None:
        self._gradients.hide()
        for parameter in self._divided if self._is_shown else ():
            hide_spent(parameter)
        self._is_shown = False

    def _on_grads_cleared(self, parameters: Iterable[nn.Parameter]) -> None:
        self._sentinel_missing = self._sentinel_missing and self._sentinel.parameter not in set(parameters)

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Refuse the step if only some gradients were changed since backward; pre-step hook."""
        self._backward_end.settle()
        self._early_updates.step_goes_on()
        self._gradients.require_unchanged()
        self._hide_gradients()
        self._sentinel.remove_placeholder()
        # Without a sentinel no scaling of gradients could be found, so the step is refused rather than
        # trusted.
        if self._sentinel_missing:
            raise refusals.error_of(
                refusals.clipping_unnoticed_in_step(_OTHER),
                f"Its shape is {tuple(self._sentinel.parameter.shape)}; {len(self._hosts)} other gradients"
                " are offloaded.",
            )
        self._early_updates.forget()
        self._gradients.forget()

    def check(self) -> dict[str, Any]:
        """Return the number of buckets and bytes offloaded, and the trigger.

        Raises:
            ApplyError: A state tensor of the optimizer, or an offloaded gradient, is on the device.
        """
        left = [parameter for parameter in self._hosts if own_grad(parameter) is not None]
        if left:
            raise ApplyError(
                f"{len(left)} gradients are on the device that should have been offloaded when ready.",
                code="MT309",
            )
        return self._check() | {
            "trigger": self._trigger,
            "buckets": self._gradients.buckets,
            "gradient_bytes_down": self._gradients.sent_bytes,
        }


def _trained(context: Context) -> dict[nn.Parameter, int]:
    """Return the trained parameters with the bytes of the largest rank's rows, equal on all ranks."""
    trained = [parameter for parameter in context.model.parameters() if parameter.requires_grad]
    return {
        parameter: _share_bytes(parameter, context.placement.optimizer_params.get(parameter))
        for parameter in trained
    }


def resident_parameters(context: Context, ratio: float) -> list[nn.Parameter]:
    """Return the optimizer's parameters whose state is resident, before any has moved."""
    trained = _trained(context)
    parameters = list(trained)
    return [
        context.placement.optimizer_params.get(each, each)
        for each in parameters[: resident_count(list(trained.values()), ratio)]
    ]


def _divided_error(shape: torch.Size) -> ApplyError:
    return ApplyError(
        f"The gradient of a weight of shape {tuple(shape)} is divided over ranks, whose rows are"
        " offloaded: there is none to read or to change here.",
        fix="the gradients of the parameters in optimizer.param_groups, or  sharding: {states: {kind: fsdp}}",
        code="MT364",
    )


def _rows_and_host(context: Context, parameter: nn.Parameter) -> tuple[nn.Parameter, nn.Parameter]:
    """Return the tensor that is offloaded, `parameter` or this rank's rows of it, and its host parameter."""
    rows, host_param = context.placement.param_chain(parameter)[-2:]
    return rows, host_param


def _share_bytes(parameter: nn.Parameter, host_param: nn.Parameter | None) -> int:
    """Return the bytes of the largest rank's rows of `parameter`."""
    each: tuple[Tensor | None, ...] = (parameter, host_param)
    divided = next((tensor for tensor in each if isinstance(tensor, DTensor)), None)
    if divided is None:
        return parameter.nbytes
    rows = parameter.shape[0]
    # FSDP2 and ZeRO divide by rows and round up, so the first rank has the most.
    for ranks in divided.device_mesh.shape:
        rows = -(-rows // ranks)
    return rows * parameter.shape[1:].numel() * parameter.itemsize


def _own_memory(gradient: Tensor) -> Tensor:
    """Return `gradient` in a storage of its own; reduced gradients share one with others."""
    here = local(gradient)
    return gradient if here.untyped_storage().nbytes() == here.nbytes else gradient.clone()
