"""Collectives for FSDP2's units: quantized, hierarchical or by rings, installed after FSDP2 has made the
units.

Rules:

1. Every rank computes with the same weights: quantized weights are dequantized from the same bytes on all
  ranks, this rank's own shard included. Shards themselves, gradients' and optimizer's included, are not
  quantized.
2. A secondary shard is made by the gather of a forward that will have a backward, serves that backward and is
  freed. If any shard of the unit was written in between (an optimizer's step, a checkpoint), it is stale, and
  backward gathers the shards again.
3. A message whose parameters cannot be distinguished (a unit of which only some parameters got gradients) is
  sent unquantized.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import memtune.parallel.collectives.quantization  # noqa: F401  (defines torch.ops.memtune.quantise_ and dequantise_)
from memtune import refusals
from memtune.device import streams
from memtune.errors import ApplyError
from memtune.parallel.collectives.message_layout import Communication, Form, Row
from memtune.parallel.sharding import SeamAllGather, SeamReduceScatter
from memtune.runtime import Context, Nodes, node_topology, node_topology as nodes


def install_collectives(context: Context, communication: Communication) -> None:
    """Install the collectives of `communication` in every unit of the sharded model of `context`.

    Raises:
        ApplyError: The model is not sharded by FSDP2, or its ranks are not whole nodes.
    """
    size = context.placement.model_parallel_size
    units = {name: module for name, module in context.model.named_modules() if isinstance(module, FSDPModule)}
    if not units:
        raise ApplyError(
            "sharding.communication changes the collectives of FSDP2, but nothing is sharded by it.",
            fix="sharding: {states: {kind: fsdp}}, or leave communication out",
            code="MT341",
        )
    groups: list[Any] = [unit._get_fsdp_state()._fsdp_param_group for unit in units.values()]
    degree = next(group.mesh_info.shard_mesh_size for group in groups if group is not None)
    if communication.ranks_per_node % size and size % communication.ranks_per_node:
        raise ApplyError(
            f"groups of {size} ranks, which share layers, are no whole nodes of"
            f" {communication.ranks_per_node} or parts of one.",
            fix="another sharding.parallel degree, or ranks_per_node",
            code="MT342",
        )
    # For the audit and the count of bytes: which link a group uses follows from it.
    node_topology.declare(communication.ranks_per_node)
    context.undo.callback(node_topology.declare, None)
    # Of a node's ranks, those that hold the same part of the model.
    communication = replace(communication, ranks_per_node=max(communication.ranks_per_node // size, 1))
    place = _node_grid(context, communication, degree)
    forward = Forward(context.model) if communication.secondary else None
    for unit, group in zip(units.values(), groups, strict=True):
        if group is None:  # a unit without parameters
            continue
        if communication.changes_gathers:
            unit.set_custom_all_gather(Gather(group, communication, place, forward))
        if communication.gradients is not None and place is not None:
            unit.set_custom_reduce_scatter(
                Exchange(group, communication.gradients, place, feedback=communication.feedback)
            )
        elif communication.ring_reductions and place is not None:
            unit.set_custom_reduce_scatter(RingReduction(place))
    context.checks["sharding.communication"] = lambda: _check(communication, groups)


def _node_grid(context: Context, communication: Communication, degree: int) -> Nodes | None:
    local = min(communication.ranks_per_node, degree)
    if not communication.by_node:
        return None
    if (reason := refusals.uneven_nodes(degree, local)) is not None:
        raise refusals.error_of(reason)
    return nodes.nodes_of(context.device.type, degree, local, context.placement.model_parallel_size)


def _check(communication: Communication, groups: list[Any]) -> dict[str, Any]:
    mine = [group for group in groups if group is not None]
    gathers = sum(isinstance(group._all_gather_comm, Gather) for group in mine)
    exchanges = sum(isinstance(group._reduce_scatter_comm, Exchange | RingReduction) for group in mine)
    for name, there, expected in (
        ("gathers", gathers, communication.changes_gathers),
        ("exchanges", exchanges, communication.changes_reductions),
    ):
        if there != (len(mine) if expected else 0):
            raise ApplyError(
                f"{there} of {len(mine)} units have the {name} that the config asks for.", code="MT343"
            )
    return {
        "units": len(mine),
        "ranks_per_node": communication.ranks_per_node,
        "gathers": gathers,
        "exchanges": exchanges,
    }


class Forward:
    """Tracks if the model's current or last forward will have a backward."""

    # FSDP2's own hooks run without gradients enabled.

    def __init__(self, model: nn.Module) -> None:
        self.has_backward = False
        # Before FSDP2's own hook of the root, in which the first gather asks.
        model.register_forward_pre_hook(self._begin, prepend=True)

    def _begin(self, model: nn.Module, args: Any) -> None:
        self.has_backward = torch.is_grad_enabled()


