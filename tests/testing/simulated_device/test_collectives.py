"""Two ranks on simulated devices: collectives on a stream of their own, messages, DDP and FSDP2."""

from __future__ import annotations

import pytest
from support.gloo import run_ranks
from support.simulated_ranks import check_collectives

pytestmark = pytest.mark.device


def test_two_ranks_train_on_simulated_devices() -> None:
    run_ranks(check_collectives, 2, device="sim")
