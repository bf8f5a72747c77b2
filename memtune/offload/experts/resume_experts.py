"""What is kept of a step where experts are on SSD: their pieces, what they have missed, and all else that is
trained.

Three rules on top of those of `ssd.last_step`:

Rule 1. When the optimizer has stepped, every expert that has changed is written from the cache; those that
the step did not use
        are not touched. What they have missed by then is in the manifest, and is made up for after it is
        taken up, too.
Rule 2. What stays on the device has two places on SSD as well, for its weight and for each moment; all of it
is written when
        experts are, a tensor after the other, `WRITES_IN_FLIGHT` at a time.
Rule 3. Replicas use different experts, so one may write some (that were late) before it has summed gradients
with the others:
        none goes on before all have kept the step.
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
"""The settings of each update that a parameter has missed, oldest first; those of one step and group are one
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
    """A tensor's place as after the last complete step, and the one that is written next."""

    there: Tensor
    next: Tensor

    def complete(self) -> None:
        """They take turns."""
        self.there, self.next = self.next, self.there


@dataclass(eq=False)
class Staying:
    """A parameter that stays on the device, and its places on SSD."""

    name: str
    parameter: nn.Parameter
    group: Settings
    moments: list[str]
    slots: list[_Slots]
    """Of the weight, then of each moment."""

    @classmethod
    def of(
        cls, name: str, parameter: nn.Parameter, group: Settings, moments: list[str], places: Iterator[Tensor]
    ) -> Staying:
        """`places` are twice as many as weight and moments."""
        return cls(
            name,
            parameter,
            group,
            moments,
            [_Slots(next(places), next(places)) for _ in range(1 + len(moments))],
        )

    def values(self, state: Mapping[str, Any]) -> list[Tensor]:
        """The weight, and the moments where the optimizer has made them."""
        found = [state.get(name) for name in self.moments]
        return [local(self.parameter).detach(), *(local(each) for each in found if each is not None)]


class KeptBeside:
    """What stays on the device, of which a copy is on SSD after each step.

    Args:
        staying: All that the optimizer trains there.
        optimizer: Updates it.
    """

    def __init__(self, staying: list[Staying], optimizer: Optimizer) -> None:
        self._staying, self._optimizer = staying, optimizer
        self._own: list[Tensor] = []

    @property
    def n_bytes(self) -> int:
        """On SSD."""
        return sum(2 * slots.there.nbytes for each in self._staying for slots in each.slots)

    def _state(self, each: Staying) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._optimizer.state.get(each.parameter, {})
        return found

    def require_known(self, others: set[nn.Parameter]) -> None:
        """Check that the optimizer trains nothing but this and `others`.

        Raises:
            ApplyError: Something was added since, which nobody keeps.
        """
        known = others | {each.parameter for each in self._staying}
        new = [
            p
            for group in self._optimizer.param_groups
            for p in group["params"]
            if p.requires_grad and p not in known
        ]
        if new:
            raise ApplyError(
                f"{len(new)} parameters were added to the optimizer after apply, or are trained since, and"
                " would not be kept.",
                evidence=f"Shapes: {', '.join(str(tuple(each.shape)) for each in new[:3])}.",
                fix="let all be trained before memtune.apply, or  resume: checkpoint",
                code="MT318",
            )

    @torch.no_grad()
    def write(self) -> None:
        """Rule 2; on SSD when this returns."""
        under_way: deque[tuple[Tensor, Tensor]] = deque()  # (on SSD, on the host)
        for each in self._staying:
            for slots, value in zip(each.slots, each.values(self._state(each)), strict=False):
                if len(under_way) == WRITES_IN_FLIGHT:
                    ssd_tensors.written(under_way.popleft()[0])
                host = torch.ops.memtune.to_host(value)
                mark(host, HOST)
                torch.ops.memtune.write_ssd_(slots.next, host)
                under_way.append((slots.next, host))
                del host
        for ssd, _ in under_way:
            ssd_tensors.written(ssd)

    def facts(self) -> list[Any]:
        """As `resume.Kept` has them."""
        return [
            [e.name, list(local(e.parameter).shape), str(e.parameter.dtype), e.moments] for e in self._staying
        ]

    def holders(self) -> list[Tensor]:
        """Both places of all."""
        return [
            place for each in self._staying for slots in each.slots for place in (slots.there, slots.next)
        ]

    def extents(self) -> list[Extent]:
        """Where `write` has written."""
        place = ssd_tensors.current()
        return [place.extent(slots.next) for each in self._staying for slots in each.slots]

    def counters(self) -> list[float | None]:
        """Steps that each one's state counts, None where it counts none."""
        return [
            None if (step := self._state(each).get("step")) is None else float(step) for each in self._staying
        ]

    def made(self) -> list[bool]:
        """Whether the optimizer has made its moments."""
        return [len(each.values(self._state(each))) == len(each.slots) for each in self._staying]

    def complete(self) -> None:
        """The next step writes the other places."""
        for each in self._staying:
            for slots in each.slots:
                slots.complete()

    @torch.no_grad()
    def take_up(
        self, pieces: Sequence[Extent], counters: Sequence[float | None], made: Sequence[bool], file: int
    ) -> None:
        """Read what is in `file`, write it to the own places, and put it on the device.

        State is made anew, not overwritten: whoever takes `apply` back has what was there.
        """
        self._own = [each.slots[0].there for each in self._staying]
        extents = iter(pieces)
        for each, counter, has_moments in zip(self._staying, counters, made, strict=True):
            weight, *moments = ((slots, next(extents)) for slots in each.slots)
            _up(local(each.parameter).detach(), copy_to_slot(weight[1], weight[0].next, file))
            state: Settings = {}
            if counter is not None:
                on = (
                    each.parameter.device if each.group.get("fused") else torch.device("cpu")
                )  # as torch makes it
                state["step"] = torch.tensor(counter, dtype=torch.float32, device=on)
            for name, (slots, extent) in zip(each.moments, moments if has_moments else (), strict=False):
                state[name] = torch.zeros_like(each.parameter)
                _up(local(state[name]), copy_to_slot(extent, slots.next, file))
            if state:
                self._optimizer.state[each.parameter] = state

    @torch.no_grad()
    def back(self) -> None:
        """Weights as they were before `take_up`."""
        for each, own in zip(self._staying, self._own, strict=False):
            _up(local(each.parameter).detach(), own)


