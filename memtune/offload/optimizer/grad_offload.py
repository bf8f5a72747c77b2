"""Gradients leave the device in buckets while backward goes on, and the host updates what it has been given.

Seven rules, which the pass `offload.optimizer.grad_offload_pass` follows op by op:

Rule 1. A gradient that autograd has put in place, on several ranks one that they have reduced
(`Events.grad_ready`), joins the
        bucket and is no longer the parameter's. When the bucket holds `bucket_bytes` or more, it is sent:
        copies to the host start for all that is in it.
Rule 2. Before a bucket is sent, the one before it has arrived: the device lets go of it, the host adds it to
the sums of earlier
        micro-batches. So the device holds two buckets at most. When backward ends, the last bucket is sent
        and arrives.
Rule 3. What has arrived in the last micro-batch is updated then (`per_gradient`), once its block is complete
(`per_layer`), or
        in `optimizer.step()` (`end_of_step`). Updates run on a thread of their own, beside backward;
        gradients wait for them as `early_updates.Waiting` has it, at most a block's. That the micro-batch is
        the last one is known from `Tuned.step` or `Tuned.micro_batch`; in any other loop all is updated in
        `optimizer.step()`.
Rule 4. Weights go up in `optimizer.step()`, whenever they were updated: within a step no weight changes on
the device. Rule 5. One step late (`HostOptimizer.late`): the update begins with the next step, beside its
forward and backward, and the
        weights go up at its end. A state dict waits for it, and has its weights.
Rule 6. The smallest gradient stays on the device until the step, as a witness: whoever scales gradients in
between (clipping by
        norm) changes it, or the sums on the host and not it, and is refused
        (`offload.gradients.version_checks`). A reduced one lies in one piece with others, and is copied out
        of it. Where there is none in a step, zeros stand in (one rank).
Rule 7. What was in the bucket or on its way when a backward raised is forgotten, and training goes on; what
had landed is the
        user's to clear (`zero_grad`), as in any loop. Where that backward had begun updates, the step cannot
        be taken back, and is refused until a state dict is loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune.errors import ApplyError
from memtune.offload.core import Trigger, resident_count, sentinel_index
from memtune.offload.gradients import SentinelGradient, WatchedGradients
from memtune.offload.optimizer.host_optimizer import add_gradient
from memtune.runtime import (
    HOST,
    BackwardEnd,
    Context,
    EarlyUpdates,
    UncopiedHook,
    before_step,
    local,
    mark,
    transfer,
    weakly,
)

_OTHER = "offload: {states: {kind: optimizer_cpu}} with  trigger: end_of_step"


class Updates(Protocol):
    """Updates parameters from gradients that have arrived on the host."""

    def start_late(self) -> None:
        """Begin what the last step left, if it did."""

    def expect(self, parameters: Iterable[nn.Parameter]) -> None:
        """Prepare for gradients of these parameters, whose copies have started."""

    def update(self, parameters: Iterable[nn.Parameter], *, at_once: bool) -> None:
        """Update these from the gradients of the optimizer's parameters."""

    def check(self) -> dict[str, Any]:
        """Return facts for the audit."""


