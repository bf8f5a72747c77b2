"""The seam's collectives: sent tensors are released before the next op, also with a slow gloo thread."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from memtune.runtime import seam


def test_what_was_sent_is_waited_for_until_a_late_thread_drops_it() -> None:
    """A starved thread kept the gathered message of a step into the next one, whose peak was higher by just
    that.
    """
    x = torch.ones(3, requires_grad=True)
    held = [x * x]  # its graph has the tensor, as gloo's work has
    threading.Timer(0.3, held.clear).start()
    seam._wait_released([x])
    assert not held
    assert seam._use_count(x) == 1


def test_who_keeps_it_for_good_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seam, "_patience_s", 0.2)
    x = torch.ones(3, requires_grad=True)
    held = [x * x]
    start_s = time.monotonic()
    seam._wait_released([x])
    assert held
    assert time.monotonic() - start_s >= 0.2
    assert seam._patience_s == seam._LITTLE_PATIENCE_S
