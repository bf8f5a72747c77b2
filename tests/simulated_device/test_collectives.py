"""Two ranks on simulated devices: collectives on a stream of their own, DDP and FSDP2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.multiprocessing as mp
from support.simulated_ranks import run

pytestmark = pytest.mark.device


def test_two_ranks_train_on_simulated_devices(tmp_path: Path) -> None:
    mp.spawn(run, (str(tmp_path / "store"),), nprocs=2)
