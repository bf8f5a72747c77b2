"""Gradients leave the device in buckets while backward goes on, and the host updates what it has been given.

Seven rules, which the pass `passes.gradients_down` follows op by op:

Rule 1. A gradient that autograd has put in place, on several ranks one that they have reduced (`Context.lands`), joins the bucket
        and is no longer the parameter's. When the bucket holds `bucket_bytes` or more, it is sent: copies to the host start for
        all that is in it.
Rule 2. Before a bucket is sent, the one before it has arrived: the device lets go of it, the host adds it to the sums of earlier
        micro-batches. So the device holds two buckets at most. When backward ends, the last bucket is sent and arrives.
Rule 3. What has arrived in the last micro-batch is updated then (`per_gradient`), once its block is complete (`per_layer`), or
        in `optimizer.step()` (`end_of_step`). Updates run on a thread of their own, beside backward; gradients wait for them as
        `early_updates.Waiting` has it, at most a block's. That the micro-batch is the last one is known from `Tuned.step` or
        `Tuned.micro_batch`; in any other loop all is updated in `optimizer.step()`.
Rule 4. Weights go up in `optimizer.step()`, whenever they were updated: within a step no weight changes on the device.
Rule 5. One step late (`HostOptimizer.late`): the update begins with the next step, beside its forward and backward, and the
        weights go up at its end. A state dict waits for it, and has its weights.
Rule 6. The smallest gradient stays on the device until the step, as a witness: whoever scales gradients in between (clipping by
        norm) changes it, or the sums on the host and not it, and is refused (`runtime.watched_gradients`). A reduced one lies in
        one piece with others, and is copied out of it. Where there is none in a step, zeros stand in (one rank).
Rule 7. What was in the bucket or on its way when a backward raised is forgotten, and training goes on; what had landed is the
        user's to clear (`zero_grad`), as in any loop. Where that backward had begun updates, the step cannot be taken back, and
        is refused until a state dict is loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import memtune.ops  # noqa: F401  (defines torch.ops.memtune)
from memtune.early_updates import Trigger, staying, witness
from memtune.errors import ApplyError
from memtune.runtime import transfer
from memtune.runtime.backward_end import BackwardEnd, EarlyUpdated
from memtune.runtime.context import Context
from memtune.runtime.held_parameter import held_chain
from memtune.runtime.hooks import StaysBehind, weakly
from memtune.runtime.host_optimizer import add_gradient
from memtune.runtime.own_step import before_step
from memtune.runtime.tiers import HOST, mark
from memtune.runtime.tree import local
from memtune.runtime.watched_gradients import WatchedGradients
from memtune.runtime.witness import Witness

_OTHER = "offload: {states: {kind: optimizer_cpu}} with  trigger: end_of_step"


class Updates(Protocol):
    """What updates parameters from gradients that have arrived on the host."""

    def start_late(self) -> None:
        """Begin what the last step left, if it did."""

    def expect(self, parameters: Iterable[nn.Parameter]) -> None:
        """The gradients of these are on their way, and are to be used when they have arrived."""

    def update(self, parameters: Iterable[nn.Parameter], *, at_once: bool) -> None:
        """Update these from the gradients of what the optimizer holds in their place."""

    def check(self) -> dict[str, Any]:
        """Facts for the audit."""


class GradientsDown:
    """Sends the gradients of `context`'s model to the host as they land.

    Args:
        context: Its model; hooks are put on its parameters.
        optimizer: Holds what gradients are for on the host, and updates natively.
        bucket_bytes: Of gradients that go down together; 0: each by itself.
        trigger: When the host updates.
        stays: What the optimizer itself goes on updating on the device.
    """

    def __init__(
        self, context: Context, optimizer: Updates, bucket_bytes: int, trigger: Trigger, stays: Collection[nn.Parameter] = ()
    ) -> None:
        self._optimizer, self._bucket_bytes, self._trigger = optimizer, bucket_bytes, trigger
        self._before_use = context.before_use
        trained = _trained(context)
        leaving = {p: n_bytes for p, n_bytes in trained.items() if context.represented.get(p, p) not in stays}
        self._witness = Witness(list(leaving)[witness(list(leaving.values()))], stands_in=context.ranks == 1)
        mine = [p for p in leaving if p in context.represented]
        moved = {p: _moved(context, p) for p in mine if p is not self._witness.parameter}
        self._moved = {parameter: rows for parameter, (rows, _) in moved.items()}
        self._held = {parameter: held for parameter, (_, held) in moved.items()}
        for parameter, held in self._held.items():
            if held.dtype is not parameter.dtype:  # a master, whose gradient is as narrow as the weight on the device
                held.grad_dtype = parameter.dtype
        self._block_of: dict[nn.Parameter, int] = {}
        for index, name in enumerate(context.blocks):
            for parameter in context.model.get_submodule(name).parameters():
                if parameter in self._held:
                    self._block_of.setdefault(parameter, index)
        self._blocks = [[p for p, block in self._block_of.items() if block == index] for index in range(len(context.blocks))]
        self._missing: dict[int, set[nn.Parameter]] = {}  # by block, in this micro-batch
        self._bucket: list[tuple[nn.Parameter, Tensor]] = []
        self._on_the_way: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        self._is_last = False
        self._at_end = BackwardEnd(self._backward_ends, self._backward_raised)
        self._updated = EarlyUpdated(context, "parameter")
        stay = [parameter for parameter in trained if parameter not in self._held]
        self._watched = WatchedGradients(context, stay, self._held.values(), _OTHER)
        self._is_blind = False
        context.cleared.append(self._cleared)
        context.undo.callback(context.model.register_forward_pre_hook(StaysBehind(weakly(self._forward_begins))).remove)
        self.buckets = self.sent_bytes = 0
        self._listen(context)
        self._outer, context.sync = context.sync, self.sync
        before_step(context.optimizer, self._step_begins)
        context.reloaded.append(self._at_end.settle)

    def _listen(self, context: Context) -> None:
        if context.lands is not None:
            context.lands(weakly(self._landed))
        elif context.ranks > 1:
            raise ApplyError(
                "Gradients cannot go down as they land here: between backward and the step ranks still change them.",
                fix="sharding: {states: {kind: fsdp}}, ddp, zero1 or zero2, with nothing under sharding.parallel", code="MT315",
            )  # fmt: skip
        else:
            for parameter in (*self._held, self._witness.parameter):
                context.undo.callback(parameter.register_post_accumulate_grad_hook(weakly(self._landed)).remove)

    @contextmanager
    def sync(self, last: bool) -> Iterator[None]:
        """The context of a micro-batch: in the last one's backward the host updates (Rule 3).

        Raises:
            ApplyError: Rule 7.
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
        """Rule 1."""
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        self._at_end.expect()
        if parameter is self._witness.parameter:
            self._witness.landed()
        if parameter not in self._held:
            parameter.grad = _of_its_own(parameter.grad)
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
        """Rules 2 and 3."""
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
            for look in self._before_use:
                look(parameter, gradient)

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
        """Rule 7."""
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
        """Rules 6 and 7."""
        self._at_end.settle()
        self._updated.step_goes_on()
        self._watched.require_unchanged()
        self._witness.withdraw()
        if self._is_blind:
            raise ApplyError(
                "The smallest parameter got no gradient in this backward, so clipping by norm could not be noticed.",
                evidence=f"Its shape is {tuple(self._witness.parameter.shape)}; {len(self._held)} others leave the device.",
                fix=_OTHER, code="MT364",
            )  # fmt: skip
        self._updated.forget()
        self._watched.forget()

    def check(self) -> dict[str, Any]:
        """What went down, and when the host updates.

        Raises:
            ApplyError: Some state tensor of the optimizer is on the device, or a gradient has stayed there.
        """
        left = [parameter for parameter in self._held if parameter.grad is not None]
        if left:
            raise ApplyError(f"{len(left)} gradients are on the device that should have gone down as they landed.", code="MT309")
        facts = self._optimizer.check()
        return facts | {"trigger": self._trigger, "buckets": self.buckets, "gradient_bytes_down": self.sent_bytes}


