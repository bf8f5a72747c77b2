"""Complete steps of updater processes: two SSD slots per sub-group, kept and resumed by `ssd.last_step`.

Rule 1. The trainer's folder has the manifests, which name the updaters' folders. A manifest is written when
  every updater has made its part of the step durable, so it is valid for all of them or none.
Rule 2. An updater's folder is kept if it has a marker file with the key's name, created before the first
  manifest that names the folder. The next run with the key removes folders that no manifest names any more.
Rule 3. An updater may end later than its trainer; a run that resumes waits for it.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from torch import Tensor

from memtune.errors import EnvironmentFault
from memtune.offload.near_storage.storage_domains import Layout
from memtune.offload.near_storage.update_worker_client import UpdaterLink
from memtune.ssd import DeadRun, Durable, Extent, Manifest, coded, offload_dir

_PATIENCE_S: Final = 30.0
"""Seconds that an updater whose trainer is dead may take to end."""


class Parameter(Protocol):
    """A parameter that is divided over updaters."""

    name: str
    moments: list[str]
    steps: int

    @property
    def device(self) -> Tensor:
        """Its memory on the device."""


class UpdaterSlots:
    """Sub-groups in the updaters' files, as slots of `ssd.last_step`.

    Args:
        links: One per domain.
        layout: Their sub-groups.
        parameters: Of the layout's segments.
        write: Writes the first buffer of a domain to a sub-group: (domain, sub-group).
    """

    def __init__(
        self,
        links: list[UpdaterLink],
        layout: Layout,
        parameters: Sequence[Parameter],
        write: Callable[[int, int], None],
    ) -> None:
        self._links, self._layout, self._parameters, self._write = links, layout, parameters, write
        self._name = ""
        self._before: dict[str, DeadRun] = {}
        self._own: list[tuple[Tensor, int]] = []

    def facts(self) -> list[Any]:
        """Return names, shapes, dtypes, moments and their division; a run resumes only from equal facts."""
        each = [[p.name, list(p.device.shape), str(p.device.dtype), p.moments] for p in self._parameters]
        return [each, [[group.numel for group in groups] for groups in self._layout.domains]]

    def claim_folders(self, key: str, manifests: list[Manifest]) -> None:
        """Lock the folders that `manifests` name, and remove those that no manifest names any more."""
        self._name = f"{offload_dir.MANIFEST}{key[:16]}-updater"
        # Two manifests are looked at: the newest may be of a step that another rank has not completed.
        named = {name for each in manifests for name in each.folders}
        for path in (path for path in _folders() if path.name in named):
            if (lock := offload_dir.locked(path, _PATIENCE_S)) is not None:
                self._before[path.name] = DeadRun(path, lock, ())
        # Folders of trainers that run now are no leftovers either.
        named |= {name for each in self._manifests(key) for name in each.folders}
        for path in (path for path in _folders() if path.name not in named and (path / self._name).exists()):
            if (lock := offload_dir.locked(path)) is not None:
                DeadRun(path, lock, ()).remove()

    def _manifests(self, key: str) -> Iterator[Manifest]:
        """Yield the manifests of all runs, also of running ones."""
        for path in _folders():
            for place in path.glob(f"{offload_dir.MANIFEST}{key[:16]}-[01]"):
                if (found := Manifest.read(place)) is not None:
                    yield found

    def holders(self) -> object:
        """Return nothing: the extents belong to the updaters."""

    def durable(self) -> Durable:
        """Return two extents for each sub-group (weights, moments), and a step counter for each parameter."""
        for link in self._links:
            # All orders first: updaters flush at once, and the slowest drive alone determines the wait.
            link.order(["keep", self._name])
        extents = []
        for link, groups in zip(self._links, self._layout.domains, strict=True):
            sizes = [4 * count for group in groups for count in (group.numel, group.moments)]
            for (offset, sums), n_bytes in zip(link.answer("kept"), sizes, strict=True):
                extents.append(Extent("", offset, n_bytes, np.frombuffer(base64.b64decode(sums), np.uint64)))
        counters: list[float | None] = [float(each.steps) for each in self._parameters]
        return Durable(extents, counters, [link.path.parent.name for link in self._links], {})

    def complete(self) -> None:
        """Let the next step write the other slots."""
        for link in self._links:
            link.order(["complete"])

    def resume_from(self, run: DeadRun, manifest: Manifest) -> None:
        """Resume sub-group by sub-group: its updater reads it, weights are copied to the device, and it is
        written again.

        Raises:
            EnvironmentFault: A folder is missing, or its checksums do not match; names the parameter.
        """
        # Before the first weight is overwritten, so that `back` works after a failure in the middle.
        self._own = [(each.device.to("cpu", copy=True), each.steps) for each in self._parameters]
        extents = iter(manifest.pieces)
        for domain, (groups, name) in enumerate(zip(self._layout.domains, manifest.folders, strict=True)):
            if name not in self._before:
                raise EnvironmentFault(
                    f"The updater state of storage domain {domain} for step {manifest.step} is missing.",
                    evidence=(
                        f"no folder {name} in {', '.join(offload_dir.allowed_dirs())}, or another process"
                        " uses it"
                    ),
                    fix="set the same offload directories, or run memtune clean and resume from a checkpoint",
                    code="MT365",
                )
            for number in range(len(groups)):
                places = [
                    [each.offset, coded(each.sums.tobytes())] for each in (next(extents), next(extents))
                ]
                self._resume_sub_group(domain, number, self._before[name].path, places)
        for each, counter in zip(self._parameters, manifest.counters, strict=True):
            each.steps = int(counter or 0)

    def _resume_sub_group(self, domain: int, number: int, folder: Path, places: list[list[Any]]) -> None:
        link = self._links[domain]
        # Orders run one after the other, so the answer to "settle" says that buffer 0 holds the sub-group.
        link.order(["take", number, 0, str(folder), places])
        link.order(["settle"])
        link.answer("settled")
        for segment in self._layout.domains[domain][number].segments:
            weight = self._parameters[segment.parameter].device
            flat = weight.as_strided((weight.numel(),), (1,), weight.storage_offset())
            flat[segment.start :][: segment.numel].copy_(link.buffers[0][segment.weight :][: segment.numel])
        # Into this run's own file: the old folder is removed once a complete step of this run exists.
        self._write(domain, number)

    def restore(self) -> None:
        """Restore the weights from copies; the updaters' new state is discarded."""
        self.forget()
        for each, (weight, steps) in zip(self._parameters, self._own, strict=False):
            each.device.copy_(weight)
            each.steps = steps

    def forget(self) -> None:
        """Unmark the updaters' folders, which are then removed with the updaters."""
        for link in self._links:
            with contextlib.suppress(EnvironmentFault):  # it has ended
                link.order(["forget", self._name])

    def remove_before(self) -> None:
        """Remove the folders of earlier updaters."""
        while self._before:
            self._before.popitem()[1].remove()

    def release_before(self) -> None:
        """Unlock the folders of earlier updaters."""
        while self._before:
            self._before.popitem()[1].release()


def _folders() -> list[Path]:
    """Return the folders of all runs of this user, running or dead."""
    return [path for root in offload_dir.allowed_dirs() for path in offload_dir.run_folders(Path(root))]
