"""Complete steps with experts on SSD: records of experts, their missed updates, and all other trained
parameters.

Rules on top of those of `ssd.last_step`:

Rule 1. After the optimizer's step all changed experts are written from the cache; unused experts are not
  touched. Updates that they have missed are in the manifest, and are applied after a resume as well.
Rule 2. Resident parameters have two SSD slots for the weight and each moment; all are written together with
  the experts, one tensor after the other, at most `WRITES_IN_FLIGHT` at a time.
Rule 3. Replicas use different experts, so one of them may write experts with missed updates before it
  averages gradients with the others; no replica continues before all have kept the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune.errors import ApplyError
from memtune.program import WRITES_IN_FLIGHT
from memtune.runtime import HOST, local, mark
from memtune.ssd import (
    DeadRun,
    Durable,
    Extent,
    Manifest,
    Piece,
    RecordSlots,
    copy_to_slot,
    ssd_tensors,
    tensors_of,
)

Settings = dict[str, Any]
Missed = dict[nn.Parameter, list[Settings]]
"""Settings of each update that a parameter has missed, oldest first; updates of one step and group share one
object.
"""
_READ: Final = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "momentum",
    "dampening",
    "nesterov",
    "lr_decay",
    "maximize",
)
"""Settings that a native update reads."""


@dataclass(eq=False)
class _Slots:
    """Two SSD slots of a tensor: the one of the last complete step, and the one that is written next."""

    current: Tensor
    next: Tensor

    def complete(self) -> None:
        """Swap the slots."""
        self.current, self.next = self.next, self.current


@dataclass(eq=False)
class ResidentParameter:
    """A parameter that is resident on the device, and its slots on SSD."""

    name: str
    parameter: nn.Parameter
    group: Settings
    moments: list[str]
    slots: list[_Slots]
    """Of the weight, then of each moment."""

    @classmethod
    def of(
        cls, name: str, parameter: nn.Parameter, group: Settings, moments: list[str], places: Iterator[Tensor]
    ) -> ResidentParameter:
        """Build it from `places`, two per tensor."""
        return cls(
            name,
            parameter,
            group,
            moments,
            [_Slots(next(places), next(places)) for _ in range(1 + len(moments))],
        )

    def values(self, state: Mapping[str, Any]) -> list[Tensor]:
        """Return the weight, and the moments that exist."""
        found = [state.get(name) for name in self.moments]
        return [local(self.parameter).detach(), *(local(each) for each in found if each is not None)]


class ResidentSlots:
    """Copies on SSD of all resident parameters, written after each step.

    Args:
        parameters: All that the optimizer trains on the device.
        optimizer: Updates them.
    """

    def __init__(self, parameters: list[ResidentParameter], optimizer: Optimizer) -> None:
        self._resident_parameters, self._optimizer = parameters, optimizer
        self._own: list[Tensor] = []

    @property
    def n_bytes(self) -> int:
        """Bytes on SSD."""
        return sum(2 * slots.current.nbytes for each in self._resident_parameters for slots in each.slots)

    def _state(self, each: ResidentParameter) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._optimizer.state.get(each.parameter, {})
        return found

    def require_known(self, others: set[nn.Parameter]) -> None:
        """Check that the optimizer trains no parameters but these and `others`.

        Raises:
            ApplyError: A parameter was added after `apply`, so it would not be kept.
        """
        known = others | {each.parameter for each in self._resident_parameters}
        new = [
            p
            for group in self._optimizer.param_groups
            for p in group["params"]
            if p.requires_grad and p not in known
        ]
        if new:
            raise ApplyError(
                f"{len(new)} parameters were added to the optimizer or made trainable after apply, and"
                " would not be kept.",
                evidence=f"Shapes: {', '.join(str(tuple(each.shape)) for each in new[:3])}.",
                fix="make all parameters trainable before memtune.apply, or set  resume: checkpoint",
                code="MT318",
            )

    @torch.no_grad()
    def write(self) -> None:
        """Write all resident parameters and wait for the writes."""
        in_flight: deque[tuple[Tensor, Tensor]] = deque()  # (on SSD, on the host)
        for each in self._resident_parameters:
            for slots, value in zip(each.slots, each.values(self._state(each)), strict=False):
                if len(in_flight) == WRITES_IN_FLIGHT:
                    # The oldest one: writes complete in order, and its host copy is freed with it.
                    ssd_tensors.written(in_flight.popleft()[0])
                host = torch.ops.memtune.to_host(value)
                mark(host, HOST)
                torch.ops.memtune.write_ssd_(slots.next, host)
                in_flight.append((slots.next, host))
                # The queue alone holds it, so that it is freed when its write has been awaited.
                del host
        for ssd, _ in in_flight:
            ssd_tensors.written(ssd)

    def facts(self) -> list[Any]:
        """Return names, shapes, dtypes and moments; a run resumes only from equal facts."""
        return [
            [e.name, list(local(e.parameter).shape), str(e.parameter.dtype), e.moments]
            for e in self._resident_parameters
        ]

    def holders(self) -> list[Tensor]:
        """Return both slots of all tensors."""
        return [
            place
            for each in self._resident_parameters
            for slots in each.slots
            for place in (slots.current, slots.next)
        ]

    def extents(self) -> list[Extent]:
        """Return the extents that `write` has written."""
        place = ssd_tensors.current()
        return [place.extent(slots.next) for each in self._resident_parameters for slots in each.slots]

    def counters(self) -> list[float | None]:
        """Return each parameter's step count, None if its state has none."""
        return [
            None if (step := self._state(each).get("step")) is None else float(step)
            for each in self._resident_parameters
        ]

    def have_moments(self) -> list[bool]:
        """Return for each parameter whether the optimizer has made its moments."""
        return [len(each.values(self._state(each))) == len(each.slots) for each in self._resident_parameters]

    def complete(self) -> None:
        """Let the next step write the other slots."""
        for each in self._resident_parameters:
            for slots in each.slots:
                slots.complete()

    @torch.no_grad()
    def resume_from(
        self,
        pieces: Sequence[Extent],
        counters: Sequence[float | None],
        have_moments: Sequence[bool],
        file: int,
    ) -> None:
        """Read the tensors in `file`, write them to the own slots, and copy them to the device.

        Optimizer state is created, not overwritten: undoing `apply` restores the state that was there.
        """
        self._own = [each.slots[0].current for each in self._resident_parameters]
        extents = iter(pieces)
        for each, counter, has_moments in zip(self._resident_parameters, counters, have_moments, strict=True):
            weight, *moments = ((slots, next(extents)) for slots in each.slots)
            _copy_to_device(local(each.parameter).detach(), copy_to_slot(weight[1], weight[0].next, file))
            state: Settings = {}
            if counter is not None:
                on = (
                    each.parameter.device if each.group.get("fused") else torch.device("cpu")
                )  # the device that torch uses
                state["step"] = torch.tensor(counter, dtype=torch.float32, device=on)
            for name, (slots, extent) in zip(each.moments, moments if has_moments else (), strict=False):
                state[name] = torch.zeros_like(each.parameter)
                _copy_to_device(local(state[name]), copy_to_slot(extent, slots.next, file))
            if state:
                self._optimizer.state[each.parameter] = state

    @torch.no_grad()
    def back(self) -> None:
        """Restore the weights from before the resume."""
        for each, own in zip(self._resident_parameters, self._own, strict=False):
            _copy_to_device(local(each.parameter).detach(), own)


