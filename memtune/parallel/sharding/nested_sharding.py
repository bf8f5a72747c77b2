"""Each model state sharded over its own factor: FSDP2 for parameters, additional hops where the factors
differ.

Factors (p, g, o) make up to three nested divisions, each over ranks that hold the same shard so far:

1. Parameters over p: FSDP2, which also reduces gradients to p; with p = 1, `Partition` does the first of 2
  and 3.
2. Gradients from p to g, in every micro-batch; with g = 1 and p > 1 they stay unsharded until the last
  micro-batch instead.
3. Sums from max(p, g) to o in the last micro-batch, then averaged over the N/o ranks that hold the same
  shard. With g ≤ p a bucket is reduced during backward, once FSDP2 has reduced all units that it has
  parameters of, else when backward ends.

The optimizer holds the shards of the last division. After its step every division gathers the shards of the
one before it, from the inside out. Between backward and step a model parameter's `grad` is that of its last
shard.
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
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import _disable_current_modes

from memtune import refusals
from memtune.device import streams
from memtune.errors import ApplyError
from memtune.parallel.ranks import PARTS, ShardMeshes, require_ranks, shard_meshes
from memtune.parallel.sharding.factors import Factors
from memtune.parallel.sharding.fsdp_sharding import rebind, require_real_weights, shard, units_of
from memtune.parallel.sharding.sharded_buckets import Part, ShardAxes, ShardedBuckets
from memtune.parallel.sharding.zero_partition import Hop, Partition
from memtune.runtime import BackwardEnd, Context, after_step, before_step

_DIMS = (PARTS, "copies", "parameters", "gradients", "optimizer")


@cache
def _mesh(device_type: str, parts: int, ranks: int, factors: Factors, group: int) -> DeviceMesh:
    """Return the device mesh; dims of size 1 are omitted, because every dim creates a communicator."""
    s, o = factors.summed_over, factors.optimizer
    p = factors.parameters
    sizes = {PARTS: parts, "copies": ranks // o, "parameters": p, "gradients": s // p, "optimizer": o // s}
    # Neighbours hold parts of one copy, then share parameters; the slowest index is the copy.
    where = torch.arange(ranks * parts).view(ranks // o, o // s, s // p, p, parts).permute(4, 0, 3, 2, 1)
    kept = [dim for dim in _DIMS if sizes[dim] > 1]
    return DeviceMesh(device_type, where.reshape([sizes[dim] for dim in kept]), mesh_dim_names=tuple(kept))


def forget_meshes() -> None:
    """Clear the caches when the process group is destroyed: the next one may have the same `id`."""
    _mesh.cache_clear()


def mesh_of(context: Context, factors: Factors) -> DeviceMesh:
    """Return the mesh of all ranks by part, copy, and shards of parameters, gradients and state; cached."""
    default = dist.distributed_c10d._get_default_group()
    with _disable_current_modes():
        sizes = context.placement.model_parallel_size, context.placement.data_parallel_size
        return _mesh(context.device.type, *sizes, factors, id(default))


def _sharers(context: Context, factors: Factors) -> ShardMeshes:
    """Return the ranks that share parameters whose other states are sharded further."""
    mesh = mesh_of(context, factors)
    sharers = mesh["parameters"]
    return ShardMeshes(
        None, sharers, mesh[PARTS, "parameters"] if context.placement.model_parallel_size > 1 else sharers
    )


def divide(
    context: Context,
    factors: Factors,
    *,
    kind: str,
    bucket_cap_mb: int,
    reshard_after_forward: bool = True,
    blocks_per_unit: int = 1,
    precision: MixedPrecisionPolicy | None = None,
) -> None:
    """Shard the states of the model in `context` by `factors` and rebind its optimizer to this rank's shards.

    Args:
        context: Model and optimizer; gets a check and a `sync`.
        factors: Number of ranks over which each state is sharded.
        kind: Kind of the technique, for messages.
        bucket_cap_mb: Bucket size in MiB of all gradients that FSDP2 does not reduce.
        reshard_after_forward: For sharded parameters, see `sharding.shard`.
        blocks_per_unit: For sharded parameters, see `sharding.shard`.
        precision: For sharded parameters, see `sharding.shard`.

    Raises:
        ApplyError: There is no process group, the factors do not divide the ranks, or the weights differ.
    """
    require_ranks(context, kind)
    if factors.optimizer > 1:
        require_real_weights(context, kind)
    # The plan's factors may be written by hand, or made for another number of ranks.
    problem = factors.problem(context.placement.data_parallel_size)
    if problem:
        raise refusals.error_of(refusals.no_factors(problem), f"sharding.states: {kind}")
    p, o, whole_gradients = factors.parameters, factors.optimizer, factors.gradients == 1 < factors.parameters
    before = dict(context.model.named_parameters())
    pipeline: Any = context.loop.pipeline
    if pipeline is not None and factors.gradients > 1:
        pipeline.require_divisible(kind)
    if p > 1:
        sharers = _sharers(context, factors) if o > p else None
        shard(
            context,
            degree=p,
            reshard_after_forward=reshard_after_forward,
            blocks_per_unit=blocks_per_unit,
            kind=kind,
            precision=precision,
            # Unsharded gradients skip FSDP2's reduction until the last micro-batch anyway (`_pass_through`).
            two_hop=not whole_gradients,
            sharers=sharers,
        )
    context.placement.states_average_grads = True
    levels = _Levels(context, factors, before, bucket_cap_mb) if o > p else None
    if whole_gradients or levels is not None:
        context.loop.sync = functools.partial(_sync, context, levels, whole_gradients)


@contextmanager
def _sync(context: Context, levels: _Levels | None, whole_gradients: bool, last: bool) -> Iterator[None]:
    """Return the context of a micro-batch, which selects the divisions to reduce over."""
    _pass_through(context, levels, whole_gradients, last)
    try:
        yield
    finally:
        _pass_through(context, levels, whole_gradients, True)


def _pass_through(context: Context, levels: _Levels | None, whole_gradients: bool, last: bool) -> None:
    if whole_gradients:
        # As DDP's `no_sync`: FSDP2 accumulates unsharded gradients meanwhile.
        context.model.set_requires_gradient_sync(last)  # type: ignore[operator]  # FSDP2's module
    if levels is not None:
        for level in levels.rows:
            level.is_last = last


class _Levels:
    """The divisions that are not FSDP2's, from the outside in; see the top of this file."""

    def __init__(
        self, context: Context, factors: Factors, before: dict[str, nn.Parameter], bucket_cap_mb: int
    ) -> None:
        placement = context.placement
        self._factors = factors
        self._grad_ready, self._weights_gathered = context.events.grad_ready, context.events.weights_gathered
        self._at_end = BackwardEnd(self._end, self._give_up)
        self.rows: list[ShardedBuckets] = []
        self._waiting: tuple[Part, ...] = ()
        """Parts of the unit that was reduced last, to whose sums FSDP2 adds after the hook."""
        self._complete: set[Part] = set()
        self._reduced_twice = False
        self._learns = True
        """No backward has shown yet that each unit is reduced once."""
        absent = placement.absent
        held = {
            n: p
            for n, p in context.model.named_parameters()
            if p.requires_grad and p.numel() and n not in absent
        }
        if factors.parameters > 1:
            # In the reverse order of FSDP2's reductions: what is outside of the blocks comes last there.
            place = {p: at for at, p in enumerate(p for _, unit in units_of(context.model) for p in unit)}
            held = dict(sorted(held.items(), key=lambda item: place.get(item[1], len(place))))
        inputs = list(held.values())
        # (trainable parameters,) its parts, from the outside in.
        self._parts: list[list[Part]] = [[] for _ in inputs]
        for axes, every_micro_batch in _divisions(context, factors):
            at_end = context.loop.pipeline is not None and not every_micro_batch
            # Only the first division after autograd needs hooks on gradients; later ones start when it has
            # ended.
            kind = Hop if self.rows or factors.parameters > 1 or at_end else Partition
            level = kind(
                context, inputs, axes, bucket_cap_mb=bucket_cap_mb, every_micro_batch=every_micro_batch
            )
            self.rows.append(level)
            part_of = {part.parameter: part for part in level.parts}
            for chain, each in zip(self._parts, inputs, strict=True):
                chain.append(part_of[each])
            # The next division shards the shards of this one.
            inputs = [chain[-1].shard for chain in self._parts]
        for chain in self._parts:
            for part in chain:
                part.last = chain[-1]
        self._listen(context)
        finals = dict(zip(held, inputs, strict=True))
        rebind(
            context.optimizer,
            before,
            {name: finals.get(name, p) for name, p in context.model.named_parameters()},
        )
        placement.optimizer_params.update({held[name]: final for name, final in finals.items()})
        before_step(context.optimizer, self._agree_on_grads)
        # A clip of the shards' gradients would miss those that user code has assigned to the parameters.
        context.events.before_grads_rescaled.subscribe(self._agree_on_grads)
        after_step(context.optimizer, lambda *_: self._gather())
        placement.all_gather_weights = self._gather
        others = context.checks.get("sharding.states")
        context.checks["sharding.states"] = lambda: (others() if others is not None else {}) | self._check()

    def _listen(self, context: Context) -> None:
        """Add callbacks at the end of each backward that reduces, and before each sum of FSDP2."""
        first = self.rows[0]
        if context.loop.pipeline is not None:
            pipeline: Any = context.loop.pipeline
            pipeline.divided_among(shard_meshes(context, self._factors.optimizer).sharers.get_group())
            if any(isinstance(level, Hop) for level in self.rows):
                pipeline.reduce = self._end
            return
        if isinstance(first, Partition):
            first.on_end = self._end
            placement = context.placement
            if (
                len(self.rows) == 1
                and placement.model_parallel_size == 1
                # With copies, gradients are complete in the last micro-batch only.
                and self._factors.optimizer == placement.world_size
            ):
                context.events.grad_ready.emit_from(self._emit_grad_ready)
            return
        chain_of = {chain[0].parameter: chain[0] for chain in self._parts}
        for module, unit in units_of(context.model):
            parts = [chain_of[parameter] for parameter in unit if parameter in chain_of]
            module.set_all_reduce_hook(functools.partial(self._unit_reduced, parts))

    def _emit_grad_ready(self) -> None:
        self.rows[0].grad_ready = self._grad_ready

    def _unit_reduced(self, parts: list[Part], shard: Tensor) -> None:
        # FSDP2 adds the shard to the sum on this stream; it belongs to that of the reduce-scatter.
        streams.used_on(shard)
        self._at_end.settle()  # first clean up after a backward that raised
        for part in parts:
            self.rows[0].set_aside(part)
        self._reduce_complete(parts)
        # Runs after FSDP2's callback for the end of backward, which was queued before any unit is reduced.
        self._at_end.expect()

    def _reduce_complete(self, parts: list[Part]) -> None:
        """Reduce further what is complete, now that the unit of `parts` is reduced."""
        hop = self.rows[0]
        if len(self.rows) > 1 or not isinstance(hop, Hop) or not hop.is_last:
            return
        self._complete.update(self._waiting)
        # A unit that runs twice is reduced twice: its sums are complete when backward ends.
        if not self._complete.isdisjoint(parts):
            if not (self._learns or self._reduced_twice):
                raise ApplyError(
                    "a block runs twice in this step, but ran once in those before.",
                    evidence="Its gradients have been reduced when it ran first.",
                    fix="sharding: {states: {kind: zero3}}",
                    code="MT393",
                )
            self._reduced_twice = True
        if not (self._learns or self._reduced_twice):
            hop.reduce_complete(self._complete)
        self._waiting = tuple(parts)

    def _give_up(self) -> None:
        """Clean up after a backward that raised."""
        self._waiting, self._complete = (), set()
        for level in self.rows:
            if isinstance(level, Hop):
                level.give_up()
        # Sums that passed all boundaries are unchanged unless zeroed.
        for chain in self._parts:
            for part in chain:
                part.parameter.grad = part.sum = None
            chain[0].parameter.grad = chain[-1].shard.grad

    def _end(self) -> None:
        """Reduce over the divisions of this micro-batch when backward has ended."""
        if self._complete:
            self._learns = False
        self._waiting, self._complete = (), set()
        for depth, level in enumerate(self.rows):
            if not isinstance(level, Hop):
                continue
            if not level.reduces:
                break
            if depth:
                # Drop the second reference, so that packing frees each sum.
                for chain in self._parts:
                    chain[0].parameter.grad = None
            level.reduce_sums()
            for chain in self._parts:
                gradient = chain[depth].shard.grad
                chain[depth].parameter.grad = None
                chain[0].parameter.grad = gradient

    def _agree_on_grads(self, *_: Any) -> None:
        """Zero a gradient on both sides if it was zeroed on one (rule 5 of `sharded_buckets`)."""
        for chain in self._parts:
            parameter, final = chain[0].parameter, chain[-1].shard
            gradient, held = parameter.grad, final.grad
            if gradient is None or held is None:
                parameter.grad = final.grad = None
            elif gradient is not held:  # the user has replaced it
                final.grad = gradient

    def _gather(self) -> None:
        """Gather the updates of the other ranks, from the inside out."""
        # Each division gathers what the next one inside it has completed.
        for level in reversed(self.rows):
            level.gather()
        self._weights_gathered.emit()

    def _check(self) -> dict[str, Any]:
        apart = sum(level.count_detached_inputs() for level in self.rows)
        if apart:
            raise ApplyError(
                f"{apart} parameters no longer share memory with the shards that the optimizer updates.",
                fix="move or convert the model before memtune.apply, not after",
                code="MT325",
            )
        buckets = sum(len(level) for level in self.rows)
        return {
            "ranks": self._factors.optimizer,
            "buckets": buckets,
            "shard_bytes": self.rows[-1].shard_bytes(),
        }


def _divisions(context: Context, factors: Factors) -> Iterator[tuple[ShardAxes, bool]]:
    """Yield the axes of each division after FSDP2, and True if it reduces in every micro-batch."""
    mesh = mesh_of(context, factors)
    names = mesh.mesh_dim_names or ()
    copies = mesh["copies"].get_group() if "copies" in names else None
    in_stages = context.placement.remote_parameters is not None  # a stage's weights are whole where they are
    without = {"copies", PARTS} if in_stages else {"copies"}
    inside = [dim for dim in names if dim not in without]
    for dim in inside:
        if dim in (PARTS, "parameters"):
            continue
        upto = tuple(inside[: inside.index(dim) + 1])
        yield (
            ShardAxes(mesh[upto] if upto != names else mesh, copies if dim == inside[-1] else None),
            dim == "gradients",
        )
