"""Python that the host runs for each op of a step: hooks, dispatch modes, schedules.

The constants are those of `Hardware` that `memtune doctor --calibrate` measures
(`memtune/hardware/mechanism_costs.py`). On a CPU the seconds delay compute, on a GPU the issue of ops, which
runs ahead of the device.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from memtune.hardware import Hardware
from memtune.program import Compression, Kind, Phase, Resource, Step


class PythonWork(NamedTuple):
    """Python that runs in a step besides the program's own ops and hooks."""

    observes_ops: bool = False
    """A dispatch mode sees the ops of blocks that run again or whose tensors are offloaded, in both runs."""
    schedule_calls: int = 0
    """Calls a micro-batch that run a schedule; its ops have no hooks and no modes."""


NO_PYTHON: Final = PythonWork()
_WITH_VIEWS: Final = 3
"""Ops that a dispatch mode sees for each op of a Step, in which views are dropped."""
_GROUPED: Final = frozenset(
    f"memtune.{name}.default" for name in ("to_host", "copy_to_host_", "copy_to_device_", "host_update_")
)
_COMPRESS: Final = Compression()
_UNPACKS: Final = ("memtune.to_device", _COMPRESS.unpack)
_IN_STEP: Final = [Phase.BOUNDARY, Phase.OPTIMIZER]


def python_s(step: Step, hardware: Hardware, python: PythonWork) -> npt.NDArray[np.float64]:
    """Return (ops,) seconds of Python that the host spends on each op before it runs or is issued."""
    ops = step.ops
    computes = ops.resource == Resource.COMPUTE
    found = np.where(computes | (ops.resource == Resource.NOTHING), 0.0, hardware.hook_s)
    grouped = np.asarray([name in _GROUPED for name in step.names], bool)[ops.name]
    # In the step many tensors are copied or updated by one call, so that each costs the host less.
    found[grouped & np.isin(ops.phase, _IN_STEP)] = hardware.grouped_copy_s
    if python.schedule_calls:
        gradients = int((step.storages.kind == Kind.PARAMETER).sum())
        forward = np.flatnonzero(computes & (ops.phase == Phase.FORWARD))[:1]
        found[forward] += (
            python.schedule_calls * hardware.scheduled_call_s + gradients * hardware.scheduled_gradient_s
        )
        return found
    _add_claims(found, step, hardware, python)
    return found


def _add_claims(found: npt.NDArray[np.float64], step: Step, hardware: Hardware, python: PythonWork) -> None:
    """Add what the activation table costs: hooks on saved tensors, copies, and modes."""
    ops = step.ops
    inside = ops.block >= 0
    packs = np.asarray([name == _COMPRESS.pack for name in step.names], bool)[ops.name]
    out = inside & (ops.phase == Phase.FORWARD) & ((ops.resource == Resource.DEVICE_TO_HOST) | packs)
    back = np.isin(ops.phase, (Phase.BACKWARD, Phase.RECOMPUTE))
    if out.any():  # a moved tensor is packed and unpacked
        found[out] = hardware.moved_tensor_s / 2
        named = np.asarray([name.startswith(_UNPACKS) for name in step.names], bool)[ops.name]
        found[back & named] = hardware.moved_tensor_s / 2
    again = inside & (ops.phase == Phase.RECOMPUTE) & (ops.resource == Resource.COMPUTE)
    # Each op that runs again makes a tensor that autograd saves, about.
    found[again] += hardware.saved_tensor_s
    blocks, first = np.unique(ops.block[again], return_index=True)
    found[np.flatnonzero(again)[first]] += hardware.recomputed_block_s
    if python.observes_ops:
        claimed = np.isin(ops.block, np.union1d(blocks, ops.block[out])) & inside
        seen = claimed & (ops.resource == Resource.COMPUTE) & (ops.phase == Phase.FORWARD)
        found[seen | again] += _WITH_VIEWS * hardware.observed_op_s
