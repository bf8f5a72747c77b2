"""What can be asked of a search and of a plan, as plain data: the command line fills it in, Python code may too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from memtune.autotune.scoring import Goal


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """What is tuned, and for which machine."""

    workload: str
    """`model.py` or `model.py:name`."""
    device: Literal["cpu", "cuda"] | None = None
    """None: CUDA where torch sees it."""
    ranks: int = 1
    """Processes that train together: GPUs, or workers on CPU."""
    gpu_type: str | None = None
    """A name of the hardware table, to predict for a machine that is not here."""
    nodes: int | None = None
    """Machines that the ranks are spread over evenly; None: as few as the hardware's node shape allows."""
    budget_bytes: int | None = None
    """Device bytes per rank (`--max-memory`); None: the memory of the device, and no limit on CPU."""
    goal: Goal = "throughput"
    global_batch: int | None = None
    """Samples per optimizer step over all ranks; None: the workload's own."""
    axes: tuple[str, ...] = ()
    """Axes or slots that are searched; empty for all."""
    freeze: Mapping[str, str] = field(default_factory=dict)
    """Kind by slot, or `micro_batch` by number, that is not searched."""
    allow_lossy: bool = False
    seed: int = 0

    @property
    def single_node(self) -> bool:
        """Whether all ranks run on this machine."""
        return True


@dataclass(frozen=True, kw_only=True)
class SearchOptions(TargetOptions):
    """`memtune search`."""

    out: Path = Path("tuned.yaml")
    force: bool = False
    """Replace `out` if it exists."""
    study: str | None = None
    """Name of the study below `.memtune/`, or a path; None: made from the workload's name."""
    resume: bool = False
    trials: int = 20
    """Guards, candidates and audit; repeats and the confirmation come on top."""
    time_s: float | None = None
    executor: Literal["auto", "local", "ray", "simulated"] = "auto"
    slots: int = 1
    """Trials at the same time (executor local)."""
    ray_address: str | None = None
    dry_run: bool = False
    """Everything but trials: what would be run."""
    repeats: int = 2
    """Further runs of each of the best three, in turn."""
    certify: bool = True
    """Hold loss and gradients of the winner against a reference: three short runs at the end."""
    trial_deadline_s: float = 600.0
    """Until there are trials to go by."""

    @property
    def single_node(self) -> bool:
        """Whether all ranks run on this machine."""
        return self.ray_address is None


@dataclass(frozen=True, kw_only=True)
class PlanOptions(TargetOptions):
    """`memtune plan`."""

    config: Path | None = None
    """Predict this config alone."""
    micro_batch: int | None = None
    """Instead of the config's."""
    top: int = 12
    """Rows of the ranking that are shown."""
    exact: bool = False
    """Dry-run the first rows of the front, or the config: the real runtime on fake tensors."""
