"""A simulated accelerator, `sim`: memory, streams, events and copies of a GPU, kernels of the CPU."""

from memtune.testing.simulated_device.build import build, library_path
from memtune.testing.simulated_device.device import races, start

__all__ = ["build", "library_path", "races", "start"]
