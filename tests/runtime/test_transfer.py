"""Copies to the host from a device with delayed work: waits of the host and of a stream are separate."""

from __future__ import annotations

import pytest
import torch

from memtune.device import streams
from memtune.runtime import transfer


class DelayedEvent:
    """Replacement of CUDA's event after a copy: it passes when the host waits for it, not when a stream
    does.
    """

    device = torch.device("cpu")

    def __init__(self, host: torch.Tensor, arrives: torch.Tensor) -> None:
        self._host, self._arrives, self._passed = host, arrives, False

    def wait(self, stream: object) -> None:
        """Make a stream wait; the host continues."""

    def query(self) -> bool:
        return self._passed

    def synchronize(self) -> None:
        if not self._passed:
            self._host.copy_(self._arrives)
        self._passed = True


@pytest.fixture
def delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Event", DelayedEvent)
    monkeypatch.setattr(streams, "current", lambda device: None)
    monkeypatch.setattr(transfer, "_pending", {})  # hides copies of other tests


def on_its_way(value: float) -> torch.Tensor:
    """Return a host tensor into which a copy of `value` is in flight."""
    host = torch.zeros(3)
    transfer._pending[host.untyped_storage()._cdata] = DelayedEvent(host, torch.full((3,), value))  # type: ignore[assignment]
    return host


def test_finish_waits_after_wait(delayed: None) -> None:
    """An activation that spills to SSD: its source may be freed when the stream waits, its bytes written when
    the host has.
    """
    host = on_its_way(2.0)
    transfer.wait(host)
    transfer.finish(host)
    assert host.tolist() == [2.0, 2.0, 2.0]
    assert host.untyped_storage()._cdata not in transfer._pending  # others' may be under way


def test_passed_events_are_dropped(delayed: None) -> None:
    there = [on_its_way(1.0) for _ in range(300)]
    for host in there:
        transfer.wait(host)  # as of tensors that go on to the device and nowhere else
        transfer._pending[host.untyped_storage()._cdata].synchronize()  # type: ignore[union-attr]
    under_way = on_its_way(3.0)
    transfer._forget_passed()
    assert list(transfer._pending) == [under_way.untyped_storage()._cdata]


def test_small_copy_on_cpu_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a copy into the same tensor is in flight, which would end after it."""
    submitted: list[torch.Tensor] = []

    class Threads:
        def submit(self, copy: object, pair: list[torch.Tensor]) -> None:
            submitted.append(pair[0])

    monkeypatch.setattr(transfer, "_pending", {})
    monkeypatch.setattr(transfer, "_threads", Threads)
    small, large = torch.ones(4), torch.ones(1 << 16)
    host = transfer.to_host(small)
    assert host.tolist() == [1.0] * 4
    assert not submitted
    there = transfer.to_host(large)
    transfer.copy_to_host(there, torch.ones(4))
    assert [each is there for each in submitted] == [True, True]