class GradientOffload:
    """Offloads the gradients of `context`'s model when they are ready.

    Args:
        context: Its model; grad-ready hooks are registered on its parameters.
        optimizer: The host optimizer, with native updates.
        bucket_bytes: Size of a bucket; 0: each gradient is a bucket.
        trigger: When the host updates.
        resident: Parameters that the optimizer itself updates on the device.
    """

    def __init__(
        self,
        context: Context,
        optimizer: Updates,
        bucket_bytes: int,
        trigger: Trigger,
        stays: Collection[nn.Parameter] = (),
    ) -> None:
        placement = context.placement
        self._optimizer, self._bucket_bytes, self._trigger = optimizer, bucket_bytes, trigger
        self._before_grad_use = context.events.before_grad_use
        trained = _trained(context)
        leaving = {
            p: n_bytes for p, n_bytes in trained.items() if placement.optimizer_params.get(p, p) not in stays
        }
        self._witness = SentinelGradient(
            list(leaving)[sentinel_index(list(leaving.values()))], stands_in=placement.world_size == 1
        )
        mine = [p for p in leaving if p in placement.optimizer_params]
        moved = {p: _moved(context, p) for p in mine if p is not self._witness.parameter}
        self._moved = {parameter: rows for parameter, (rows, _) in moved.items()}
        self._held = {parameter: held for parameter, (_, held) in moved.items()}
        for parameter, held in self._held.items():
            if (
                held.dtype is not parameter.dtype
            ):  # a master, whose gradient is as narrow as the weight on the device
                held.grad_dtype = parameter.dtype
        self._block_of: dict[nn.Parameter, int] = {}
        for index, name in enumerate(context.blocks):
            for parameter in context.model.get_submodule(name).parameters():
                if parameter in self._held:
                    self._block_of.setdefault(parameter, index)
        self._blocks = [
            [p for p, block in self._block_of.items() if block == index]
            for index in range(len(context.blocks))
        ]
        self._missing: dict[int, set[nn.Parameter]] = {}  # by block, in this micro-batch
        self._bucket: list[tuple[nn.Parameter, Tensor]] = []
        self._on_the_way: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        self._is_last = False
        self._at_end = BackwardEnd(self._backward_ends, self._backward_raised)
        self._updated = EarlyUpdates(context, "parameter")
        stay = [parameter for parameter in trained if parameter not in self._held]
        self._watched = WatchedGradients(context, stay, self._held.values(), _OTHER)
        self._is_blind = False
        context.events.grads_cleared.subscribe(self._cleared)
        context.undo.callback(
            context.model.register_forward_pre_hook(UncopiedHook(weakly(self._forward_begins))).remove
        )
        self.buckets = self.sent_bytes = 0
        self._listen(context)
        self._outer, context.loop.sync = context.loop.sync, self.sync
        before_step(context.optimizer, self._step_begins)
        context.events.weights_loaded.subscribe(self._at_end.settle)

    def _listen(self, context: Context) -> None:
        if context.events.grad_ready.has_emitter:
            context.events.grad_ready.subscribe(weakly(self._landed))
        elif context.placement.world_size > 1:
            raise ApplyError(
                "Gradients cannot go down as they land here: between backward and the step ranks still change"
                " them.",
                fix=(
                    "sharding: {states: {kind: fsdp}}, ddp, zero1 or zero2, with nothing under"
                    " sharding.parallel"
                ),
                code="MT315",
            )
        else:
            for parameter in (*self._held, self._witness.parameter):
                context.undo.callback(
                    parameter.register_post_accumulate_grad_hook(weakly(self._landed)).remove
                )

    @contextmanager
    def sync(self, last: bool) -> Iterator[None]:
        """Return the context of a micro-batch; during backward of the last one the host updates.

        Only `Tuned.step` and `Tuned.micro_batch` tell which one is the last; in other loops
        `optimizer.step()` updates all.

        Raises:
            ApplyError: A backward with updates has raised, and no state dict has been loaded since.
        """
        self._at_end.settle()
        self._updated.step_begins()
        self._optimizer.start_late()
        self._is_last = last
        self._missing = {index: set(block) for index, block in enumerate(self._blocks)}
        try:
            with nullcontext() if self._outer is None else self._outer(last):
                yield
        finally:
            self._is_last = False

    @torch.no_grad()
    def _landed(self, parameter: Tensor) -> None:
        """Put a ready gradient in the bucket, and send the bucket when it is full; grad-ready hook."""
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        self._at_end.expect()
        if parameter is self._witness.parameter:
            self._witness.landed()
        if parameter not in self._held:
            parameter.grad = _own_memory(parameter.grad)
            return
        self._bucket.append((parameter, local(parameter.grad)))
        parameter.grad = None
        if sum(gradient.nbytes for _, gradient in self._bucket) >= self._bucket_bytes:
            self._send()

    def _send(self) -> None:
        self._arrive()
        if self._is_last and self._trigger == "per_gradient":
            self._optimizer.expect([self._moved[parameter] for parameter, _ in self._bucket])
        for parameter, gradient in self._bucket:
            host = torch.ops.memtune.to_host(gradient)
            mark(host, HOST)
            self._on_the_way.append((parameter, gradient, host))
            self.sent_bytes += gradient.nbytes
        self.buckets += 1
        self._bucket = []

    def _arrive(self) -> None:
        """Wait for the copies, add them to the sums of earlier micro-batches, and update at the trigger."""
        arrived = [(entry[0], entry[2]) for entry in self._on_the_way]
        for entry in arrived:
            transfer.finish(entry[1])
        self._on_the_way = []
        parameters = [parameter for parameter, _ in arrived]
        while arrived:
            parameter, host = arrived.pop(0)
            add_gradient(self._held[parameter], host)
            del host
        if self._is_last:
            self._show(parameters)
        ready = self._ready(parameters) if self._is_last else []
        if ready:
            self._updated.add(ready)
            self._optimizer.update([self._moved[parameter] for parameter in ready], at_once=False)

    def _show(self, arrived: Iterable[nn.Parameter]) -> None:
        for parameter in arrived:
            gradient = self._held[parameter].grad
            assert gradient is not None
            self._before_grad_use.emit(parameter, gradient)

    def _ready(self, arrived: Iterable[nn.Parameter]) -> list[nn.Parameter]:
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
        if self._bucket:
            self._send()
        self._arrive()
        self._witness.note()
        self._watched.note()
        self._is_blind = self._witness.parameter.grad is None

    def _backward_raised(self) -> None:
        """Forget the gradients of a backward that raised; refuse the step if it has updated parameters.

        Gradients accumulated before the error are the user's to clear (`zero_grad`), as in any loop.
        """
        for _, _, host in self._on_the_way:
            transfer.abandon(host)
        self._updated.raised()
        self._watched.forget()
        self._bucket, self._on_the_way, self._is_blind = [], [], False

    def _forward_begins(self) -> None:
        if torch.is_grad_enabled():
            self._at_end.settle()
            if not self._at_end.is_near:
                self._watched.require_unchanged()

    def _cleared(self, parameters: Iterable[nn.Parameter]) -> None:
        self._is_blind = self._is_blind and self._witness.parameter not in set(parameters)

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Refuse the step if the gradients on the device, or only those on the host, were changed since
        backward.
        """
        self._at_end.settle()
        self._updated.step_goes_on()
        self._watched.require_unchanged()
        self._witness.withdraw()
        if self._is_blind:
            raise ApplyError(
                "The smallest parameter got no gradient in this backward, so clipping by norm could not be"
                " noticed.",
                evidence=(
                    f"Its shape is {tuple(self._witness.parameter.shape)}; {len(self._held)} others leave the"
                    " device."
                ),
                fix=_OTHER,
                code="MT364",
            )
        self._updated.forget()
        self._watched.forget()

    def check(self) -> dict[str, Any]:
        """Return the number of buckets and bytes offloaded, and the trigger.

        Raises:
            ApplyError: A state tensor of the optimizer, or an offloaded gradient, is on the device.
        """
        left = [parameter for parameter in self._held if parameter.grad is not None]
        if left:
            raise ApplyError(
                f"{len(left)} gradients are on the device that should have gone down as they landed.",
                code="MT309",
            )
        facts = self._optimizer.check()
        return facts | {
            "trigger": self._trigger,
            "buckets": self.buckets,
            "gradient_bytes_down": self.sent_bytes,
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


def _moved(context: Context, parameter: nn.Parameter) -> tuple[nn.Parameter, nn.Parameter]:
    """Return the moved tensor, `parameter` or this rank's rows of it, and the optimizer's for it."""
    moved, held = context.placement.param_chain(parameter)[-2:]
    return moved, held


def _share_bytes(parameter: nn.Parameter, held: nn.Parameter | None) -> int:
    """Return the bytes of the largest rank's rows of `parameter`."""
    each: tuple[Tensor | None, ...] = (parameter, held)
    divided = next((tensor for tensor in each if isinstance(tensor, DTensor)), None)
    if divided is None:
        return parameter.nbytes
    rows = parameter.shape[0]
    for ranks in divided.device_mesh.shape:
        rows = -(-rows // ranks)
    return rows * parameter.shape[1:].numel() * parameter.itemsize


def _own_memory(gradient: Tensor) -> Tensor:
    """Return `gradient` in a storage of its own; reduced gradients share one with others."""
    here = local(gradient)
    return gradient if here.untyped_storage().nbytes() == here.nbytes else gradient.clone()
