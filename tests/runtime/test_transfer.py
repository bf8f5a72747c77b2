"""Copies to the host from a device whose work is delayed: the host's own wait and a stream's are two
things.
"""

from __future__ import annotations

import pytest
import torch

from memtune.runtime import transfer


class LateEvent:
    """In the place of CUDA's event after a copy: it passes when the host waits for it, not when a stream
    does.
    """

    def __init__(self, host: torch.Tensor, arrives: torch.Tensor) -> None:
        self._host, self._arrives, self._passed = host, arrives, False

    def wait(self) -> None:
        """A stream waits; the host goes on."""

    def query(self) -> bool:
        return self._passed

    def synchronize(self) -> None:
        if not self._passed:
            self._host.copy_(self._arrives)
        self._passed = True


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    monkeypatch.setattr(transfer, "_pending", {})  # what other tests have under way is theirs


def on_its_way(value: float) -> torch.Tensor:
    """A host tensor into which a copy of `value` is on its way."""
    host = torch.zeros(3)
    transfer._pending[host.untyped_storage()._cdata] = LateEvent(host, torch.full((3,), value))  # type: ignore[assignment]
    return host


def test_the_host_still_has_to_wait_after_a_stream_has(late: None) -> None:
    """An activation on its way to SSD: its source may go when the stream waits, its bytes are written when
    the host has.
    """
    host = on_its_way(2.0)
    transfer.wait(host)
    transfer.finish(host)
    assert host.tolist() == [2.0, 2.0, 2.0]
    assert host.untyped_storage()._cdata not in transfer._pending  # others' may be under way


def test_what_has_passed_is_forgotten_in_time(late: None) -> None:
    there = [on_its_way(1.0) for _ in range(300)]
    for host in there:
        transfer.wait(host)  # as of tensors that go on to the device and nowhere else
        transfer._pending[host.untyped_storage()._cdata].synchronize()  # type: ignore[union-attr]
    under_way = on_its_way(3.0)
    transfer._forget_passed()
    assert list(transfer._pending) == [under_way.untyped_storage()._cdata]
