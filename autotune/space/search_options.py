"""Options of a search and of a plan, as plain data; the command line and Python code fill them in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from memtune.autotune.space.scoring import Goal
from memtune.hardware import Device


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """The workload and the machine to tune it for."""

    workload: str
    """`model.py` or `model.py:name`."""
    device: Device | None = None
    """None for the accelerator if torch sees one."""
    ranks: int = 1
    """Number of processes that train together: GPUs, or workers on CPU."""
    gpu_type: str | None = None
    """A name of the hardware table, to predict for a machine that is not present."""
    nodes: int | None = None
    """Machines over which the ranks are spread evenly; None for as few as the hardware's node shape
    allows.
    """
    budget_bytes: int | None = None
    """Device bytes per rank (`--max-memory`); None for the device's memory, and no limit on CPU."""
    host_memory_bytes: int | None = None
    """Host bytes per node that training may use (`--host-memory`); None for what is free here, or for the
    ranks' share of a typical node with `gpu_type`.
    """
    goal: Goal = "throughput"
    global_batch: int | None = None
    """Samples per optimizer step over all ranks; None for the workload's own."""
    axes: tuple[str, ...] = ()
    """Axes or slots to search; empty for all."""
    freeze: Mapping[str, str] = field(default_factory=dict)
    """Kind by slot, or `micro_batch` by number, that is fixed."""
    allow_lossy: bool = False
    seed: int = 0

    @property
    def single_node(self) -> bool:
        """Return whether all ranks run on this machine."""
        return True


@dataclass(frozen=True, kw_only=True)
class SearchOptions(TargetOptions):
    """Options of `memtune search`."""

    out: Path = Path("tuned.yaml")
    force: bool = False
    """Replace `out` if it exists."""
    study: str | None = None
    """Name of the study below `.memtune/`, or a path; None derives it from the workload's name."""
    resume: bool = False
    trials: int = 20
    """Baselines, candidates and audit; repeats and the confirmation are added."""
    time_s: float | None = None
    executor: Literal["auto", "local", "ray"] = "auto"
    parallel: int | None = None
    """Concurrent trials; None for as many as do not change each other's step times."""
    ray_address: str | None = None
    dry_run: bool = False
    """Do everything but run trials."""
    repeats: int = 2
    """Further runs of each of the best three, alternating."""
    trial_deadline_s: float = 600.0
    """Used until there are trials to estimate from."""

    @property
    def single_node(self) -> bool:
        """Return whether all ranks run on this machine."""
        return self.ray_address is None


@dataclass(frozen=True, kw_only=True)
class PlanOptions(TargetOptions):
    """Options of `memtune plan`."""

    config: Path | None = None
    """Predict only this config."""
    micro_batch: int | None = None
    """Replaces the config's."""
    top: int = 12
    """Rows of the ranking to show."""
    exact: bool = False
    """Dry-run the first rows of the front, or the config: the real runtime on fake tensors."""
    out: Path | None = None
    """Write the config of a row of the front to this file."""
    row: int = 1
    """The row to write; 1 is the best that fits, by time, techniques and retries."""
    why_not: str | None = None
    """A technique, `kind` or `slot=kind`, to explain the absence of."""
