"""The simulated accelerator, started for these tests only: a process keeps its accelerator, and
other defaults in torch with it. So they run in processes of their own (`make test-device`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.simulated_device import races, start
from support.simulated_ranks import CAPACITY_BYTES


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    """Two devices; a race fails the test in which it happened."""
    import torch

    start(2, CAPACITY_BYTES)
    races()
    yield
    torch.accelerator.synchronize(0)
    torch.accelerator.synchronize(1)
    assert races() == []
