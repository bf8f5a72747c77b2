"""A simulated accelerator, `sim`: memory, streams, events and copies of a GPU, kernels of the CPU."""

from memtune.testing.simulated_device.build import build, library_path
from memtune.testing.simulated_device.device import lose, races, start
from memtune.testing.simulated_device.process_group import devices_alone

__all__ = ["build", "devices_alone", "library_path", "lose", "races", "start"]
