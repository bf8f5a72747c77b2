"""A wait that is left out of memtune's own copies is found on the simulated accelerator, and named."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from support.zoo_paths import ZOO

from memtune.device import streams
from memtune.errors import WorkloadError
from memtune.runtime import transfer
from memtune.search_spaces.offload.activations import copy_out
from memtune.search_spaces.offload.states import stronghold
from memtune.technique import Technique
from memtune.testing.simulated_device import races
from memtune.testing.training import train

pytestmark = pytest.mark.device

TO_HOST = r"aten::copy_ \(device to host\)"
TO_DEVICE = r"aten::copy_ \(host to device\)"
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


def test_host_that_does_not_wait_for_a_copy_reads_nan() -> None:
    source = torch.ones(1000, device="sim:0")
    host = transfer.to_host(source)
    assert host.sum().isnan()
    transfer.finish(host)
    assert host.sum() == 1000
