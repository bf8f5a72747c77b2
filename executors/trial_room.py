"""Number of trials that a machine runs at the same time without changing each other's step times."""

from __future__ import annotations

import os

from memtune.device import accelerator, platform_of
from memtune.errors import UsageError
from memtune.hardware import numa_nodes, usable_cores

_CORES_PER_GPU = 2
"""Cores that a rank on a GPU needs for itself: one issues kernels, one loads batches and copies."""


def visible_gpu_ids(device: str) -> tuple[str, ...]:
    """Return the devices of type `device` that trials can be given, as in CUDA_VISIBLE_DEVICES."""
    variable = platform_of(device).visible_devices
    if not variable:
        return ()  # trials cannot be given devices of their own
    named = os.environ.get(variable)
    if named is not None:
        return tuple(each.strip() for each in named.split(",") if each.strip())
    return tuple(map(str, range(accelerator.count(device))))


def local_slots(device: str, ranks: int, *, timed: bool) -> int:
    """Return the number of trials of `ranks` that this machine holds side by side, at least 1."""
    # GPUs: disjoint sets of them, with two cores per rank. CPUs: one trial per NUMA node, because
    # trials on one node share its memory bandwidth; trials that are not `timed` need cores only.
    cores = usable_cores()
    if device != "cpu":
        return max(1, min(len(visible_gpu_ids(device)) // ranks, cores // (_CORES_PER_GPU * ranks)))
    if not timed:
        return max(1, cores // ranks)
    nodes = numa_nodes()
    return nodes if cores // nodes >= ranks else 1


def check_gpus(slots: int, ranks: int, there: int) -> None:
    """Raise UsageError if `there` GPUs are too few for `slots` trials of `ranks`."""
    if slots > 1 and slots * ranks > there:
        raise UsageError(
            f"--parallel {slots} needs {slots * ranks} GPUs: {slots} trials of {ranks}.",
            evidence=f"{there} can be given to them.",
            fix=f"--parallel {max(1, there // ranks)}, or auto",
            code="MT125",
        )
