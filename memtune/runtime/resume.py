"""Training goes on from the last complete step after a crash: what `resume: last_step` keeps and takes up.

Rules 1 to 4 are those of `runtime.manifest`. A resumed run does what a step does: it has its own values in one slot, and the
kept ones go into the other, from where weights go up to the device. So a failure of `apply` finds the own ones where they were.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import memtune.ops  # noqa: F401  (defines torch.ops.memtune)
from memtune.errors import EnvironmentFault
from memtune.runtime import disk, offload_dir
from memtune.runtime.context import Context
from memtune.runtime.manifest import DeadRun, Durable, Manifest, dead_runs, forget
from memtune.runtime.tree import local

_CPU_RANDOM: Final = "random numbers, cpu"
_DEVICE_RANDOM: Final = "random numbers, device"


class Kept(Protocol):
    """What is on SSD, two slots for everything: `kept_pieces`; with updaters `kept_updaters`, with experts `kept_experts`."""

    def facts(self) -> list[Any]:
        """What must be the same where this is taken up."""

    def look(self, key: str, manifests: list[Manifest]) -> None:
        """Find what `manifests` name besides what is in their own run's folder, and lock it."""

    def holders(self) -> object:
        """What holds the places of all slots in this run's folder."""

    def durable(self) -> Durable:
        """Flush all that the step has written; says where that is."""

    def complete(self) -> None:
        """A manifest has that: what is written next goes to the other slots."""

    def take_up(self, run: DeadRun, manifest: Manifest) -> None:
        """Bring what `manifest` names into the slots that are written next, and weights to the device."""

    def back(self) -> None:
        """Weights as they were before `take_up`, however far it came."""

    def forget(self) -> None:
        """Nothing is kept any more."""

    def remove_before(self) -> None:
        """What `look` found is needed no more."""

    def release_before(self) -> None:
        """What `look` found is left to others."""


