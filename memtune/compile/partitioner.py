"""Backends for torch.compile whose partitioner never recomputes a random op.

Under `activation_memory_budget` torch's partitioner may recompute each op without a rule, and its rules cover
three random ops only. `bernoulli`, the dropout on CPU, was drawn again in backward (torch 2.13), which makes
gradients wrong. With a budget of exactly 0 there are no rules at all. So random ops are saved, and a budget
of 0 is raised slightly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from memtune.compile.graph_reordering import reorder
from memtune.compile.low_peak_planner import LowPeak

LEAST_BUDGET = 1e-6
"""Budget that replaces 0."""
LOW_PEAK = "memtune.low_peak_order"
"""Key, in addition to those of `torch._functorch.config`: reorder graphs for few live bytes."""
_orders: ContextVar[list[LowPeak] | None] = ContextVar("orders", default=None)


@contextmanager
def partition_settings(settings: Mapping[str, Any], orders: list[LowPeak]) -> Iterator[None]:
    """Apply `settings` to graphs made in the context; append orders of reordered graphs to `orders`."""
    from torch._functorch import config

    token = _orders.set(orders if settings.get(LOW_PEAK) else None)
    try:
        with config.patch({name: value for name, value in settings.items() if name != LOW_PEAK}):
            yield
    finally:
        _orders.reset(token)


def aot_eager(
    graph: GraphModule, inputs: list[Any], *, as_inductor: bool = False, **options: Any
) -> Callable[..., Any]:
    """Return AOTAutograd's graphs of `graph`, run op by op; `as_inductor`: decomposed as inductor does."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    extra: dict[str, Any] = {"keep_inference_input_mutations": True}
    if as_inductor:
        from torch._inductor.decomposition import select_decomp_table

        extra = {"decompositions": select_decomp_table()}
    partition_fn = partial(partition, compiler="inductor") if as_inductor else partition
    backend = aot_autograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=partition_fn, **extra)
    run: Callable[..., Any] = backend(graph, inputs)
    return run


def partition(joint: GraphModule, inputs: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
    """Return forward and backward graph by min-cut; with a budget below 1 random ops are always saved."""
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch.utils.checkpoint import CheckpointPolicy

    # At 1 nothing is recomputed, and min-cut has its rules for random ops.
    if config.activation_memory_budget < 1:
        for node in joint.graph.nodes:
            if _draws(node):
                # The tag that torch's own checkpoint policies use; the solver honours it.
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    found: tuple[GraphModule, GraphModule] = min_cut_rematerialization_partition(joint, inputs, **options)
    orders = _orders.get()
    if orders is not None:
        ordered = [
            reorder(each, inputs_outlive=forward) for each, forward in zip(found, (True, False), strict=True)
        ]
        orders += [each for each in ordered if each is not None]
    return found


def in_inductor() -> AbstractContextManager[Any]:
    """Let inductor use `partition` in the context; no effect if this torch lacks that setting."""
    from torch._inductor import config

    if not hasattr(config, "custom_partitioner_fn"):
        return nullcontext()
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        def __call__(
            self, gm: GraphModule, joint_inputs: Any, **kwargs: Any
        ) -> tuple[GraphModule, GraphModule]:
            return partition(gm, joint_inputs, **{"compiler": "inductor", **kwargs})

        def uuid(self) -> Any:
            return "memtune: random ops are saved"

    patch: AbstractContextManager[Any] = config.patch(custom_partitioner_fn=Partitioner())
    return patch


def _draws(node: Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded in target.tags or target.name() == "prims::inductor_seeds"
