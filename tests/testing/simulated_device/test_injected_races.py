"""Errors of order in memtune's own copies are found on the simulated accelerator, and named: a missing wait,
a source freed early, an event on the wrong stream, a missing `record_stream`, a host that reads too early.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from support.simulated_device import races
from support.zoo_paths import ZOO

from memtune.device import streams
from memtune.errors import WorkloadError
from memtune.runtime import transfer
from memtune.search_spaces.offload.activations import copy_out
from memtune.search_spaces.offload.states import stronghold, zero_offload
from memtune.technique import Technique
from memtune.testing.training import train

pytestmark = pytest.mark.device

TO_HOST = r"aten::copy_ \(device to host\)"
TO_DEVICE = r"aten::copy_ \(host to device\)"
_recorded = streams.recorded
INJECTED = [
    # The copy to the host does not wait for the op that computes its source.
    (streams, "wait_current", copy_out.CopyOut(min_bytes=0), rf"{TO_HOST} on stream \d+ of sim:0 reads"),
    # A source is freed although the copy from it may not be over.
    (
        transfer,
        "wait",
        copy_out.CopyOut(min_bytes=0),
        rf"freed and handed out again, and {TO_HOST} on stream",
    ),
    # A block computes without the wait for its prefetched weights.
    (transfer, "wait_prefetched", stronghold.Stronghold(), rf"reads \d+ bytes that {TO_DEVICE} on stream"),
]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Drop the copies in flight of the step that failed."""
    yield
    transfer._pending.clear()
    transfer._prefetched.clear()
    gc.collect()
    torch.accelerator.synchronize(0)
    races()


@pytest.mark.parametrize(("owner", "name", "technique", "race"), INJECTED, ids=[each[1] for each in INJECTED])
def test_missing_wait_is_found(
    owner: object, name: str, technique: Technique, race: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: None)
    with pytest.raises((RuntimeError, WorkloadError), match=f"simulated device: race: .*{race}"):
        train(ZOO["gpt"], technique, steps=2, device=torch.device("sim", 0))


def test_event_on_the_wrong_stream_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event after a copy to the host is recorded on the stream that computes."""
    monkeypatch.setattr(streams, "recorded", lambda device, stream=None: _recorded(device))
    with pytest.raises(
        (RuntimeError, WorkloadError),
        match=rf"simulated device: race: .*handed out again, and {TO_HOST} on stream",
    ):
        train(ZOO["gpt"], copy_out.CopyOut(min_bytes=0), steps=2, device=torch.device("sim", 0))


@pytest.mark.parametrize("records", [True, False])
def test_missing_record_stream_is_found(records: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tail of a prefetched tensor is freed while the stream of the prefetch reads it."""
    if not records:
        monkeypatch.setattr(streams, "used_on", lambda *_: None)
    here = torch.device("sim", 0)
    host, tail = torch.randn(1000).pin_memory(), torch.ones(1000, device=here)
    with transfer.prefetching(here):
        joined = transfer.to_device_with_tail(host, tail, here)
    del tail
    with (
        nullcontext() if records else pytest.raises(RuntimeError, match="record_stream or a wait is missing")
    ):
        torch.empty(1000, device=here)
    transfer.wait_prefetched(here)
    assert torch.equal(joined.cpu(), torch.cat([host, torch.ones(1000)]))


def test_host_that_does_not_wait_for_a_copy_reads_nan() -> None:
    source = torch.ones(1000, device="sim:0")
    host = transfer.to_host(source)
    assert host.sum().isnan()
    transfer.finish(host)
    assert host.sum() == 1000


def test_host_update_that_does_not_wait_for_gradients_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host reads NaN, or the copy's source is freed: whichever comes first."""

    def outcome() -> str:
        try:
            found = train(ZOO["gpt"], zero_offload.ZeroOffload(), device=torch.device("sim", 0))
        except (RuntimeError, WorkloadError) as error:
            return str(error)
        return "NaN" if any(each.isnan().any() for each in found.weights.values()) else "nothing"

    assert outcome() == "nothing"
    monkeypatch.setattr(transfer, "finish", lambda host: None)
    assert re.search(rf"NaN|handed out again, and {TO_HOST} on stream", outcome())
