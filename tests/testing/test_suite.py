"""The conformance suite's own tools."""

from __future__ import annotations

import weakref

import torch

from memtune.runtime import weakly
from memtune.testing.suite import _Failing


class Watcher:
    n_died = 0

    def died(self) -> None:
        self.n_died += 1


def test_finalizers_of_earlier_objects_are_not_calls_of_apply() -> None:
    """Python prints their exceptions: an error injected into one would not fail `apply`."""
    watcher, storages = Watcher(), [torch.empty(1).untyped_storage()]
    died = weakly(watcher.died)
    weakref.finalize(storages[0], died)
    with _Failing(None) as calls:
        storages.clear()
    assert watcher.n_died == 1
    assert not calls.seen
    with _Failing(None) as calls:
        died()
    assert len(calls.seen) == 1
