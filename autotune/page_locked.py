"""What page-locked host memory takes: beside a GPU torch's allocator gives the next power of two of what is asked for.

`torch.cuda.host_memory_stats` and the system count it so. Setting its threshold for rounding lower is no way out: freed blocks
are kept by the power of two that they are within, and handed out for any size of the same (torch 2.13, `CachingHostAllocator.h`).
"""

from __future__ import annotations

import functools
from typing import Final

import numpy as np
import numpy.typing as npt

from memtune.hardware import Hardware
from memtune.parameters import columns_of
from memtune.program import I64, Kind, Step, Tier

_MAKE_IT: Final = ("memtune.to_host.default", "memtune.from_ssd.default")


def held_bytes(step: Step, hardware: Hardware) -> I64:
    """(m,) `step.bytes`, those of page-locked memory as they are held on `hardware`."""
    if hardware.device != "cuda":
        return step.bytes
    on_host = np.flatnonzero((step.tier == Tier.HOST) & (step.bytes > 0))
    if not len(on_host):
        return step.bytes
    locked = on_host[_is_page_locked(step, on_host)]
    found = step.bytes.copy()
    found[locked] = next_power_of_two(found[locked])
    return found


def next_power_of_two(n_bytes: I64) -> I64:
    """Of sizes above 0; one that is a power stays."""
    found: I64 = np.int64(1) << np.ceil(np.log2(n_bytes.astype(np.float64))).astype(np.int64)
    return found


def _is_page_locked(step: Step, on_host: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
    """Of storages on the host: copies from the device, what is read from SSD, and weights and sums of gradients made of such.

    Moments are made on the host, and masters of narrower weights are casts of copies: both are plain memory.
    """
    makes = _makes(step.names)
    producer, kind, owner = step.producer[on_host], step.kind[on_host], step.owner[on_host]
    copied = (producer >= 0) & makes[step.op_name[producer]]
    columns = columns_of(step.parameters)
    own = (owner < 0) | (step.bytes[on_host] == np.append(columns.numel * columns.itemsize, 0)[owner])
    found: npt.NDArray[np.bool_] = copied | ((producer < 0) & ((kind == Kind.PARAMETER) | (kind == Kind.GRADIENT)) & own)
    return found


@functools.lru_cache(maxsize=8)
def _makes(names: tuple[str, ...]) -> npt.NDArray[np.bool_]:
    return np.fromiter((name in _MAKE_IT for name in names), bool, len(names))
