"""Graphs in an order with a low peak.

Ops with effects keep their order, graphs that are not understood are left unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from memtune.compile.graph_reordering import reorder


def graph_of(function: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def names(module: GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def wide_first(x: Tensor) -> Tensor:
    wide = [x.unsqueeze(0) * (x.unsqueeze(1) + i) for i in range(4)]
    return torch.stack([each.sum() for each in wide])


def test_reorder_moves_ops_with_equal_results() -> None:
    x = torch.randn(64)
    module = graph_of(wide_first, x)
    before = names(module)
    found = reorder(module, inputs_outlive=True)
    assert found is not None
    assert found.program_peak_bytes - found.peak_bytes >= 2 * 64 * 64 * 4
    assert names(module) != before
    assert sorted(names(module)) == sorted(before)
    assert torch.equal(module(x), wide_first(x))


def test_reorder_keeps_order_of_random_ops() -> None:
    """The wide draw first would be lower, and other numbers."""

    def draws(x: Tensor) -> Tensor:
        wide = x.unsqueeze(0) * x.unsqueeze(1)
        small = torch.rand_like(x)
        return torch.rand_like(wide).sum() - small.sum()  # a sum of both would be the same draws

    x = torch.randn(32)
    module = graph_of(draws, x)
    assert reorder(module, inputs_outlive=True) is not None
    torch.manual_seed(3)
    wanted = draws(x)
    torch.manual_seed(3)
    assert torch.equal(module(x), wanted)


def test_reorder_keeps_read_before_write() -> None:
    """The write first would free its argument, and give the read other values."""

    def writes(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.clone()
        factor = y * 3
        early = y + 1
        y.mul_(factor)
        return early, y

    x = torch.randn(32)
    module = graph_of(writes, x)
    found = reorder(module, inputs_outlive=True)
    assert found is not None
    assert found.peak_bytes == found.program_peak_bytes
    assert all(torch.equal(one, other) for one, other in zip(module(x), writes(x), strict=True))


def test_reorder_keeps_program_order_with_symbolic_sizes() -> None:
    x = torch.randn(64)
    module = make_fx(wide_first, tracing_mode="symbolic")(x)
    before = names(module)
    assert reorder(module, inputs_outlive=True) is None
    assert names(module) == before
