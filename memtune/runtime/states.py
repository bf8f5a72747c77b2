"""Each state of the model divided over its own factor: FSDP2 where parameters are, hops of our own where the factors differ.

Factors (p, g, o) make up to three divisions, one inside the other, each over ranks that hold the same part so far:

1. Parameters over p: FSDP2, which also reduces gradients to p; with p = 1, `Partition` does what comes first of 2 and 3.
2. Gradients from p to g, in every micro-batch; with g = 1 beside p > 1 they stay whole instead until the last one.
3. Sums from max(p, g) to o in the last micro-batch, then averaged over the N/o ranks that hold the same.

The optimizer holds what the last division left. After its step every division gathers what the one before it holds, from the
inside out. Between backward and step a model's parameter has the gradient of its last shard.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from memtune.errors import ApplyError
from memtune.factors import Factors
from memtune.runtime.backward_end import BackwardEnd
from memtune.runtime.context import Context, Landed
from memtune.runtime.own_step import after_step, before_step
from memtune.runtime.partition import Hop, Partition
from memtune.runtime.parts import PARTS, Divided, divided
from memtune.runtime.ranks import require_ranks
from memtune.runtime.rows import Axes, Part, Rows
from memtune.runtime.sharding import rebind, shard, units_of

_DIMS = (PARTS, "copies", "parameters", "gradients", "optimizer")


@cache
def _mesh(device_type: str, parts: int, ranks: int, factors: Factors, group: int) -> DeviceMesh:
    """Dims of size 1 are left out: every dim is a communicator."""
    s, o = factors.summed_over, factors.optimizer
    p = factors.parameters
    sizes = {PARTS: parts, "copies": ranks // o, "parameters": p, "gradients": s // p, "optimizer": o // s}
    # Neighbours hold parts of one copy, then share parameters; the slowest index is the copy.
    where = torch.arange(ranks * parts).view(ranks // o, o // s, s // p, p, parts).permute(4, 0, 3, 2, 1)
    kept = [dim for dim in _DIMS if sizes[dim] > 1]
    return DeviceMesh(device_type, where.reshape([sizes[dim] for dim in kept]), mesh_dim_names=tuple(kept))


def forget_meshes() -> None:
    """Call when the process group is gone: the next one may have its address."""
    _mesh.cache_clear()


def mesh_of(context: Context, factors: Factors) -> DeviceMesh:
    """The ranks by part and copy of the model, and by the rows of parameters, gradients and optimizer state; made once."""
    default = dist.distributed_c10d._get_default_group()
    with _disable_current_modes():
        return _mesh(context.device.type, context.parts, context.copies, factors, id(default))


def _sharers(context: Context, factors: Factors) -> Divided:
    """The ranks that share parameters, where what is left is divided further."""
    mesh = mesh_of(context, factors)
    sharers = mesh["parameters"]
    return Divided(None, sharers, mesh[PARTS, "parameters"] if context.parts > 1 else sharers)


def divide(
    context: Context,
    factors: Factors,
    *,
    kind: str,
    bucket_cap_mb: int,
    reshard_after_forward: bool = True,
    blocks_per_unit: int = 1,
) -> None:
    """Divide the states of the model in `context` by `factors` and rebind its optimizer to what this rank holds.

    Args:
        context: Model and optimizer; gets a check and a `sync`.
        factors: Over how many ranks each state is divided.
        kind: Of the technique, for messages.
        bucket_cap_mb: What FSDP2 does not send goes in buckets of about this many MiB.
        reshard_after_forward: Of divided parameters, see `sharding.shard`.
        blocks_per_unit: Of divided parameters, see `sharding.shard`.

    Raises:
        ApplyError: There is no process group, the ranks cannot be divided so, or their weights differ.
    """
    require_ranks(context, kind)
    problem = factors.problem(context.copies)
    if problem:
        raise ApplyError(f"{kind} cannot divide the model: {problem}.", fix="factors that divide one another", code="MT345")
    p, o, whole_gradients = factors.parameters, factors.optimizer, factors.gradients == 1 < factors.parameters
    before = dict(context.model.named_parameters())
    pipeline: Any = context.pipeline
    if pipeline is not None and factors.gradients > 1:
        pipeline.require_divisible(kind)
    if pipeline is not None and whole_gradients:
        raise ApplyError(
            f"sharding.states: {{kind: {kind}}} with whole gradients of divided parameters does not work in a pipeline.",
            evidence="They would be reduced in every micro-batch.", fix="sharding: {states: {kind: zero3}}", code="MT315",
        )  # fmt: skip
    if p > 1:
        sharers = _sharers(context, factors) if o > p else None
        shard(
            context, degree=p, reshard_after_forward=reshard_after_forward, blocks_per_unit=blocks_per_unit, kind=kind,
            two_hop=not whole_gradients, sharers=sharers,
        )  # fmt: skip
    context.averaged = True
    levels = _Levels(context, factors, before, bucket_cap_mb) if o > p else None
    if whole_gradients or levels is not None:
        context.sync = functools.partial(_sync, context, levels, whole_gradients)


@contextmanager
def _sync(context: Context, levels: _Levels | None, whole_gradients: bool, last: bool) -> Iterator[None]:
    """The context of a micro-batch: which divisions it passes."""
    _pass_through(context, levels, whole_gradients, last)
    try:
        yield
    finally:
        _pass_through(context, levels, whole_gradients, True)


def _pass_through(context: Context, levels: _Levels | None, whole_gradients: bool, last: bool) -> None:
    if whole_gradients:
        context.model.set_requires_gradient_sync(last)  # type: ignore[operator]  # FSDP2's module
    if levels is not None:
        for level in levels.rows:
            level.is_last = last


class _Levels:
    """The divisions that are not FSDP2's, from the outside in; see the top of this file."""

    def __init__(self, context: Context, factors: Factors, before: dict[str, nn.Parameter], bucket_cap_mb: int) -> None:
        self._factors, self._gathered = factors, context.gathered
        self._at_end = BackwardEnd(self._end, self._give_up)
        self.rows: list[Rows] = []
        absent = {} if context.elsewhere is None else context.elsewhere.absent
        held = {n: p for n, p in context.model.named_parameters() if p.requires_grad and p.numel() and n not in absent}
        inputs = list(held.values())
        self._parts: list[list[Part]] = [[] for _ in inputs]  # (trainable parameters,) its parts, from the outside in
        for axes, every_micro_batch in _divisions(context, factors):
            at_end = context.pipeline is not None and not every_micro_batch
            kind = Hop if self.rows or factors.parameters > 1 or at_end else Partition
            level = kind(context, inputs, axes, bucket_cap_mb=bucket_cap_mb, every_micro_batch=every_micro_batch)
            self.rows.append(level)
            part_of = {part.parameter: part for part in level.parts}
            for chain, each in zip(self._parts, inputs, strict=True):
                chain.append(part_of[each])
            inputs = [chain[-1].shard for chain in self._parts]
        for chain in self._parts:
            for part in chain:
                part.last = chain[-1]
        self._listen(context)
        finals = dict(zip(held, inputs, strict=True))
        rebind(context.optimizer, before, {name: finals.get(name, p) for name, p in context.model.named_parameters()})
        context.represented.update({held[name]: final for name, final in finals.items()})
        before_step(context.optimizer, self._before_step)
        after_step(context.optimizer, lambda *_: self._gather())
        context.gather_rows = self._gather
        others = context.checks.get("sharding.states")
        context.checks["sharding.states"] = lambda: (others() if others is not None else {}) | self._check()

    def _listen(self, context: Context) -> None:
        """Hear of the end of a backward that reduces, and beforehand of every sum that FSDP2 is about to add to."""
        first = self.rows[0]
        if context.pipeline is not None:
            pipeline: Any = context.pipeline
            pipeline.divided_among(divided(context, self._factors.optimizer).sharers.get_group())
            if any(isinstance(level, Hop) for level in self.rows):
                pipeline.reduce = self._end
            return
        if isinstance(first, Partition):
            first.on_end = self._end
            if len(self.rows) == 1 and context.parts == 1 and self._factors.optimizer == context.ranks:
                context.lands = self._call_landed
            return
        chain_of = {chain[0].parameter: chain[0] for chain in self._parts}
        for module, unit in units_of(context.model):
            parts = [chain_of[parameter] for parameter in unit if parameter in chain_of]
            module.set_all_reduce_hook(functools.partial(self._unit_reduced, parts))

    def _call_landed(self, landed: Landed) -> None:
        self.rows[0].landed = landed

    def _unit_reduced(self, parts: list[Part], shard: Tensor) -> None:
        self._at_end.settle()  # before anything is added to what a backward that raised has left
        for part in parts:
            self.rows[0].set_aside(part)
        self._at_end.expect()  # FSDP2 has queued its own before any unit is reduced

    def _give_up(self) -> None:
        """A backward has raised: what it left is let go, sums that passed all boundaries are as they were unless zeroed."""
        for chain in self._parts:
            for part in chain:
                part.parameter.grad = part.sum = None
            chain[0].parameter.grad = chain[-1].shard.grad

    def _end(self) -> None:
        """Backward has ended: pass the boundaries that this micro-batch is to pass."""
        for depth, level in enumerate(self.rows):
            if not isinstance(level, Hop):
                continue
            if not level.reduces:
                break
            if depth:
                for chain in self._parts:  # the sums are let go as they are packed
                    chain[0].parameter.grad = None
            level.cross()
            for chain in self._parts:
                gradient = chain[depth].shard.grad
                chain[depth].parameter.grad = None
                chain[0].parameter.grad = gradient

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """What was zeroed on one side is zeroed on both (rule 5 of rows)."""
        for chain in self._parts:
            parameter, final = chain[0].parameter, chain[-1].shard
            if parameter.grad is None or final.grad is None:
                parameter.grad = final.grad = None
            elif parameter.grad is not final.grad:  # the user has put another one there
                final.grad = parameter.grad

    def _gather(self) -> None:
        """Gather what the other ranks have updated, from the inside out."""
        for level in reversed(self.rows):
            level.gather()
        for told in self._gathered:
            told()

    def _check(self) -> dict[str, Any]:
        apart = sum(level.strays() for level in self.rows)
        if apart:
            raise ApplyError(
                f"{apart} parameters no longer share memory with the shards that the optimizer updates.",
                fix="move or convert the model before memtune.apply, not after",
                code="MT325",
            )
        buckets = sum(len(level) for level in self.rows)
        return {"ranks": self._factors.optimizer, "buckets": buckets, "shard_bytes": self.rows[-1].shard_bytes()}


def _divisions(context: Context, factors: Factors) -> Iterator[tuple[Axes, bool]]:
    """Who divides among whom after FSDP2, and whether in every micro-batch."""
    mesh = mesh_of(context, factors)
    names = mesh.mesh_dim_names or ()
    copies = mesh["copies"].get_group() if "copies" in names else None
    without = {"copies"} if context.elsewhere is None else {"copies", PARTS}  # a stage's weights are whole where they are
    inside = [dim for dim in names if dim not in without]
    for dim in inside:
        if dim in (PARTS, "parameters"):
            continue
        upto = tuple(inside[: inside.index(dim) + 1])
        yield Axes(mesh[upto] if upto != names else mesh, copies if dim == inside[-1] else None), dim == "gradients"
