"""Plans of TSPLIT for one program and budget: the planner's choice, what it becomes in the program, and
whether that fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Annotated, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from memtune.activations.offload import OffloadClaim, PlanResult, Problem, move_activations, solve
from memtune.activations.tiling import PositionWise, position_wise, split_regions
from memtune.errors import ApplyError
from memtune.program import I64, INPUTS, OpAddress, Program, RankClass, Step, remembered
from memtune.search_spaces._plan_fields import Bytes, CallSetField, Index, require_entries
from memtune.search_spaces.offload.activations._tsplit_options import (
    Decisions,
    Split,
    calls_in_parts,
    decisions,
)
from memtune.search_spaces.recompute._block_planner import after_later, live_bytes, windows
from memtune.technique import Plan, Technique

if TYPE_CHECKING:
    from memtune.hardware import Hardware

_TRIES = 6
"""Plans that are rewritten in search of one whose true peak is within the budget."""
_SURE = 1.02
"""By so much the planner's prices may be above what the passes say."""


class Told(BaseModel):
    """What a plan comes to, for `explain`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    peak_bytes: Bytes
    """Peak of the whole program after every later pass."""
    plain_bytes: Bytes
    """The same without this technique."""
    moved_bytes: Bytes
    """Bytes that are offloaded in a micro-batch."""
    added_s: float
    """Seconds that a micro-batch takes longer."""


class TsplitPlan(Plan):
    """Which calls' saved tensors are offloaded, and which modules run in parts."""

    moved: tuple[CallSetField, ...]
    """The different sets of calls whose saved outputs are offloaded."""
    blocks: tuple[Index, ...]
    """(blocks,) entry of `moved` that each block has."""
    split: dict[str, Annotated[int, Field(ge=2, le=16)]]
    """Module → number of parts."""
    ahead: Annotated[int, Field(ge=0, le=16)]
    """Tensors that are prefetched."""
    told: Told | None = None
    """What that comes to; none where nothing was planned."""

    @model_validator(mode="after")
    def _has_entries(self) -> Self:
        require_entries("moved", self.moved, self.blocks)
        return self


@dataclass(frozen=True)
class How:
    """What the planner may do."""

    parts: tuple[int, ...]
    min_bytes: int
    ahead: int


@dataclass(frozen=True, eq=False)
class Solved:
    """A plan, and what the program needs under it."""

    plan: TsplitPlan
    peak_bytes: int
    """Of the whole program after every later pass."""
    plain_bytes: int
    budget_bytes: int
    is_floor: bool = False
    """Nothing was planned: any plan's peak is at least that."""

    @property
    def is_within(self) -> bool:
        """Whether the budget is met."""
        return self.peak_bytes <= self.budget_bytes


@lru_cache(maxsize=64)
def solved(
    step: Step,
    later: tuple[Technique, ...],
    hardware: Hardware,
    ranks: int,
    micro_batch: int,
    accumulate: int,
    budget_bytes: int | None,
    share: float | None,
    how: How,
) -> Solved:
    """The plan for a budget in bytes, or for a share of the way from the smallest peak to the plain one;
    `fits` and `plan` ask.

    The planner prices moments, the passes have the last word: where the rewritten program, after every later
    pass, is above the budget, the planner is given as much less. What nothing meets with tensors that come
    back ahead, it tries without.
    """
    program = Program((RankClass(ranks, step),), micro_batch, accumulate)
    run = _Run(step, later, hardware, program, how)
    plain = run.plain_bytes
    if budget_bytes is None:
        least = min((each.solved(0) for each in run.and_without_ahead()), key=lambda each: each.peak_bytes)
        budget_bytes = least.peak_bytes + round((plain - least.peak_bytes) * (share or 0.0))
        if not share:
            return replace(least, budget_bytes=budget_bytes)
    if plain <= budget_bytes:
        return run.nothing(plain, budget_bytes)
    best = None
    for each in run.and_without_ahead():
        found = replace(_in_budget(each, budget_bytes), budget_bytes=budget_bytes)
        if best is None or found.peak_bytes < best.peak_bytes:
            best = found
        if best.is_within:
            break
    assert best is not None
    return best


