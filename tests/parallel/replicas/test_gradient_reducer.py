"""Averages of gradients in buckets: messages, values, gradients that are ready again or missing."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from support.gloo import run_ranks
from torch import nn

from memtune.parallel.replicas.gradient_reducer import GradientReducer

RANKS = 2


def parameter(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> nn.Parameter:
    """Return a parameter with a gradient that differs between ranks and between parameters."""
    made = nn.Parameter(torch.zeros(shape, dtype=dtype))
    made.grad = torch.full(shape, scale * (1 + dist.get_rank()), dtype=dtype)
    return made


def averaged_on_rank() -> list[Any]:
    messages: list[int] = []
    own = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        messages.append(tensor.numel())
        return own(tensor, *args, **kwargs)

    dist.all_reduce = counted
    found: list[tuple[nn.Parameter, torch.Tensor]] = []
    weight, bias, low, head = (
        parameter(3, 4),
        parameter(4, scale=0.1),
        parameter(5, dtype=torch.bfloat16),
        parameter(2, 2),
    )
    weight.data = weight.data.t().contiguous().t()  # a gradient keeps its parameter's strides
    reducer = GradientReducer(
        dist.group.WORLD,  # type: ignore[arg-type]
        [[weight, bias, low], [head]],
        lambda each, gradient: found.append((each, gradient)),
        torch.device("cpu"),
    )
    alone = head.grad
    for each in (bias, low, weight, head):
        reducer.add(each)
    order = [each is wanted for (each, _), wanted in zip(found, (low, bias, weight, head), strict=True)]
    wanted = [1.5, 0.15, 1.5, 1.5]
    right = [
        torch.allclose(gradient.float(), torch.tensor(value))
        for (_, gradient), value in zip(found, wanted, strict=True)
    ]
    shared = found[1][1].untyped_storage().data_ptr() == found[2][1].untyped_storage().data_ptr()
    facts: list[Any] = [
        messages[:],
        order,
        right,
        shared,
        found[3][1] is alone,
        found[2][1].stride() == weight.stride(),
    ]
    facts += [len(reducer.finish()), [each.grad for each in (weight, bias, low, head)]]
    # A second gradient before the bucket is full is added; missing ones count as zeros, and are reported.
    messages.clear()
    found.clear()
    for _ in range(2):
        weight.grad = torch.ones(3, 4)
        reducer.add(weight)
    facts += [
        [each is weight for each in reducer.finish()],
        [float(found[0][1].sum())],
        len(found),
        messages[:],
    ]
    reducer.abandon()
    return facts


def test_block_is_averaged_in_one_message_and_given_away_in_the_order_of_autograd() -> None:
    for messages, order, right, shared, alone, strides, missing, left, *again in run_ranks(
        averaged_on_rank, RANKS
    ):
        # bfloat16 when it is complete, then the block's float32, then the head.
        assert messages == [5, 16, 4]
        assert all(order)
        assert all(right)
        assert shared
        assert strides
        assert alone  # a bucket of one gradient is that gradient
        assert missing == 0
        assert left == [None] * 4
        # Before the block's float32 zeros for bfloat16, whose gradient other ranks may have.
        assert again == [[False, False, False], [24.0], 1, [5, 16]]