class KeptExperts:
    """Experts and what stays beside them, as `resume.Kept` has it.

    Args:
        experts: Weights and moments of the experts' parameters.
        pieces: The same.
        beside: All else that is trained.
        missed: Updates that experts have missed; what is taken up is put there.
    """

    def __init__(self, experts: RecordSlots, pieces: list[Piece], beside: KeptBeside, missed: Missed) -> None:
        self._experts, self._pieces, self._beside, self._missed = experts, pieces, beside, missed

    def facts(self) -> list[Any]:
        """Of both."""
        return [self._experts.facts(), self._beside.facts()]

    def look(self, key: str, manifests: list[Manifest]) -> None:
        """All is in the run's folder."""

    def holders(self) -> object:
        """Of both."""
        return [self._experts.holders(), self._beside.holders()]

    def durable(self) -> Durable:
        """Experts first; of experts also what they have missed, of the others whether they have moments."""
        pieces, counters, folders, _ = self._experts.durable()
        notes = {"made": self._beside.made(), **_in_runs(self._pieces, self._missed)}
        return Durable(pieces + self._beside.extents(), counters + self._beside.counters(), folders, notes)

    def complete(self) -> None:
        """Of both."""
        self._experts.complete()
        self._beside.complete()

    def take_up(self, run: DeadRun, manifest: Manifest) -> None:
        """Both, and what experts have missed.

        Raises:
            EnvironmentFault: It cannot be read back as it was written; says whose bytes.
        """
        count = len(self._pieces)
        mine = replace(manifest, pieces=manifest.pieces[:count], counters=manifest.counters[:count])
        self._experts.take_up(run, mine)
        with tensors_of(run, manifest.step) as file:
            self._beside.take_up(
                manifest.pieces[count:], manifest.counters[count:], manifest.notes["made"], file
            )
        self._missed.clear()
        self._missed.update(_out_of_runs(self._pieces, manifest.notes))

    def back(self) -> None:
        """Of both; nothing was missed by then."""
        self._missed.clear()
        self._experts.back()
        self._beside.back()

    def forget(self) -> None:
        """All goes with the run's folder."""

    def remove_before(self) -> None:
        """As `forget`."""

    def release_before(self) -> None:
        """As `forget`."""


def _in_runs(pieces: Sequence[Piece], missed: Mapping[nn.Parameter, list[Settings]]) -> dict[str, Any]:
    """All settings once, and for each piece (first, count) of those that it missed: mostly the last few
    steps, in one run.
    """
    number: dict[int, int] = {}
    settings: list[Settings] = []
    runs: dict[str, list[list[int]]] = {}
    late = [(index, missed[piece.device]) for index, piece in enumerate(pieces) if piece.device in missed]
    for index, each in sorted(late, key=lambda of: -len(of[1])):  # who missed most has all in order
        mine = runs.setdefault(str(index), [])
        for one in each:
            at = number.setdefault(id(one), len(number))
            if at == len(settings):
                settings.append({name: _plain(one[name]) for name in _READ if name in one})
            if mine and sum(mine[-1]) == at:
                mine[-1][1] += 1
            else:
                mine.append([at, 1])
    return {"settings": settings, "missed": runs}


def _out_of_runs(pieces: Sequence[Piece], notes: Mapping[str, Any]) -> Missed:
    settings, runs = notes["settings"], notes["missed"]
    return {
        pieces[int(index)].device: [
            settings[at] for first, count in mine for at in range(first, first + count)
        ]
        for index, mine in runs.items()
    }


def _plain(value: Any) -> Any:
    return [float(each) for each in value] if isinstance(value, (tuple, list)) else float(value)


def _up(there: Tensor, host: Tensor) -> None:
    torch.ops.memtune.copy_to_device_(there, host)