class ExpertSlots:
    """Experts and resident parameters, as slots of `ssd.last_step`.

    Args:
        experts: Slots of the experts' records.
        pieces: The same records.
        resident: All other trained parameters.
        missed: Updates that experts have missed; a resume replaces its contents.
    """

    def __init__(
        self, experts: RecordSlots, pieces: list[Piece], resident: ResidentSlots, missed: Missed
    ) -> None:
        self._experts, self._pieces, self._resident_slots, self._missed = experts, pieces, resident, missed

    def facts(self) -> list[Any]:
        """Return the facts of both."""
        return [self._experts.facts(), self._resident_slots.facts()]

    def look(self, key: str, manifests: list[Manifest]) -> None:
        """Do nothing: all is in the run's folder."""

    def holders(self) -> object:
        """Return the slots of both."""
        return [self._experts.holders(), self._resident_slots.holders()]

    def durable(self) -> Durable:
        """Return extents of experts, then of resident parameters, with missed updates and existing moments as
        notes.
        """
        pieces, counters, folders, _ = self._experts.durable()
        notes = {
            "made": self._resident_slots.have_moments(),
            **_run_length_encode(self._pieces, self._missed),
        }
        return Durable(
            pieces + self._resident_slots.extents(),
            counters + self._resident_slots.counters(),
            folders,
            notes,
        )

    def complete(self) -> None:
        """Let the next step write the other slots of both."""
        self._experts.complete()
        self._resident_slots.complete()

    def resume_from(self, run: DeadRun, manifest: Manifest) -> None:
        """Resume experts, resident parameters and missed updates.

        Raises:
            EnvironmentFault: Something cannot be read back as it was written; names the parameter.
        """
        count = len(self._pieces)
        mine = replace(manifest, pieces=manifest.pieces[:count], counters=manifest.counters[:count])
        self._experts.resume_from(run, mine)
        with tensors_of(run, manifest.step) as file:
            self._resident_slots.resume_from(
                manifest.pieces[count:], manifest.counters[count:], manifest.notes["made"], file
            )
        self._missed.clear()
        self._missed.update(_run_length_decode(self._pieces, manifest.notes))

    def back(self) -> None:
        """Restore both; nothing was missed before the resume."""
        self._missed.clear()
        self._experts.back()
        self._resident_slots.back()

    def forget(self) -> None:
        """Do nothing: all is removed with the run's folder."""

    def remove_before(self) -> None:
        """Do nothing, as in `forget`."""

    def release_before(self) -> None:
        """Do nothing, as in `forget`."""


