"""The search space.

The techniques that fit each slot, the micro-batches that divide the global batch, and their product.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from memtune.autotune.space.candidates import Choice, Rewriter
from memtune.errors import UsageError
from memtune.search_spaces import PASS_ORDER, SLOTS, did_you_mean, find, kinds, null
from memtune.search_spaces.execution import Execution
from memtune.technique import Exactness, Reason, Target, Technique

ENUMERATE_UP_TO = 6_000
"""Spaces up to this size are scored in full; of larger ones, a sample and the neighbourhood of its best."""
SAMPLE = 1_000
EXECUTION = "execution"
MICRO_BATCH = "execution.micro_batch"
COMPILE = ("execution.compile", "execution.compile_backend")
_ALIASES = {
    "batch": EXECUTION,
    "micro_batch": MICRO_BATCH,
    "compile": COMPILE[0],
    "compile_backend": COMPILE[1],
    "alloc": "allocator",
    "shard": "sharding",
}
_NULL_WITH_RANKS = Reason(
    "ranks that do not average their gradients train different models", "sharding.states: ddp, zero1 or fsdp"
)


@dataclass(frozen=True)
class Space:
    """The executions and, per slot, the techniques (with knobs) to choose from, the default first."""

    executions: tuple[Execution, ...]
    slots: Mapping[str, tuple[Technique, ...]]
    unfit: Mapping[str, Reason]
    """The Reason why a technique (`slot: kind`) is not in the space."""
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Return the number of choices, including equal ones and combinations that do not fit."""
        return len(self.executions) * math.prod(len(each) for each in self.slots.values())

    def __iter__(self) -> Iterator[Choice]:
        """Yield every choice, ordered so that common prefixes of passes are rewritten once."""
        # As `Choice.of`, with the null techniques told apart once for all choices.
        slots = [
            [None if each == null(each.slot) else each for each in techniques]
            for techniques in self._in_pass_order()
        ]
        for execution in self.executions:
            for techniques in itertools.product(*slots):
                yield Choice(execution, tuple(each for each in techniques if each is not None))

    def sample(self, count: int, seed: int, execution: Execution | None = None) -> list[Choice]:
        """Return about `count` distinct choices drawn with `seed` (all if there are no more), in pass order.

        Includes every pair of kinds with default knobs, at `execution` (by default the first), and every
        combination of kinds if there are at most `count`. Choices that differ only in the last pass are drawn
        together, because they need no further program.
        """
        if count >= self.size:
            return list(self)
        axes = self._axes()
        # Passes are memoised by their prefix, so neighbours that differ in the last slot cost one pass each.
        block = len(axes[-1])
        drawn = set(random.Random(seed).sample(range(self.size // block), max(1, count // block)))
        drawn.update(self._default_blocks(axes, count, self.executions.index(execution) if execution else 0))
        return [
            self._choice(axes, index)
            for start in sorted(drawn)
            for index in range(start * block, (start + 1) * block)
        ]

    def around(self, choices: Iterable[Choice]) -> list[Choice]:
        """Return the choices that differ from one of `choices` in the execution or one slot, in order."""
        axes = self._axes()
        found: set[int] = set()
        for choice in choices:
            held = [choice.execution, *(choice.technique(axis[0].slot) for axis in axes[1:])]
            places = [axis.index(each) for axis, each in zip(axes, held, strict=True)]
            for at, axis in enumerate(axes):
                found.update(
                    _number(axes, [*places[:at], other, *places[at + 1 :]]) for other in range(len(axis))
                )
        return [self._choice(axes, number) for number in sorted(found)]

    def _axes(self) -> list[tuple[Any, ...]]:
        return [self.executions, *self._in_pass_order()]

    def _default_blocks(self, axes: list[tuple[Any, ...]], count: int, execution: int) -> Iterator[int]:
        """Yield the numbers of the blocks that combine kinds with their first knobs.

        All combinations, or all pairs with defaults in the other slots.
        """
        firsts: list[list[int]] = [list(range(len(self.executions)))]
        for techniques in axes[1:-1]:
            # Reversed, so that of each kind the first index, that of default knobs, is kept.
            firsts.append(list({each.kind: i for i, each in reversed(list(enumerate(techniques)))}.values()))
        if math.prod(map(len, firsts)) <= count:
            yield from (_number(axes[:-1], places) for places in itertools.product(*firsts))
            return
        for at in itertools.combinations(range(len(firsts)), 2):
            for pair in itertools.product(*(firsts[each] for each in at)):
                places = [execution] + [0] * (len(firsts) - 1)
                places[at[0]], places[at[1]] = pair
                yield _number(axes[:-1], places)

    def _choice(self, axes: list[tuple[Any, ...]], index: int) -> Choice:
        picked: list[Any] = []
        # The last axis is the fastest digit of the number.
        for axis in reversed(axes):
            index, here = divmod(index, len(axis))
            picked.append(axis[here])
        execution, *techniques = reversed(picked)
        return Choice.of(execution, {each.slot: each for each in techniques})

    def parameters(self, choice: Choice) -> dict[str, Any]:
        """Return `choice` as sampler parameters: micro-batch, the kind in each slot, its knobs."""
        values: dict[str, Any] = {"micro_batch": choice.execution.micro_batch}
        for slot, techniques in self.slots.items():
            technique = choice.technique(slot)
            values[slot] = technique.kind
            for knob, choices in knob_values(techniques, technique.kind).items():
                if len(choices) > 1:
                    values[f"{slot}.{technique.kind}.{knob}"] = getattr(technique, knob)
        return values

    def _in_pass_order(self) -> list[tuple[Technique, ...]]:
        return [self.slots[slot] for slot in PASS_ORDER if slot in self.slots]


def _number(axes: Sequence[tuple[Any, ...]], places: Iterable[int]) -> int:
    """Return the position in the product of the choice with these indices on each axis."""
    number = 0
    for axis, place in zip(axes, places, strict=True):
        number = number * len(axis) + place
    return number


def knob_values(techniques: Iterable[Technique], kind: str) -> dict[str, tuple[Any, ...]]:
    """Return the values of the knobs of `kind` among `techniques`, in order of appearance."""
    values: dict[str, dict[Any, None]] = {}
    for technique in techniques:
        if technique.kind == kind:
            for name, value in technique.knobs():
                values.setdefault(name, {})[value] = None
    return {name: tuple(found) for name, found in values.items()}


def variants(technique: type[Technique], target: Target) -> tuple[Technique, ...]:
    """Return `technique` with every combination of knob values worth trying, defaults first."""
    kind = technique.model_fields["kind"].default
    default = technique(kind=kind)
    choices = default.choices_on(target)
    # Defaults stay first, as a search begins with them.
    found = {default: None}
    for values in itertools.product(*choices.values()):
        try:
            made = technique(kind=kind, **dict(zip(choices, values, strict=True)))
        except (
            ValidationError
        ):  # two knobs that exclude each other; each is in the product with another partner
            continue
        if made.is_tried():
            found[made] = None
    return tuple(found)


def executions(
    global_batch: int,
    ranks: int,
    like: Execution = Execution(),  # noqa: B008  # frozen
) -> tuple[Execution, ...]:
    """Return `like` with every micro-batch × accumulation of `global_batch` over `ranks`, the largest
    micro-batch first.

    Raises:
        UsageError: The ranks do not divide the global batch.
    """
    if global_batch % ranks:
        below = global_batch - global_batch % ranks
        near = f"{below} or {below + ranks}" if below else f"{ranks}"
        raise UsageError(
            f"global_batch={global_batch} cannot be shared equally by {ranks} ranks.",
            fix=f"set global_batch to a multiple of {ranks}, for example {near}",
            code="MT123",
        )
    each = global_batch // ranks
    return tuple(
        like.of_size(size, each // size)
        # Largest first: the plain micro-batch, which has the fewest launches, is the default.
        for size in range(each, 0, -1)
        if each % size == 0
    )


def batch_sizes(limit: int) -> tuple[Execution, ...]:
    """Return micro-batches up to `limit` samples, largest first: two in each power of two."""
    sizes = {
        size for power in range(limit.bit_length()) for size in (2**power, 3 * 2**power // 2) if size <= limit
    }
    return tuple(Execution(micro_batch=size) for size in sorted(sizes, reverse=True))


def build_space(
    rewriter: Rewriter,
    global_batch: int,
    *,
    axes: tuple[str, ...] = (),
    freeze: Mapping[str, str] | None = None,
    batch_frozen: Reason | None = None,
    allow_lossy: bool = False,
) -> Space:
    """Build the space for one recording and target.

    Args:
        rewriter: Decides whether a technique fits the plain program.
        global_batch: Samples per optimizer step over all ranks.
        axes: Axes or slots to search (`recompute`, `offload`, `execution`); empty for all.
        freeze: Kind by slot, `micro_batch` by number, or `compile` by scope, that is fixed.
        batch_frozen: Why the micro-batch may not change, if so.
        allow_lossy: Whether techniques that change results may be chosen.

    Raises:
        UsageError: An axis or technique does not exist, or nothing is left to choose from.
    """
    ranks = rewriter.target.ranks
    frozen = {_slot_named(name): value for name, value in (freeze or {}).items()}
    searched = {slot for axis in axes for slot in _slots_of(axis)} if axes else {*SLOTS, EXECUTION}
    notes = [f"micro-batch: frozen, {batch_frozen}"] if batch_frozen else []
    all_executions = tuple(
        each
        for each in executions(global_batch, ranks, rewriter.execution)
        if each.micro_batch not in rewriter.recording.failing
    )
    chosen_executions = _executions(all_executions, frozen, EXECUTION in searched and batch_frozen is None)
    chosen_executions = tuple(_compiled(each, frozen) for each in chosen_executions)

    unfit: dict[str, Reason] = {}
    slots: dict[str, tuple[Technique, ...]] = {}
    for slot in SLOTS:
        if slot in frozen:
            techniques = variants(find(slot, frozen[slot]), rewriter.target)
        elif slot in searched:
            techniques = tuple(
                each for kind in kinds(slot) for each in variants(find(slot, kind), rewriter.target)
            )
        else:
            techniques = _defaults(slot, rewriter.target)
        kept = _fitting(techniques, rewriter, chosen_executions, unfit, allow_lossy)
        if slot not in frozen and slot not in searched:
            # A slot that is not searched has one choice, its default.
            kept = (*kept[:1], *_null_if_partitioned(slot, rewriter.target))
        if not kept:
            raise _none_fits(slot, unfit, is_frozen=slot in frozen)
        slots[slot] = kept
    return Space(chosen_executions, slots, unfit, tuple(notes))


def _none_fits(slot: str, unfit: Mapping[str, Reason], *, is_frozen: bool) -> UsageError:
    refused = {name: reason for name, reason in unfit.items() if name.startswith(slot)}
    ways = dict.fromkeys(each.fix for each in refused.values() if each.fix)
    return UsageError(
        f"No technique for {slot} can be used here.",
        evidence="; ".join(f"{name}: {reason.text}" for name, reason in refused.items()),
        fix="; or ".join([*ways, f"drop --freeze {slot}" if is_frozen else "add the axis to --axes"]),
        code="MT209",
    )


def _fitting(
    techniques: Iterable[Technique],
    rewriter: Rewriter,
    among: tuple[Execution, ...],
    unfit: dict[str, Reason],
    allow_lossy: bool,
) -> tuple[Technique, ...]:
    """Return the techniques that some execution admits."""
    # Refusals that depend on other slots are left to candidates.
    kept: list[Technique] = []
    for technique in techniques:
        reason: Reason | None = None
        if (
            technique == null("sharding.states")
            and rewriter.target.ranks > 1
            and rewriter.target.sharded is None
        ):
            reason = _NULL_WITH_RANKS
        elif technique.exactly() is Exactness.LOSSY and not allow_lossy:
            reason = Reason("it changes results", "allow it with --allow-lossy")
        else:
            refusals = [rewriter.refusal(technique, execution) for execution in among]
            if all(refusals):
                reason = refusals[0]
        if reason is None:
            kept.append(technique)
        else:
            unfit.setdefault(f"{technique.slot}: {technique.kind}", reason)
    fitting = {f"{each.slot}: {each.kind}" for each in kept}
    for name in fitting & unfit.keys():  # another setting of its knobs does fit
        del unfit[name]
    return tuple(kept)


def _executions(
    every: tuple[Execution, ...], frozen: dict[str, str], searched: bool
) -> tuple[Execution, ...]:
    wanted = frozen.get(MICRO_BATCH)
    if wanted is None:
        return every if searched else every[:1]
    found = tuple(each for each in every if str(each.micro_batch) == wanted)
    if not found:
        sizes = [each.micro_batch for each in every if each.micro_batch is not None]
        # A value that is no number is near to the smallest sizes.
        near = sorted(sizes, key=lambda size: abs(size - int(wanted) if wanted.isdigit() else size))[:2]
        raise UsageError(
            f"micro_batch={wanted} does not divide the {sizes[0]} samples of each rank.",
            fix=f"nearest: {' or '.join(map(str, sorted(near)))}",
            code="MT210",
        )
    return found


def _compiled(execution: Execution, frozen: Mapping[str, str]) -> Execution:
    """Return `execution` compiled as requested."""
    asked: dict[str, Any] = {name.rpartition(".")[2]: frozen[name] for name in COMPILE if name in frozen}
    if asked.get("compile") in ("true", "false"):
        asked["compile"] = asked["compile"] == "true"
    try:
        return Execution.model_validate({**execution.model_dump(), **asked})
    except ValidationError:
        given = ", ".join(f"{name}={value}" for name, value in asked.items())
        raise UsageError(
            f"There is no such execution:  {given}",
            fix=(
                "compile=blocks, compile=model or compile=false; with it compile_backend=inductor or"
                " aot_eager"
            ),
            code="MT210",
        ) from None


def _defaults(slot: str, target: Target) -> tuple[Technique, ...]:
    """Return the techniques of a slot that is not searched: none, but ranks average their gradients."""
    if slot == "sharding.states" and target.ranks > 1:
        return variants(find(slot, "ddp"), target)
    return (null(slot),)


def _null_if_partitioned(slot: str, target: Target) -> tuple[Technique, ...]:
    """Return null for `sharding.states` if the ranks partition the model: there are no replicas."""
    return (null(slot),) if slot == "sharding.states" and target.sharded is not None else ()


def _slots_of(axis: str) -> tuple[str, ...]:
    name = _ALIASES.get(axis, axis)
    if name in (EXECUTION, MICRO_BATCH, *COMPILE):
        return (EXECUTION,)
    found = tuple(slot for slot in SLOTS if slot == name or slot.startswith(name + "."))
    if not found:
        known = (
            EXECUTION,
            *dict.fromkeys(slot.split(".")[0] for slot in SLOTS),
            *(slot for slot in SLOTS if "." in slot),
        )
        raise UsageError(
            f"There is no axis '{axis}'.{did_you_mean(axis, known)}",
            evidence=f"Known: {', '.join(known)}.",
            code="MT201",
        )
    return found


def _slot_named(name: str) -> str:
    full = _ALIASES.get(name, name)
    if full == MICRO_BATCH or full in COMPILE:
        return full
    found = _slots_of(full)
    if len(found) != 1 or found[0] == EXECUTION:
        options = ", ".join(found) if found[0] != EXECUTION else "micro_batch"
        raise UsageError(
            f"'{name}' holds more than one choice.", fix=f"freeze one of: {options}", code="MT201"
        )
    return found[0]
