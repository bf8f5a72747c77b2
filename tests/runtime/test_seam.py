"""The seam's collectives: sent tensors are released before the next op, also with a slow gloo thread."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from memtune.runtime import seam


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