class LastStep:
    """Keeps each complete step of one rank, and takes up the newest one that all ranks have.

    Args:
        context: Its model's buffers, device and ranks.
        kept: What is on SSD, which has two slots for everything.

    Attributes:
        steps: Complete steps, those of the runs before included.
    """

    def __init__(self, context: Context, kept: Kept) -> None:
        self._context, self._kept = context, kept
        self._saved = set(context.model.state_dict())  # of the buffers those that a checkpoint would hold, too
        self._key = self._key_of()
        self._before: list[DeadRun] = []
        self.steps = 0

    def resume(self) -> int:
        """Take up the newest step that all ranks have; all ranks call it. Returns how many steps training has done.

        Raises:
            EnvironmentFault: What was kept cannot be read back as it was written; says whose bytes.
        """
        self._forget()  # of the same model, trained before in this process
        self._before = dead_runs(offload_dir.all_checked(), self._key)
        self._kept.look(self._key, [each for run in self._before for each in run.manifests])
        self._context.undo.callback(self._release)
        agreed = self._agreed(self._before[0].manifests[0].step if self._before else 0)
        if agreed == 0:
            self._release()
            return 0
        source, manifest = next((run, each) for run in self._before for each in run.manifests if each.step == agreed)
        self._take_up(source, manifest)
        for each in (run for run in self._before if run is not source):  # runs that crash one after the other fill no drive
            each.remove()
        self._before = [source]
        told = f"memtune goes on after step {agreed}, the last complete one of a run that ended."
        warnings.warn(told, stacklevel=_level_of_caller())
        return agreed

    def complete(self, steps: int = 1) -> None:
        """`steps` are over, all that they changed is written: when this returns, training can go on from there.

        Raises:
            EnvironmentFault: It cannot be kept; the step before is.
        """
        self.steps += steps
        self._write_manifest()
        self._remove_before()  # Rule 4

    def finish(self) -> None:
        """Nothing is kept any more."""
        disk.folder().remove()
        self._kept.forget()
        self._remove_before()

    def _remove_before(self) -> None:
        while self._before:
            self._before.pop().remove()
        self._kept.remove_before()

    def _write_manifest(self) -> None:
        """Its places stay this run's when the optimizer is gone and the process goes on with something else."""
        run = disk.folder()
        run.kept[self._key] = self._kept.holders()
        pieces, counters, folders, notes = self._kept.durable()
        values = _random(self._context) | {name: local(value) for name, value in self._buffers()}
        Manifest(self._key, self.steps, pieces, counters, values, folders, notes).write(run.path)
        self._kept.complete()

    def _forget(self) -> None:
        run = disk.folder()
        forget(run.path, self._key)
        run.kept.pop(self._key, None)

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, value) for name, value in self._context.model.named_buffers() if name in self._saved)

    def _agreed(self, newest: int) -> int:
        """The newest step that every rank has (Rule 3); 0: none."""
        if self._context.ranks == 1:
            return newest
        steps = torch.tensor([newest], device=self._context.device)
        dist.all_reduce(steps, op=dist.ReduceOp.MIN)
        return int(steps)

    def _take_up(self, run: DeadRun, manifest: Manifest) -> None:
        buffers = {name: local(value).clone() for name, value in self._buffers()}
        weights = {} if self._context.gather_rows is None else {p: local(p).detach().to("cpu", copy=True) for p in self._whole()}
        self._context.undo.callback(self._back, buffers | _random(self._context), weights)
        self._on_all_ranks(lambda: self._kept.take_up(run, manifest))
        if self._context.gather_rows is not None:
            self._context.gather_rows()
        self._set(manifest.values)
        self.steps = manifest.step
        self._on_all_ranks(self._write_manifest)

    def _on_all_ranks(self, act: Callable[[], None]) -> None:
        """`act`, after which every rank knows whether it went well on all: what follows needs them all."""
        failed: Exception | None = None
        try:
            act()
        except Exception as error:  # whatever it is, the others wait for this rank
            failed = error
        if self._agreed(failed is None) == 0:
            raise failed or EnvironmentFault(
                "Another rank cannot go on from the step that it kept.", fix="see that rank's message", code="MT365"
            )

    def _whole(self) -> list[nn.Parameter]:
        """Weights of which this rank updates rows and is given the others."""
        return [parameter for parameter in self._context.represented if not isinstance(parameter, DTensor)]

    @torch.no_grad()
    def _back(self, values: dict[str, Tensor], weights: dict[nn.Parameter, Tensor]) -> None:
        """The weights as they were before anything was taken up, of this rank alone: others may not have failed.

        What the optimizer held is put back by others.
        """
        self._forget()
        self._kept.back()
        for parameter, value in weights.items():
            parameter.copy_(value)
        self._set(values)

    def _release(self) -> None:
        while self._before:
            self._before.pop().release()
        self._kept.release_before()

    def _set(self, values: dict[str, Tensor]) -> None:
        for name, buffer in self._buffers():
            if name in values:
                with torch.no_grad():
                    local(buffer).copy_(values[name])
        torch.set_rng_state(values[_CPU_RANDOM])
        if _DEVICE_RANDOM in values:
            torch.cuda.set_rng_state(values[_DEVICE_RANDOM], self._context.device)

    def _key_of(self) -> str:
        context = self._context
        facts: list[Any] = [type(context.optimizer).__name__, context.rank, context.ranks, self._kept.facts()]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _level_of_caller() -> int:
    """The `stacklevel` at which whoever calls this was called from outside of memtune; techniques are at different depths."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "memtune":
        frame, level = frame.f_back, level + 1
    return level


def _random(context: Context) -> dict[str, Tensor]:
    found = {_CPU_RANDOM: torch.get_rng_state()}
    if context.device.type == "cuda":
        found[_DEVICE_RANDOM] = torch.cuda.get_rng_state(context.device)
    return found
