"""Orders the ops of a compiled graph for few live bytes.

Rule 1. Ops with effects keep their order: random ops, ops of other libraries (collectives among them), and
writes, with all ops on the same storage before and after them. So results are the same bits.
Rule 2. A storage lives while a value in it is used: a graph's code frees each value after its last use. The
inputs of a forward graph are held by its caller, as are the weights among a backward graph's inputs.
Rule 3. A graph with symbolic sizes, or with nodes that are no ops, keeps program order.
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
"""Libraries whose ops have no effects but those in their schemas and tags."""


def reorder(module: GraphModule, *, inputs_stay: bool) -> LowPeak | None:
    """Put the ops of `module` into an order with a low peak.

    Return it, None where program order is kept (Rule 3).

    Args:
        module: A forward or backward graph of AOTAutograd; changed in place.
        inputs_stay: All inputs outlive its run; else only weights (`primals`) do.
    """
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    if not nodes or not all(_is_op(node) for node in nodes):
        return None
    ops = _ops(module, nodes, inputs_stay)
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


def _ops(module: GraphModule, nodes: list[Node], inputs_stay: bool) -> Ops | None:
    place = {node: index for index, node in enumerate(nodes)}
    numbers: dict[int, int] = {}  # of storages
    storages: list[tuple[int, int, bool]] = []
    for node in module.graph.nodes:
        if node.op == "output":
            continue
        stays = node.op == "get_attr" or (
            node.op == "placeholder" and (inputs_stay or node.name.startswith("primals"))
        )
        for key, n_bytes in _memory(node):
            if not isinstance(n_bytes, int):
                return None  # Rule 3
            if key not in numbers:
                numbers[key] = len(storages)
                storages.append((n_bytes, place.get(node, -1), stays))
    (output,) = module.graph.find_nodes(op="output")
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
    """Yield identity and bytes of each storage that a node's value lies in."""
    for value in tree_leaves(node.meta.get("val")):
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            yield storage._cdata, storage.nbytes()


def _effects(nodes: list[Node], touched: dict[Node, set[int]]) -> Iterator[tuple[int, int]]:
    """Yield pairs of ops of which the first stays before the second (Rule 1)."""
    effect: int | None = None
    wrote: dict[int, int] = {}
    since: dict[int, list[int]] = {}  # by storage: ops that touched it after the last write
    for index, node in enumerate(nodes):
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            continue
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