def _row(form: Form, group: Any, *, trainable: bool = False) -> Row:
    """Return one rank's shards of a unit as a row of a message."""
    parameters = [p for p in group.fsdp_params if p.sharded_param.requires_grad or not trainable]
    numel = [p._sharded_param_data.numel() for p in parameters]
    return form.row(numel, [count * group.mesh_info.shard_mesh_size < form.exact_below for count in numel])


class Gather(SeamAllGather):
    """All-gather of one unit's parameters: quantized, hierarchical, or from the node's own copy (rules 1 and
    2).

    Args:
        group: FSDP2's parameters of the unit.
        communication: The collectives to use.
        place: This rank's nodes, if they matter.
        forward: Tells if a backward follows; None: no copy is kept.
    """

    is_one_message = False

    def __init__(
        self, group: Any, communication: Communication, place: Nodes | None, forward: Forward | None
    ) -> None:
        self._group, self._how, self._place, self._forward = group, communication, place, forward
        self._secondary: tuple[Tensor, tuple[int, ...]] | None = None
        self._ring: torch.Stream | None = None

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather `input_tensor` (numel) of all ranks into `output_tensor` (ranks · numel)."""
        # FSDP2 calls the same hook in forward and backward; a graph task runs only in backward.
        backward = torch._C._current_graph_task_id() != -1
        # It serves one backward and is freed, also if it turns out to be stale.
        kept, self._secondary = self._secondary, None
        if backward and kept is not None and kept[1] == self._versions():
            assert self._place is not None
            inside = self._place.inside
            torch.ops.memtune.all_gather_into_(output_tensor, kept[0], inside.group_name, inside.size())
            return None
        if self._how.weights is not None:
            self._quantised(self._how.weights, output_tensor, input_tensor, group)
        elif self._how.gather == "hierarchical":
            self._by_node(output_tensor, input_tensor)
        elif self._how.gather == "ho_ring":
            self._rings(output_tensor, input_tensor)
        else:
            super().__call__(output_tensor, input_tensor, group)
        if (
            not backward
            and self._forward is not None
            and self._forward.has_backward
            and self._group._reshard_after_forward
        ):
            assert self._place is not None
            mine = output_tensor.view(self._place.local, -1)[self._place.place]
            # A clone: the output is a buffer that FSDP2 frees after the copy-out.
            self._secondary = mine.clone(), self._versions()
        return None

    def _quantised(self, form: Form, whole: Tensor, mine: Tensor, group: dist.ProcessGroup) -> None:
        row, ranks = _row(form, self._group), group.size()
        lengths = list(row.lengths)
        received = torch.empty(ranks * row.n_bytes, dtype=torch.uint8, device=whole.device)
        # In its place in the receive buffer, so that the gather is in place and needs no other memory.
        packed = received.view(ranks, -1)[group.rank()]
        torch.ops.memtune.quantise_(packed, mine, None, lengths, row.bits, row.block, 1)
        torch.ops.memtune.all_gather_into_(received, packed, group.group_name, ranks)
        torch.ops.memtune.dequantise_(whole, received, lengths, row.bits, row.block, 1, 1.0)

    def _by_node(self, whole: Tensor, mine: Tensor) -> None:
        """Gather between nodes first, among the ranks at the same place in their nodes; then gather each
        node's shards inside the node.
        """
        assert self._place is not None
        inside, between = self._place.inside, self._place.between
        from_nodes = torch.empty(self._place.nodes * mine.numel(), dtype=mine.dtype, device=mine.device)
        torch.ops.memtune.all_gather_into_(from_nodes, mine, between.group_name, between.size())
        for out, part in zip(
            whole.chunk(self._place.nodes), from_nodes.chunk(self._place.nodes), strict=True
        ):
            torch.ops.memtune.all_gather_into_(out, part, inside.group_name, inside.size())

    def _rings(self, whole: Tensor, mine: Tensor) -> None:
        """Send the shard last received to the next node and, overlapped, gather it inside this one."""
        assert self._place is not None
        inside, between, nodes = self._place.inside, self._place.between, self._place.nodes
        parts = whole.chunk(nodes)
        self._ring = self._ring or streams.new_stream(whole.device)
        part = mine
        for hop in range(nodes):
            arriving, arrived = part, None
            if hop < nodes - 1:
                arriving = torch.empty(part.numel(), dtype=part.dtype, device=part.device)
                # The received shard may reuse memory that the previous gather still reads.
                streams.wait_current(self._ring, whole.device)
                with streams.on(self._ring):
                    torch.ops.memtune.send_next_into_(arriving, part, between.group_name, nodes)
                arrived = streams.end_of(self._ring)
            from_node = parts[(self._place.node - hop) % nodes]
            torch.ops.memtune.all_gather_into_(from_node, part, inside.group_name, inside.size())
            if arrived is not None:
                # The send of `part` has ended as well: its memory is free for the next shard.
                streams.wait(arrived)
            part = arriving

    def _versions(self) -> tuple[int, ...]:
        """Version counters that change with every write into a shard, through the DTensor or locally."""
        parameters = [p.sharded_param for p in self._group.fsdp_params]
        return tuple(version for p in parameters for version in (p._version, p._local_tensor._version))


class RingReduction(SeamReduceScatter):
    """Reduce-scatter of one unit's gradients inside nodes and, at the same time, in rings over them (HO-Ring
    in reverse).

    Args:
        place: This rank's nodes.
    """

    def __init__(self, place: Nodes) -> None:
        self._place = place
        self._ring: torch.Stream | None = None

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce `input_tensor` (ranks · numel) over the ranks; keep this rank's part in `output_tensor`."""
        # A node's sums for the ranks of another pass from node to node: each adds its own, and the
        # last one is their node.
        inside, between, nodes = self._place.inside, self._place.between, self._place.nodes
        name = {dist.ReduceOp.AVG: "avg", dist.ReduceOp.SUM: "sum"}.get(op)
        if name is None or async_op:
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        # One part for each node, since consecutive ranks are on one node.
        parts, arriving, arrived = input_tensor.chunk(nodes), None, None
        for hop in range(nodes):
            mine = _like(output_tensor) if hop < nodes - 1 else output_tensor
            of_node = parts[(self._place.node - 1 - hop) % nodes]
            torch.ops.memtune.reduce_scatter_into_(mine, of_node, inside.group_name, inside.size(), name)
            if arriving is not None:
                if arrived is not None:
                    streams.wait(arrived)
                mine.add_(arriving)
                arriving = None  # before `_send` allocates the next one
            if hop < nodes - 1:
                arriving, arrived = self._send(mine, between.group_name)
        if name == "avg":
            # Each node has averaged over its own ranks; the ring has summed these averages.
            output_tensor.div_(nodes)
        return None

    def _send(self, sums: Tensor, between: str) -> tuple[Tensor, torch.Event | None]:
        arriving = _like(sums)
        self._ring = self._ring or streams.new_stream(sums.device)
        streams.wait_current(self._ring, sums.device)
        with streams.on(self._ring):
            torch.ops.memtune.send_next_into_(arriving, sums, between, self._place.nodes)
        if self._ring is not None:
            streams.used_on(sums, self._ring)  # the caller drops it before the send has completed
        return arriving, streams.end_of(self._ring)


