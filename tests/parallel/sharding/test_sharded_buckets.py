"""Messages of buckets: weights of all ranks are copied out, whatever rows a rank has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from memtune.autotune.record_parallel import fake_ranks
from memtune.parallel.sharding.sharded_buckets import Bucket, Part

RANKS = 2


def bucket_of(weights: list[Tensor], *, keeps_views: bool) -> Bucket:
    mesh = init_device_mesh("cpu", (RANKS,))
    parts = []
    for weight in weights:
        rows = -(-len(weight) // RANKS)
        numel = rows * (weight.numel() // max(len(weight), 1))
        parts.append(Part(nn.Parameter(weight), mesh, rows, (0, min(rows, len(weight))), numel))
    return Bucket(parts, RANKS, keeps_views)


@pytest.mark.parametrize("keeps_views", [True, False])
@pytest.mark.parametrize(
    "sizes", [[(4, 3), (2,)], [(4, 3), (3, 2), (2,)], [(4, 3), (0,), (2,)], [(1,)], [(0,)]], ids=str
)
def test_copy_out_writes_the_rows_of_all_ranks(sizes: list[tuple[int, ...]], keeps_views: bool) -> None:
    with fake_ranks(RANKS), torch.no_grad():
        bucket = bucket_of([torch.zeros(size) for size in sizes], keeps_views=keeps_views)
        for step in (1, 2):
            messages = step * torch.arange(1.0, RANKS * bucket.size + 1).view(RANKS, -1)
            bucket.copy_out(messages)
            at = 0
            for part in bucket.parts:
                rows = messages[:, at : at + part.numel].reshape(RANKS * part.rows, *part.parameter.shape[1:])
                assert torch.equal(part.parameter.detach(), rows[: len(part.parameter)])
                at += part.numel


@pytest.mark.parametrize("transposed", [False, True])
def test_copy_in_writes_this_ranks_rows(transposed: bool) -> None:
    weight = torch.arange(12.0).view(3, 4).t() if transposed else torch.arange(12.0).view(4, 3)
    with fake_ranks(RANKS), torch.no_grad():
        bucket = bucket_of([weight, torch.tensor([7.0])], keeps_views=True)
        message = torch.zeros(bucket.size)
        bucket.copy_in(message)
    assert message.tolist() == [*weight[:2].flatten().tolist(), 7.0]
