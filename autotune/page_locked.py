"""What page-locked host memory takes: beside a GPU torch's allocator gives the next power of two of what is asked for.

`torch.cuda.host_memory_stats` and the system count it so. Setting its threshold for rounding lower is no way out: freed blocks
are kept by the power of two that they are within, and handed out for any size of the same (torch 2.13, `CachingHostAllocator.h`).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from memtune.hardware import Hardware
from memtune.parameters import columns_of
from memtune.program import I64, Kind, Step, Tier

_MAKE_IT: Final = ("memtune.to_host.default", "memtune.from_ssd.default")


def held_bytes(step: Step, hardware: Hardware) -> I64:
    """(m,) `step.bytes`, those of page-locked memory as they are held on `hardware`."""
    if hardware.device != "cuda" or not (step.tier == Tier.HOST).any():
        return step.bytes
    locked = _is_page_locked(step) & (step.bytes > 0)
    found = step.bytes.copy()
    found[locked] = next_power_of_two(found[locked])
    return found


def next_power_of_two(n_bytes: I64) -> I64:
    """Of sizes above 0; one that is a power stays."""
    found: I64 = np.int64(1) << np.ceil(np.log2(n_bytes.astype(np.float64))).astype(np.int64)
    return found


def _is_page_locked(step: Step) -> npt.NDArray[np.bool_]:
    """Copies from the device, what is read from SSD, and weights and sums of gradients that such copies became.

    Moments are made on the host, and masters of narrower weights are casts of copies: both are plain memory.
    """
    names = np.fromiter((name in _MAKE_IT for name in step.names), bool, len(step.names))
    copied = (step.producer >= 0) & names[step.op_name[step.producer]]
    columns, owner = columns_of(step.parameters), step.owner
    own = (owner < 0) | (step.bytes == np.append(columns.numel * columns.itemsize, 0)[owner])
    stays = (step.producer < 0) & ((step.kind == Kind.PARAMETER) | (step.kind == Kind.GRADIENT)) & own
    found: npt.NDArray[np.bool_] = (step.tier == Tier.HOST) & (copied | stays)
    return found
