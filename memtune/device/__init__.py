"""The only room that knows devices: their capabilities, streams, memory, generators, errors and backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.device import accelerator as accelerator
    from memtune.device import memory_statistics as memory_statistics
    from memtune.device import streams as streams
    from memtune.device.accelerator import backend_of, backends_of, platform_of
    from memtune.device.faults import (
        explained,
        is_lost,
        is_out_of_memory,
        lost_error,
        require_one_device,
    )
    from memtune.device.host_heap import keep_freed_pages
    from memtune.device.platforms import (
        DEFAULT_ACCELERATOR,
        DISPATCH_KEYS,
        PLATFORMS,
        Capability,
        Platform,
        device_of,
        of_hardware,
    )
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "DEFAULT_ACCELERATOR",
    "DISPATCH_KEYS",
    "PLATFORMS",
    "Capability",
    "Platform",
    "accelerator",
    "backend_of",
    "backends_of",
    "device_of",
    "explained",
    "is_lost",
    "is_out_of_memory",
    "keep_freed_pages",
    "lost_error",
    "memory_statistics",
    "of_hardware",
    "platform_of",
    "require_one_device",
    "streams",
]