def _in_budget(run: _Run, budget_bytes: int) -> Solved:
    """The plan whose true peak is within the budget, or the smallest one."""
    if run.floor_bytes > budget_bytes * _SURE:  # the planner would try everything to find out
        return replace(run.nothing(run.floor_bytes, budget_bytes), is_floor=True)
    aim, before = budget_bytes, run.plain_bytes
    for _ in range(_TRIES):
        found = run.solved(aim)
        if found.peak_bytes <= budget_bytes or found.peak_bytes == before:  # nothing is left to do
            return found
        aim, before = aim - (found.peak_bytes - budget_bytes), found.peak_bytes
    return run.solved(0)


class _Run:
    """One step under one set of later techniques."""

    def __init__(
        self,
        step: Step,
        later: tuple[Technique, ...],
        hardware: Hardware,
        program: Program,
        how: How,
    ) -> None:
        self.step, self.hardware, self._later, self._program, self._how = step, hardware, later, program, how
        self._after_plain = self._after(step)
        self.plain_bytes = int(live_bytes(self._after_plain, hardware).max(initial=0))

    def and_without_ahead(self) -> Iterator[_Run]:
        """This one, then one whose tensors come back when they are asked for."""
        yield self
        if self._how.ahead:
            yield _Run(self.step, self._later, self.hardware, self._program, replace(self._how, ahead=0))

    @cached_property
    def _decisions(self) -> Decisions:
        how = self._how
        return decisions(
            self.step, self.hardware, self._program.ranks, how.min_bytes, how.parts, ahead=how.ahead > 0
        )

    @cached_property
    def _problem(self) -> Problem:
        return self._decisions.problem(self._timeline())

    @property
    def floor_bytes(self) -> int:
        """No plan has a smaller peak, as the planner sees it."""
        return self._problem.floor_bytes

    def nothing(self, peak_bytes: int, budget_bytes: int) -> Solved:
        """No action at all, under a peak that is not its own where there is no use in planning."""
        plan = Decided([frozenset()] * len(self.step.blocks), {}, 0).to_plan()
        return Solved(plan, peak_bytes, self.plain_bytes, budget_bytes)

    def peak_bytes(self, step: Step) -> int:
        """Of `step` after every later pass."""
        return int(live_bytes(self._after(step), self.hardware).max(initial=0))

    def solved(self, aim_bytes: int) -> Solved:
        """What the planner finds for a budget, and its true peak."""
        found = solve(self._problem, aim_bytes)
        chosen = Decided(*_chosen(self.step, self._decisions, found), self._how.ahead)
        new = rewritten(self.step, chosen, self._how.min_bytes)
        peak = self.peak_bytes(new)
        told = Told(
            peak_bytes=peak,
            plain_bytes=self.plain_bytes,
            moved_bytes=_moved_bytes(new),
            added_s=round(found.added_s, 9),
        )
        return Solved(chosen.to_plan(told), peak, self.plain_bytes, aim_bytes)

    def _after(self, step: Step) -> Step:
        return after_later(self._program.with_step(step), self._later, self.hardware).step

    def _timeline(self) -> I64:
        """(n,) live bytes, in every window between blocks as much more as later passes make its most."""
        live, after = live_bytes(self.step, self.hardware), self._after_plain
        if after is self.step:
            return live
        order = np.arange(len(self.step.blocks), dtype=np.int32)
        mine, theirs = windows(self.step, order), windows(after, order)
        more = np.maximum.reduceat(live_bytes(after, self.hardware), theirs) - np.maximum.reduceat(live, mine)
        found: I64 = live + np.repeat(more, np.diff(np.append(mine, self.step.ops.n)))
        return found