def _like(sums: Tensor) -> Tensor:
    return torch.empty(sums.shape, dtype=sums.dtype, device=sums.device)


class Exchange(SeamReduceScatter):
    """Reduce-scatter of one unit's gradients as two hops of quantized all-to-all, summed in float32 after
    each (ZeRO++ qgZ).

    Args:
        group: FSDP2's parameters of the unit.
        form: Format of gradients in a message.
        place: This rank's nodes.
        feedback: Add the quantization error of the first hop to the next gradients; it is held in float32,
            from the first gradients on.
    """

    def __init__(self, group: Any, form: Form, place: Nodes, *, feedback: bool) -> None:
        self._group, self._form, self._place, self._feedback = group, form, place, feedback
        self._lost: Tensor | None = None

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce `input_tensor` (ranks · numel) over the ranks into this rank's `output_tensor` (numel)."""
        # Frozen parameters have no gradient in the message.
        row, place = _row(self._form, self._group, trainable=True), self._place
        factor = {dist.ReduceOp.AVG: 1.0 / group.size(), dist.ReduceOp.SUM: 1.0}.get(op)
        if row.numel * group.size() != input_tensor.numel() or factor is None:  # Rule 3
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        sums = torch.empty(place.nodes * row.numel, dtype=torch.float32, device=input_tensor.device)
        if self._feedback and self._lost is None:
            self._lost = torch.zeros(input_tensor.shape, dtype=torch.float32, device=input_tensor.device)
        sent = _packed(input_tensor, row, self._lost, swizzle=place.nodes)
        received = _exchanged(sent, place.inside)
        del sent
        # Summed in float32 between the hops: a sum of 4-bit codes would not fit their range.
        _add_up(sums, received, row, place.local, 1.0)
        del received
        sent = _packed(sums, row)
        del sums
        received = _exchanged(sent, place.between)
        del sent
        _add_up(output_tensor, received, row, place.nodes, factor)
        return None


def _packed(x: Tensor, row: Row, lost: Tensor | None = None, *, swizzle: int = 1) -> Tensor:
    """Quantize rows of `x`; `swizzle` nodes by ranks of a node become ranks by nodes."""
    packed = torch.empty(x.numel() // row.numel * row.n_bytes, dtype=torch.uint8, device=x.device)
    torch.ops.memtune.quantise_(packed, x, lost, list(row.lengths), row.bits, row.block, swizzle)
    return packed


def _exchanged(sent: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange by all-to-all; return the messages of all ranks of `group` to this one."""
    received = torch.empty(sent.numel(), dtype=torch.uint8, device=sent.device)
    torch.ops.memtune.all_to_all_into_(received, sent, group.group_name, group.size())
    return received


def _add_up(out: Tensor, received: Tensor, row: Row, sources: int, factor: float) -> None:
    torch.ops.memtune.dequantise_(out, received, list(row.lengths), row.bits, row.block, sources, factor)
