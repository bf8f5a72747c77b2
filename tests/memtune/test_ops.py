"""The seam's collectives: what they send is let go before the next op, however late gloo's thread is."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from memtune import ops


def test_what_was_sent_is_waited_for_until_a_late_thread_drops_it() -> None:
    """A starved thread kept the gathered message of a step into the next one, whose peak was higher by just that."""
    x = torch.ones(3, requires_grad=True)
    held = [x * x]  # its graph has the tensor, as gloo's work has
    threading.Timer(0.3, held.clear).start()
    ops._let_go([x])
    assert not held
    assert ops._use_count(x) == 1


def test_who_keeps_it_for_good_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_patience_s", 0.2)
    x = torch.ones(3, requires_grad=True)
    held = [x * x]
    start_s = time.monotonic()
    ops._let_go([x])
    assert held
    assert time.monotonic() - start_s >= 0.2
    assert ops._patience_s == ops._LITTLE_PATIENCE_S
