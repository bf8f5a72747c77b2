"""Errors of order between streams and the host, made one by one: each is found, and named."""

from __future__ import annotations

import re

import pytest
import torch
from support.simulated_device import races, start
from support.simulated_ranks import CAPACITY_BYTES

pytestmark = pytest.mark.device
N = 4096


def on_side_stream() -> torch.sim.Stream:  # type: ignore[name-defined]
    return torch.sim.Stream("sim:0")


def expect(match: str) -> object:
    return pytest.raises(RuntimeError, match=re.compile(match, re.DOTALL))


def test_prefetch_without_a_wait_is_a_race() -> None:
    host = torch.randn(N).pin_memory()
    side = on_side_stream()
    with torch.sim.stream(side):
        weight = host.to("sim:0", non_blocking=True)
    later, earlier = (
        r"aten::mul\S* on stream 0 of sim:0",
        r"aten::copy_ \(host to device\) on stream \d+ of sim:0",
    )
    with expect(rf"race: {later} reads 16384 bytes that {earlier} writes; no event or wait orders them"):
        weight * 2
    races()
    torch.sim.current_stream().wait_stream(side)
    assert torch.equal((weight * 2).cpu(), host * 2)


def test_unordered_reader_sees_the_bytes_from_before_the_copy() -> None:
    start(2, raises=False, capacity_bytes=CAPACITY_BYTES)
    try:
        host, target = torch.ones(N).pin_memory(), torch.zeros(N, device="sim:0")
        torch.sim.synchronize()
        side = on_side_stream()
        with torch.sim.stream(side):
            target.copy_(host, non_blocking=True)
        stale = target + 0
        torch.sim.synchronize()
        assert stale.sum().item() == 0
        assert target.sum().item() == N
        assert len(races()) == 1
    finally:
        start(2, capacity_bytes=CAPACITY_BYTES)


def test_event_recorded_on_the_wrong_stream_orders_nothing() -> None:
    host = torch.randn(N).pin_memory()
    side, main = on_side_stream(), torch.sim.current_stream()
    with torch.sim.stream(side):
        weight = host.to("sim:0", non_blocking=True)
    event = torch.Event("sim")
    event.record(main)  # should be `side`
    main.wait_event(event)
    with expect("race: aten::add"):
        weight + 1
    races()
    event.record(side)
    main.wait_event(event)
    weight + 1


def test_event_recorded_before_the_copy_does_not_cover_it() -> None:
    host, side = torch.randn(N).pin_memory(), on_side_stream()
    target = torch.empty(N, device="sim:0")
    side.wait_stream(torch.sim.current_stream())
    event = side.record_event()
    with torch.sim.stream(side):
        target.copy_(host, non_blocking=True)
    torch.sim.current_stream().wait_event(event)
    with expect("race: aten::sum"):
        target.sum()
    races()


def test_buffer_overwritten_while_a_copy_reads_it_is_a_race() -> None:
    source, host = torch.randn(N, device="sim:0"), torch.empty(N).pin_memory()
    side = on_side_stream()
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        host.copy_(source, non_blocking=True)
    with expect(r"aten::zero_ .* writes .* \(device to host\) on stream \d+ of sim:0 reads"):
        source.zero_()
    races()


def test_block_freed_early_is_found_at_the_next_allocation() -> None:
    source, side = torch.randn(N, device="sim:0"), on_side_stream()
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        doubled = source * 2
    del source  # neither record_stream nor a wait
    with expect(
        r"freed and handed out again, and aten::mul\S* on stream \d+ .* record_stream or a wait is missing"
    ):
        torch.empty(N, device="sim:0")
    races()
    del doubled


@pytest.mark.parametrize("kept_by", ["record_stream", "wait"])
def test_block_freed_after_record_stream_or_a_wait_is_none(kept_by: str) -> None:
    source, side = torch.randn(N, device="sim:0"), on_side_stream()
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        doubled = source * 2
    address = source.data_ptr()
    if kept_by == "record_stream":
        source.record_stream(side)
    else:
        torch.sim.current_stream().wait_stream(side)
    del source
    again = torch.empty(N, device="sim:0")
    assert (again.data_ptr() == address) == (kept_by == "wait")
    torch.sim.synchronize()
    assert doubled.isfinite().all().item()


def test_host_that_reads_before_the_copy_is_over_reads_nan() -> None:
    source, host = torch.ones(N, device="sim:0"), torch.zeros(N).pin_memory()
    host.copy_(source, non_blocking=True)
    assert host.isnan().all()
    torch.sim.synchronize()
    assert torch.equal(host, torch.ones(N))


def test_host_that_writes_the_source_before_the_copy_is_over_is_a_race() -> None:
    host = torch.ones(N).pin_memory()
    copied = host.to("sim:0", non_blocking=True)
    host.zero_()
    with expect("race: the host writes the pinned source before aten::copy_"):
        torch.sim.synchronize()
    races()
    del copied


def test_pageable_copies_are_over_when_the_host_goes_on() -> None:
    host = torch.ones(N)
    copied = host.to("sim:0", non_blocking=True)
    host.zero_()
    assert copied.sum().item() == N
    target = torch.zeros(N)
    target.copy_(copied, non_blocking=True)
    assert target.sum() == N


def test_events_and_streams_are_late_until_the_host_waits() -> None:
    host = torch.empty(N).pin_memory()
    host.copy_(torch.ones(N, device="sim:0"), non_blocking=True)
    event = torch.sim.current_stream().record_event()
    assert not event.query()
    assert host.isnan().all()
    event.synchronize()
    assert event.query()
    assert torch.sim.current_stream().query()
    assert host.sum() == N


def test_copy_between_devices_waits_for_both() -> None:
    first = torch.randn(N, device="sim:0")
    second = first.to("sim:1") * 2
    assert torch.equal(second.cpu(), first.cpu() * 2)
