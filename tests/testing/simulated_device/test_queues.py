"""Kernels are queued: each runs when the host waits for it, or for one ordered after it, and no sooner."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.simulated_device import races, start
from support.simulated_ranks import CAPACITY_BYTES

pytestmark = pytest.mark.device
N = 4096
LARGE = 4 << 20  # values: a segment of its own


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Races are only recorded, so that their result can be seen."""
    start(2, CAPACITY_BYTES, raises=False)
    yield
    races()
    start(2, CAPACITY_BYTES)


def test_kernel_without_a_wait_reads_the_bytes_from_before(unchecked: None) -> None:
    source = torch.ones(N, device="sim:0")
    source.clone().add_(source)  # the first call of a kernel runs at once, to show its results' sizes
    for _ in range(2):
        target = torch.zeros(N, device="sim:0")
        torch.sim.synchronize()
        side = torch.sim.Stream("sim:0")
        with torch.sim.stream(side):
            target.add_(source)
        stale = target * 3
        torch.sim.current_stream().synchronize()
        assert stale.sum().item() == 0
        torch.sim.synchronize()
        assert target.sum().item() == N
    assert any("aten::mul" in race and "aten::add" in race for race in races())


@pytest.mark.parametrize("pace", ["immediate", "random", "deferred"])
def test_ordered_streams_give_the_same_bits_at_every_pace(pace: str) -> None:
    start(2, CAPACITY_BYTES, pace=pace, seed=5)  # type: ignore[arg-type]
    try:
        host = torch.randn(N)
        here, side = torch.sim.current_stream(), torch.sim.Stream("sim:0")
        x, wanted = host.pin_memory().to("sim:0", non_blocking=True), host
        for step in range(20):
            side.wait_stream(here)
            with torch.sim.stream(side):
                y = x * 2
            x.record_stream(side)
            z = x + step
            here.wait_stream(side)
            y.record_stream(here)
            x = (y - z) / 3
            wanted = (wanted * 2 - (wanted + step)) / 3
        assert torch.equal(x.cpu(), wanted)
    finally:
        start(2, CAPACITY_BYTES)


def test_error_of_a_kernel_is_raised_where_the_host_waits() -> None:
    table = torch.randn(4, 3, device="sim:0")
    for rows in ([1, 2], [1, 9]):
        picked = table.index_select(0, torch.tensor(rows).pin_memory().to("sim:0", non_blocking=True))
    with pytest.raises(IndexError, match="out of range"):
        torch.sim.synchronize()
    assert picked.shape == (2, 3)


def test_queued_kernel_reads_a_freed_block_and_the_hosts_scalars_as_they_were() -> None:
    scale = torch.tensor(2.0)
    for _ in range(2):
        x = torch.ones(LARGE, device="sim:0")
        address = x.data_ptr()
        doubled = x * scale
        scale.fill_(7.0)
        del x
        again = torch.zeros(LARGE, device="sim:0")
        assert again.data_ptr() == address
        assert doubled.sum().item() == 2 * LARGE
        assert again.sum().item() == 0
        scale.fill_(2.0)
        del doubled, again


def test_elapsed_time_is_that_of_the_kernels() -> None:
    x = torch.randn(300, 300, device="sim:0")
    for _ in range(2):
        begin, end = (torch.sim.Event(enable_timing=True) for _ in range(2))
        begin.record()
        x @ x
        end.record()
        with pytest.raises(RuntimeError, match="must be completed"):
            begin.elapsed_time(end)
        end.synchronize()
    assert begin.elapsed_time(end) > 0
