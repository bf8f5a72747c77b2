"""Experts of a model (mixture of experts), and which of them host memory holds: for
`offload.experts.expert_offload` and its pass.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from memtune.program import DECAY, Rule, Step, Units, columns_of, order_of_use, window

if TYPE_CHECKING:
    from torch import nn

Shape = tuple[int, ...]


class Expert(NamedTuple):
    """One of several equal modules in a block."""

    block: int
    name: str
    """Of the module."""
    parameters: Units
    """Indices among the model's parameters."""


def find_experts(
    names: Sequence[str], shapes: Sequence[Shape], block_of: Sequence[int]
) -> tuple[Expert, ...]:
    """Modules in a list whose name says `experts`, inside a block, two or more of them and all with the same
    parameters.

    Args:
        names: Qualified names of the model's parameters.
        shapes: Of each.
        block_of: The block that holds each, -1 for none.
    """
    found: dict[tuple[int, str], dict[str, list[tuple[str, Shape, int]]]] = {}
    for index, (name, shape, block) in enumerate(zip(names, shapes, block_of, strict=True)):
        if block >= 0 and (split := _split(name)) is not None:
            path, number, rest = split
            found.setdefault((block, path), {}).setdefault(number, []).append((rest, shape, index))
    experts = []
    for (block, path), members in found.items():
        kinds = {tuple((rest, shape) for rest, shape, _ in each) for each in members.values()}
        if len(members) > 1 and len(kinds) == 1:
            experts += [
                Expert(block, f"{path}.{n}", tuple(index for *_, index in each))
                for n, each in members.items()
            ]
    return tuple(sorted(experts, key=lambda expert: expert.block))


def experts_of(model: nn.Module, blocks: Sequence[str]) -> tuple[Expert, ...]:
    """The experts of a live model with these blocks; indices are into `model.parameters()`."""
    block_of = {id(p): i for i, name in enumerate(blocks) for p in model.get_submodule(name).parameters()}
    named = list(model.named_parameters())
    shapes = [tuple(parameter.shape) for _, parameter in named]
    return find_experts(
        [name for name, _ in named], shapes, [block_of.get(id(parameter), -1) for _, parameter in named]
    )


def is_in_expert(name: str) -> bool:
    """Return True if the parameter `name` is in a list of experts: not every sample, and so not every rank,
    uses it.
    """
    return _split(name) is not None


def _split(name: str) -> tuple[str, str, str] | None:
    """Path of the list, number in it, and the rest of a parameter's name; None where it is in no list of
    experts.
    """
    parts = name.split(".")
    for i in range(1, len(parts) - 1):
        if parts[i].isdigit() and "expert" in parts[i - 1]:
            return ".".join(parts[:i]), parts[i], ".".join(parts[i + 1 :])
    return None


class HostCache:
    """Cache of experts in host memory; without room, the expert of the smallest value is evicted.

    Least often used recently (LFU with decay), used longest ago (LRU), or used again last of all (Belady, for
    the order of blocks, which is known; which of a block's experts are used is not).

    Args:
        slots: Experts that there is room for.
        rule: Which one goes.
        block_of: The block of each expert.
        uses: (blocks,) the moments in which each block's experts are used, as `moments_of` says.
    """

    def __init__(self, slots: int, rule: Rule, block_of: Sequence[int], uses: Sequence[Units]) -> None:
        self.slots, self._rule, self._block_of, self._uses = slots, rule, block_of, uses
        self.held: dict[int, None] = {}
        self._count: dict[int, float] = {}
        self._last: dict[int, int] = {}
        self._clock = 0

    def take(self, expert: int, moment: int) -> tuple[bool, int | None]:
        """It comes in where it is not there: whether it does, and which one goes for it."""
        if expert in self.held:
            return False, None
        gone = None
        if len(self.held) == self.slots:
            gone = min(self.held, key=lambda each: (*self._value(each, moment), each))
            del self.held[gone]
        self.held[expert] = None
        return True, gone

    def use(self, expert: int) -> None:
        """Count a use."""
        self._clock += 1
        since = self._clock - self._last.get(expert, self._clock)
        self._count[expert] = self._count.get(expert, 0.0) * DECAY**since + 1.0
        self._last[expert] = self._clock

    def _value(self, expert: int, moment: int) -> tuple[float, ...]:
        if self._rule == "belady":
            uses, period = self._uses[self._block_of[expert]], 2 * len(self._uses) + 1
            return (
                -min((use - moment - 1) % period for use in uses),
                -expert,
            )  # within a block, in their order
        last = self._last.get(expert, self._clock)  # one that is read ahead is as good as used
        if self._rule == "lru":
            return (last,)
        return (self._count.get(expert, 1.0) * DECAY ** (self._clock - last), last)


def moments_of(blocks: int, on_device: int, gathered: bool = False) -> tuple[Units, ...]:
    """(blocks,) the moments in which a block's experts are wanted on the host: to come to the device, and to
    be updated.

    `gathered` is as in `order_of_use`.
    """
    loads = window(blocks, min(on_device, blocks), gathered=gathered).loads
    return tuple(
        (*(m for m, units in enumerate(loads) if block in units), 2 * blocks - block)
        for block in range(blocks)
    )