def _moved_bytes(step: Step) -> int:
    copies = np.asarray([name == "memtune.to_host.default" for name in step.names], bool)[step.ops.name]
    return int(step.ops.traffic_bytes[copies].sum())


def _chosen(
    step: Step, made: Decisions, found: PlanResult
) -> tuple[list[frozenset[OpAddress]], dict[str, int]]:
    """Calls that move, by block, and modules that are split, from the planner's choice."""
    taken = [(each, number) for each, number in zip(made.of, found.choice, strict=True) if number]
    split = [(each.region, each.parts[number - 1]) for each, number in taken if isinstance(each, Split)]
    calls: list[frozenset[OpAddress]] = []
    for block in range(len(step.blocks)):
        mine = {
            region.forward[0]: (region, parts)
            for region, parts in split
            if step.ops.block[region.forward[0]] == block
        }
        ops = {each.op for each, _ in taken if not isinstance(each, Split) and each.block == block}
        for region, _ in mine.values():
            ops |= set(region.forward) & _saving(step, region)
        address = calls_in_parts(step, block, mine) if ops else {}
        calls.append(frozenset().union(*(frozenset([INPUTS]) if op < 0 else address[op] for op in ops)))
    return calls, {region.module: parts for region, parts in split}


def _saving(step: Step, region: PositionWise) -> set[int]:
    """Ops whose outputs the module saves."""
    return set(step.storages.producer[step.saves.storage[list(region.saves)]].tolist())


@dataclass(frozen=True)
class Decided:
    """What a plan says."""

    moved: list[frozenset[OpAddress]]
    """Calls whose saved outputs move, by block."""
    split: dict[str, int]
    """Module → into how many parts."""
    ahead: int
    """Tensors that come back before they are asked for."""

    def to_plan(self, told: Told | None = None) -> TsplitPlan:
        """Return the plan that says this; blocks that are alike share an entry."""
        different = tuple(dict.fromkeys(self.moved))
        blocks = tuple(different.index(each) for each in self.moved)
        return TsplitPlan(moved=different, blocks=blocks, split=self.split, ahead=self.ahead, told=told)

    @classmethod
    def of(cls, plan: TsplitPlan, blocks: int) -> Decided:
        """Return what `plan` says of a model of `blocks` blocks.

        Raises:
            ApplyError: The plan is for another number of blocks.
        """
        if len(plan.blocks) != blocks:
            raise _of_another(f"The config's is for {len(plan.blocks)} blocks, the model has {blocks}.")
        return cls([plan.moved[i] for i in plan.blocks], plan.split, plan.ahead)


def rewritten(step: Step, decided: Decided, min_bytes: int) -> Step:
    """`step` with modules in parts, copies out after each save, and copies back."""
    return _moved(
        _in_parts(step, tuple(sorted(decided.split.items()))), tuple(decided.moved), min_bytes, decided.ahead
    )


@remembered
def _in_parts(step: Step, split: tuple[tuple[str, int], ...]) -> Step:
    parts = dict(split)
    regions = [each for each in position_wise(step) if each.module in parts]
    return split_regions(step, regions, [parts[each.module] for each in regions]) if regions else step


@remembered
def _moved(step: Step, moved: tuple[frozenset[OpAddress], ...], min_bytes: int, ahead: int) -> Step:
    """Many budgets have one plan, and what was planned with is made again when it is chosen: the same step,
    not an equal one.
    """
    claims = [OffloadClaim(i, 1.0, min_bytes, calls) for i, calls in enumerate(moved) if calls]
    return move_activations(step, claims, ahead=ahead)


def _of_another(evidence: str) -> ApplyError:
    return ApplyError(
        "offload.activations: {kind: tsplit} needs a plan of which tensors move.",
        evidence=evidence,
        fix="memtune search  writes it with the config; or choose copy_out",
        code="MT316",
    )
