"""The seam: outputs on fake tensors have their tier; sent tensors are released before the next op."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import memtune.ssd.ssd_tensors  # noqa: F401  (defines the ops)
from memtune.runtime import HOST, SSD, seam, tier_of


def test_wait_released_waits_for_a_delayed_thread() -> None:
    """A delayed thread would keep the gathered message of a step until the next one, and raise its peak by
    that.
    """
    x = torch.ones(3, requires_grad=True)
    held = [x * x]  # its graph has the tensor, as gloo's work has
    threading.Timer(0.3, held.clear).start()
    seam._wait_released([x])
    assert not held
    assert seam._use_count(x) == 1


def test_leaked_reference_times_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seam, "_patience_s", 0.2)
    x = torch.ones(3, requires_grad=True)
    held = [x * x]
    start_s = time.monotonic()
    seam._wait_released([x])
    assert held
    assert time.monotonic() - start_s >= 0.2
    assert seam._patience_s == seam._LITTLE_PATIENCE_S


def test_fake_outputs_of_the_seam_are_in_their_tier() -> None:
    """Experts stay in host memory over steps: a later recording has no op that gives their tier."""
    with FakeTensorMode():
        ssd = torch.ops.memtune.to_ssd(torch.empty(4), "a")
        assert (tier_of(ssd), tier_of(torch.ops.memtune.from_ssd(ssd))) == (SSD, HOST)
