"""CPU cores: their number, the threads of each rank, and torch's thread count. Imports torch only on use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def core_sets(count: int, sys_root: Path = Path("/sys/devices/system")) -> list[tuple[int, ...]]:
    """Return `count` disjoint sets of the usable cores, those of a set as close together as possible.

    Hyperthreads of one core, then cores of one NUMA node, are in one set as far as sizes allow. Empty if
    there are fewer cores than sets, or the system does not tell.
    """
    if not hasattr(os, "sched_getaffinity"):
        return []
    usable = sorted(os.sched_getaffinity(0), key=lambda core: (*_place(core, sys_root), core))
    size = len(usable) // count
    return [tuple(usable[i * size : (i + 1) * size]) for i in range(count)] if size else []


def numa_nodes(sys_root: Path = Path("/sys/devices/system")) -> int:
    """Return the number of NUMA nodes of the usable cores; each has memory bandwidth of its own."""
    if not hasattr(os, "sched_getaffinity"):
        return 1
    return len({_place(core, sys_root)[0] for core in os.sched_getaffinity(0)})


def _place(core: int, sys_root: Path) -> tuple[int, int, int]:
    """Return NUMA node, socket and physical core of a core; 0 where the system does not tell."""
    folder = sys_root / "cpu" / f"cpu{core}"
    node = next((int(each.name[4:]) for each in folder.glob("node[0-9]*")), 0)
    return node, _number(folder / "topology/physical_package_id"), _number(folder / "topology/core_id")


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0


def threads_per_rank(cores: int, ranks: int) -> int:
    """Return the CPU threads for each of `ranks` that share `cores`; more would contend."""
    return max(1, cores // ranks)


def use_share_of_cores() -> None:
    """Run torch on this rank's share of the cores if torchrun has left it on one thread."""
    # Trials run on that share; on one thread an optimizer update on the host would take many times as long.
    import torch

    is_default = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1"
    if is_default and torch.get_num_threads() == 1:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(threads_per_rank(usable_cores(), ranks))


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Run torch on `count` CPU threads inside the context; None changes nothing."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