def _run_length_encode(
    pieces: Sequence[Piece], missed: Mapping[nn.Parameter, list[Settings]]
) -> dict[str, Any]:
    """Return all settings once, and for each record the runs (first, count) of those that it missed.

    Mostly a record missed the last few steps, which are one run.
    """
    number: dict[int, int] = {}
    settings: list[Settings] = []
    runs: dict[str, list[list[int]]] = {}
    missing = [(index, missed[piece.device]) for index, piece in enumerate(pieces) if piece.device in missed]
    for index, each in sorted(
        missing, key=lambda of: -len(of[1])
    ):  # the record that missed most sees all settings in order
        mine = runs.setdefault(str(index), [])
        for one in each:
            at = number.setdefault(id(one), len(number))  # settings of one step are one object
            if at == len(settings):
                settings.append({name: _plain(one[name]) for name in _READ if name in one})
            if mine and sum(mine[-1]) == at:
                mine[-1][1] += 1
            else:
                mine.append([at, 1])
    return {"settings": settings, "missed": runs}


def _run_length_decode(pieces: Sequence[Piece], notes: Mapping[str, Any]) -> Missed:
    settings, runs = notes["settings"], notes["missed"]
    return {
        pieces[int(index)].device: [
            settings[at] for first, count in mine for at in range(first, first + count)
        ]
        for index, mine in runs.items()
    }


def _plain(value: Any) -> Any:
    return [float(each) for each in value] if isinstance(value, (tuple, list)) else float(value)


def _copy_to_device(current: Tensor, host: Tensor) -> None:
    torch.ops.memtune.copy_to_device_(current, host)
