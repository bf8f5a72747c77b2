"""Reorder the ops of a compiled graph for few live bytes, with bitwise equal results.

A storage is live while a value in it is used: the graph's code frees each value after its last use. The
caller holds the inputs of a forward graph, and the weights among the inputs of a backward graph.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from memtune.compile.low_peak_planner import LowPeak, Ops, low_peak_order

_PURE = ("aten", "prims")
"""Namespaces whose ops have no effects but those in their schemas and tags."""


def reorder(module: GraphModule, *, inputs_outlive: bool) -> LowPeak | None:
    """Reorder the ops of `module` for a low peak; return the order found, None if the graph cannot be
    reordered.

    A graph with symbolic sizes, or with nodes that are no ops, cannot be. If the order's peak is not lower,
    the graph keeps program order.

    Args:
        module: A forward or backward graph of AOTAutograd; changed in place.
        inputs_outlive: All inputs outlive the graph's run; otherwise only weights (`primals`) do.
    """
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    if not nodes or not all(_is_op(node) for node in nodes):
        return None
    ops = _ops(module, nodes, inputs_outlive)
    if ops is None:
        return None
    found = low_peak_order(ops)
    if found.peak_bytes < found.program_peak_bytes:
        anchor = nodes[0].prev
        for place in found.order.tolist():
            anchor.append(nodes[place])
            anchor = nodes[place]
        module.graph.lint()
        module.recompile()
    return found


def _is_op(node: Node) -> bool:
    return (
        node.op == "get_attr"
        or node.target is operator.getitem
        or isinstance(node.target, torch._ops.OpOverload)
    )


def _ops(module: GraphModule, nodes: list[Node], inputs_outlive: bool) -> Ops | None:
    """Return lifetimes and order constraints of a graph, None if a size is symbolic."""
    place = {node: index for index, node in enumerate(nodes)}
    numbers: dict[int, int] = {}  # storage identity → index in `storages`
    storages: list[tuple[int, int, bool]] = []
    for node in module.graph.nodes:
        if node.op == "output":
            continue
        outlives = node.op == "get_attr" or (
            node.op == "placeholder" and (inputs_outlive or node.name.startswith("primals"))
        )
        for key, n_bytes in _memory(node):
            if not isinstance(n_bytes, int):
                return None  # a symbolic size
            if key not in numbers:
                numbers[key] = len(storages)
                storages.append((n_bytes, place.get(node, -1), outlives))
    (output,) = module.graph.find_nodes(op="output")
    # Outputs are held by the caller, whichever op makes them.
    for node in output.all_input_nodes:
        for key, _ in _memory(node):
            n_bytes, producer, _ = storages[numbers[key]]
            storages[numbers[key]] = n_bytes, producer, True
    touched = {
        node: {numbers[key] for each in (node, *node.all_input_nodes) for key, _ in _memory(each)}
        for node in nodes
    }
    uses = [(place[node], storage) for node in nodes for storage in touched[node]]
    data = [(place[each], place[node]) for node in nodes for each in node.all_input_nodes if each in place]
    return Ops.of(len(nodes), storages, uses, [*data, *_effects(nodes, touched)])


def _memory(node: Node) -> Iterator[tuple[int, Any]]:
    """Yield identity and bytes of each storage of a node's value."""
    for value in tree_leaves(node.meta.get("val")):
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            yield storage._cdata, storage.nbytes()


def _effects(nodes: list[Node], touched: dict[Node, set[int]]) -> Iterator[tuple[int, int]]:
    """Yield pairs of ops whose order is kept."""
    # These are consecutive ops with effects (random ops, ops of other libraries such as collectives), and
    # writes with all earlier and later ops on the same storage.
    effect: int | None = None
    wrote: dict[int, int] = {}
    since: dict[int, list[int]] = {}  # by storage: ops that touched it after the last write
    for index, node in enumerate(nodes):
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            continue
        # Random ops in another order would draw other numbers; collectives must have one order on all ranks.
        if target.namespace not in _PURE or torch.Tag.nondeterministic_seeded in target.tags:
            if effect is not None:
                yield effect, index
            effect = index
        writes = target._schema.is_mutable
        for storage in touched[node]:
            if storage in wrote:
                yield wrote[storage], index
            if writes:
                yield from ((other, index) for other in since.pop(storage, []))
                wrote[storage] = index
            else:
                since.setdefault(storage, []).append(index)
