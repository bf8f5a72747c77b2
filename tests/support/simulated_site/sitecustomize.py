"""Start the simulated accelerator in every Python process that has this folder in PYTHONPATH."""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # `support`, which is not installed

from support.simulated_device import start

start(int(os.environ.get("MEMTUNE_SIMULATED_DEVICES", "2")))
