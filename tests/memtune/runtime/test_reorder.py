"""Graphs in an order with a low peak: what has effects stays where it is, what cannot be told is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from memtune.runtime.reorder import reorder


def graph_of(function: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def names(module: GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def wide_first(x: Tensor) -> Tensor:
    wide = [x.unsqueeze(0) * (x.unsqueeze(1) + i) for i in range(4)]
    return torch.stack([each.sum() for each in wide])


def test_ops_move_and_results_stay() -> None:
    x = torch.randn(64)
    module = graph_of(wide_first, x)
    before = names(module)
    found = reorder(module, inputs_stay=True)
    assert found is not None
    assert found.program_peak_bytes - found.peak_bytes >= 2 * 64 * 64 * 4
    assert names(module) != before
    assert sorted(names(module)) == sorted(before)
    assert torch.equal(module(x), wide_first(x))


def test_random_ops_keep_their_order() -> None:
    def draws(x: Tensor) -> Tensor:
        wide = [torch.rand_like(x.unsqueeze(0) * x.unsqueeze(1)) for _ in range(4)]
        return torch.stack([each.sum() for each in wide])

    x = torch.randn(32)
    module = graph_of(draws, x)
    found = reorder(module, inputs_stay=True)
    assert found is not None
    assert found.peak_bytes < found.program_peak_bytes
    torch.manual_seed(3)
    wanted = draws(x)
    torch.manual_seed(3)
    assert torch.equal(module(x), wanted)


def test_reads_stay_on_their_side_of_a_write() -> None:
    def writes(x: Tensor) -> Tensor:
        y = x.clone()
        wide = [y.unsqueeze(0) * (y.unsqueeze(1) + i) for i in range(3)]
        y.mul_(2)
        late = y.unsqueeze(0) * y.unsqueeze(1)
        return torch.stack([each.sum() for each in (*wide, late)])

    x = torch.randn(32)
    module = graph_of(writes, x)
    found = reorder(module, inputs_stay=True)
    assert found is not None
    assert found.peak_bytes < found.program_peak_bytes
    assert torch.equal(module(x), writes(x))


def test_sizes_that_are_no_numbers_are_left_alone() -> None:
    x = torch.randn(64)
    module = make_fx(wide_first, tracing_mode="symbolic")(x)
    before = names(module)
    assert reorder(module, inputs_stay=True) is None
    assert names(module) == before
