"""Start the simulated accelerator in every Python process that has this folder in PYTHONPATH."""

import os

from memtune.testing.simulated_device import start

start(int(os.environ.get("MEMTUNE_SIMULATED_DEVICES", "2")))