def _trained(context: Context) -> dict[nn.Parameter, int]:
    """The trained parameters of the model, and the bytes of each on the rank that has most of it: the same on all ranks."""
    trained = [parameter for parameter in context.model.parameters() if parameter.requires_grad]
    return {parameter: _share_bytes(parameter, context.represented.get(parameter)) for parameter in trained}


def staying_in(context: Context, ratio: float) -> list[nn.Parameter]:
    """What the optimizer holds of the parameters whose state stays on the device, before any has moved."""
    trained = _trained(context)
    parameters = list(trained)
    return [context.represented.get(each, each) for each in parameters[: staying(list(trained.values()), ratio)]]


def _moved(context: Context, parameter: nn.Parameter) -> tuple[nn.Parameter, nn.Parameter]:
    """What has been moved of `parameter`, itself or this rank's rows of it, and what the optimizer holds in its place."""
    moved, held = held_chain(context, parameter)[-2:]
    return moved, held


def _share_bytes(parameter: nn.Parameter, held: nn.Parameter | None) -> int:
    """Bytes of the largest rank's rows of `parameter`."""
    each: tuple[Tensor | None, ...] = (parameter, held)
    divided = next((tensor for tensor in each if isinstance(tensor, DTensor)), None)
    if divided is None:
        return parameter.nbytes
    rows = parameter.shape[0]
    for ranks in divided.device_mesh.shape:
        rows = -(-rows // ranks)
    return rows * parameter.shape[1:].numel() * parameter.itemsize


def _of_its_own(gradient: Tensor) -> Tensor:
    """`gradient` in memory of its own: reduced ones lie in one piece with others."""
    here = local(gradient)
    return gradient if here.untyped_storage().nbytes() == here.nbytes else gradient.clone()
