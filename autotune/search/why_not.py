"""`memtune plan --why-not KIND`: the reason why a technique is not in the row that is recommended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from memtune.autotune.search.preparation import Setup
from memtune.autotune.space import Choice, Pruner, Scored, Scores
from memtune.search_spaces import find, is_null, matching
from memtune.technique import Reason
from memtune.units import format_bytes


@dataclass(frozen=True)
class Absence:
    """A technique, and why the recommended setting does without it."""

    technique: str
    """`slot: kind`."""
    sentence: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)


def absences(
    setup: Setup, scores: Scores, pruner: Pruner, first: Scored | None, asked: str
) -> tuple[Absence, ...]:
    """Return the reason for each technique that `asked` names; a kind may be in several slots."""
    return tuple(
        Absence(
            f"{slot}: {kind}",
            find(slot, kind)(kind=kind).described(),
            _reason(setup, scores, pruner, first, slot, kind),
        )
        for slot, kind in matching(asked)
    )


def _reason(setup: Setup, scores: Scores, pruner: Pruner, first: Scored | None, slot: str, kind: str) -> str:
    unfit = setup.space.unfit.get(f"{slot}: {kind}")
    if unfit is not None:
        return str(unfit)
    using = [each for each in scores.by_key.values() if each.choice.technique(slot).kind == kind]
    if first is not None and first.choice.technique(slot).kind == kind:
        return "row 1 uses it"
    alive = [each for each in using if pruner.reason(each.prediction) is None]
    if alive:
        return _slower(setup, min(alive, key=lambda each: each.rank(setup.goal)), first)
    if using:
        least = min(each.prediction.peak_allocated_bytes for each in using)
        limit = setup.budget_bytes or 0
        return (
            f"all {len(using):,} settings with it need {format_bytes(least)} at the least,"
            f" {format_bytes(least - limit)} too much"
        )
    return next(_refusals(setup, slot, kind), "it is not searched: add its axis to --axes")


def _slower(setup: Setup, best: Scored, first: Scored | None) -> str:
    refined = setup.scorer.refined(best)
    facts = f"its best setting reaches {refined.prediction.samples_per_s:.3g} samples/s"
    if first is not None and first.prediction.samples_per_s:
        share = 1 - refined.prediction.samples_per_s / first.prediction.samples_per_s
        facts += f", {share:.0%} less than row 1" if share >= 0.005 else ", the same as row 1"
    return f"{facts}, with {format_bytes(refined.prediction.peak_allocated_bytes)}: {refined.choice.sentence}"


def _refusals(setup: Setup, slot: str, kind: str) -> Iterator[str]:
    """Yield the refusal of the technique alone, on the plain micro-batch."""
    replicas = {"sharding.states": find("sharding.states", "ddp")(kind="ddp")} if setup.ranks > 1 else {}
    technique = find(slot, kind)(kind=kind)
    execution = setup.space.executions[0]
    scored = setup.scorer.score(Choice.of(execution, replicas | {slot: technique}))
    if isinstance(scored, Reason):
        yield str(scored)
    elif is_null(technique):
        yield "it is the default of its axis"
