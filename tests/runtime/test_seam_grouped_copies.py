"""Copies of many tensors: small ones together, large ones alone, and each one where it is observed."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memtune.runtime import copy_to_device_together, groups, seam, to_host_together, transfer

LARGE = torch.arange(float(1 << 18))  # 1 MiB, which is `GROUP_BYTES`


class Names(TorchDispatchMode):
    """Mode that notes operators of the seam."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "memtune" in str(func):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_groups_hold_at_most_their_bytes() -> None:
    small = torch.zeros(4)
    assert list(groups([small, small, LARGE, LARGE, small])) == [
        slice(0, 2),
        slice(2, 3),
        slice(3, 4),
        slice(4, 5),
    ]
    assert list(groups([])) == []


def test_copies_have_the_values_and_count_bytes() -> None:
    """Also of a transposed tensor, which keeps its strides, and of a large one, which a thread copies."""
    tensors = [torch.randn(3, 5).t(), LARGE, torch.arange(7)]
    transfer.COUNTERS.take()
    hosts = to_host_together(tensors)
    transfer.finish_all(hosts)
    assert all(torch.equal(host, each) for host, each in zip(hosts, tensors, strict=True))
    assert hosts[0].stride() == tensors[0].stride()
    back = [torch.zeros_like(each) for each in tensors]
    copy_to_device_together(back, hosts)
    assert all(torch.equal(one, each) for one, each in zip(back, tensors, strict=True))
    n_bytes = sum(each.nbytes for each in tensors)
    assert transfer.COUNTERS.take() == {"device_to_host": n_bytes, "host_to_device": n_bytes}


def test_mode_sees_each_copy() -> None:
    """A recorder counts the operators of the real step."""
    tensors = [torch.zeros(2), torch.zeros(3)]
    with Names() as names:
        assert list(groups(tensors)) == [slice(0, 1), slice(1, 2)]
        copy_to_device_together(tensors, to_host_together(tensors))
        seam.to_device(tensors[0], torch.device("cpu"))
    assert names.found == [
        "memtune.to_host.default",
        "memtune.to_host.default",
        "memtune.copy_to_device_.default",
        "memtune.copy_to_device_.default",
        "memtune.to_device.default",
    ]
