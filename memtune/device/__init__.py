"""The only room that knows devices: their capabilities, streams, memory, generators, errors and backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.device import (
        accelerator as accelerator,
        memory_statistics as memory_statistics,
        streams as streams,
    )
    from memtune.device.accelerator import (
        backend_of as backend_of,
        backends_of as backends_of,
        platform_of as platform_of,
    )
    from memtune.device.faults import (
        explained as explained,
        is_lost as is_lost,
        is_out_of_memory as is_out_of_memory,
        lost_error as lost_error,
        require_one_device as require_one_device,
    )
    from memtune.device.host_heap import keep_freed_pages as keep_freed_pages
    from memtune.device.platforms import (
        DEFAULT_ACCELERATOR as DEFAULT_ACCELERATOR,
        DISPATCH_KEYS as DISPATCH_KEYS,
        PLATFORMS as PLATFORMS,
        TENSOR_FLAGS as TENSOR_FLAGS,
        Capability as Capability,
        Platform as Platform,
        device_of as device_of,
        of_hardware as of_hardware,
    )
else:
    __getattr__ = open_door(__name__)
