"""A simulated accelerator, `sim`: memory, streams, events and copies of a GPU, kernels of the CPU."""

# isort: off
from support.simulated_device import other_allocator  # noqa: F401  (before memtune)
from support.simulated_device.build import build, library_path
from support.simulated_device.device import lose, races, start
from support.simulated_device.process_group import devices_alone

__all__ = ["build", "devices_alone", "library_path", "lose", "races", "start"]