def read_ahead(
    moment: int,
    ahead: int,
    slots: int,
    forward: Sequence[Sequence[int]],
    back: Sequence[Sequence[int]],
    gathered: bool = False,
) -> list[int]:
    """Experts that are read when `moment` begins: of blocks used in the `prefetch` moments after it, as many
    as there is room for.

    Args:
        moment: The one that begins.
        ahead: Moments.
        slots: Experts that host memory has room for, those of the moment included.
        forward: (blocks,) experts that each block's forward is thought to use.
        back: (blocks,) experts that its backward uses.
        gathered: As in `order_of_use`.
    """
    blocks = len(forward)
    used = [
        () if block < 0 else (forward if at < blocks else back)[block]
        for at, block in enumerate(order_of_use(blocks, gathered=gathered))
    ]
    if moment >= len(used):
        return []
    wanted: dict[int, None] = {}
    for each in used[moment : moment + 1 + ahead]:
        wanted.update(dict.fromkeys(each))
    now = set(used[moment])
    return [expert for expert in list(wanted)[:slots] if expert not in now]


class ExpertTraffic(NamedTuple):
    """Experts that are written to and read from SSD when a moment begins, in their order."""

    written: Units
    read: Units
    room_for: Units
    """For which expert each one that is written goes; none at the end of a step, where all stay."""


def trace(
    block_of: Sequence[int],
    blocks: int,
    slots: int,
    rule: Rule,
    ahead: int,
    on_device: int,
    gathered: bool = False,
    keeps: bool = False,
) -> tuple[ExpertTraffic, ...]:
    """(moments,) what crosses to and from SSD in a steady step in which every expert is used, by the rules of
    `offload.experts.expert_offload`.

    Args:
        block_of: The block of each expert, ascending.
        blocks: How many there are.
        slots: Experts that host memory has room for.
        rule: Which one goes.
        ahead: Moments by which experts are read ahead.
        on_device: Blocks whose experts are on the device at once.
        gathered: As in `order_of_use`.
        keeps: All that has changed is written at the end of the step, which is one moment more.
    """
    cache, members = (
        HostCache(slots, rule, block_of, moments_of(blocks, on_device, gathered)),
        _members(block_of, blocks),
    )
    residency, dirty = window(blocks, min(on_device, blocks), gathered=gathered), set[int]()
    found: list[ExpertTraffic] = []
    for _ in range(3):  # what the first steps find is not what later ones do
        found = []
        for moment in range(2 * blocks + 1):
            written: list[tuple[int, int]] = []
            read: list[int] = []

            def bring(
                expert: int,
                moment: int = moment,
                written: list[tuple[int, int]] = written,
                read: list[int] = read,
            ) -> None:
                comes, gone = cache.take(expert, moment)
                if gone is not None and gone in dirty:
                    dirty.discard(gone)
                    written.append((gone, expert))
                if comes:
                    read.append(expert)

            for expert in (each for block in residency.loads[moment] for each in members[block]):
                bring(expert)
                cache.use(expert)
            if moment > blocks:
                for expert in members[2 * blocks - moment]:
                    bring(expert)
                    cache.use(expert)
                    dirty.add(expert)
            for expert in read_ahead(moment, ahead, slots, members, members, gathered):
                bring(expert)
            found.append(
                ExpertTraffic(
                    tuple(gone for gone, _ in written), tuple(read), tuple(expert for _, expert in written)
                )
            )
        if keeps:
            found.append(ExpertTraffic(tuple(expert for expert in cache.held if expert in dirty), (), ()))
            dirty.clear()
    return tuple(found)


def _members(block_of: Sequence[int], blocks: int) -> list[list[int]]:
    return [[expert for expert, block in enumerate(block_of) if block == each] for each in range(blocks)]


def experts_in(step: Step) -> tuple[Expert, ...]:
    """The experts that are trained; indices are into `step.parameters`."""
    gradient = columns_of(step.parameters).gradient
    return tuple(each for each in _all_in(step) if all(gradient[index] >= 0 for index in each.parameters))


def frozen_in(step: Step) -> str:
    """Name of a parameter of an expert that is not trained, empty where there is none."""
    columns = columns_of(step.parameters)
    frozen = (index for each in _all_in(step) for index in each.parameters if columns.gradient[index] < 0)
    return next((columns.names[index] for index in frozen), "")


def _all_in(step: Step) -> tuple[Expert, ...]:
    columns = columns_of(step.parameters)
    if not any("expert" in name for name in columns.names):
        return ()
    return _found(columns.names, columns.shapes, tuple(columns.block.tolist()))


@functools.lru_cache(maxsize=32)
def _found(
    names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], blocks: tuple[int, ...]
) -> tuple[Expert, ...]:
    return find_experts(names, shapes, blocks)
