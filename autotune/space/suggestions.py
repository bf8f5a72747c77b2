"""Suggest changes that make a workload fit: try every option in the simulator, the cheapest first."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from memtune import hardware
from memtune.autotune.predict import HostShortage, Prediction
from memtune.autotune.space.candidates import Choice, Rewriter
from memtune.autotune.space.scoring import Scored, Scorer
from memtune.hardware import Hardware
from memtune.search_spaces import find, kinds
from memtune.search_spaces.execution import Execution
from memtune.technique import Reason, Technique
from memtune.units import format_bytes

_NOTICEABLE = 0.03
"""Relative gains below this are not suggested."""
_MOST = 3
"""Suggestions to return."""
_LEAN = ("offload.states", "recompute", "offload.activations", "sharding.states")
"""Slots that trade time for memory; all kinds are tried, which the search may have excluded."""


@dataclass(frozen=True)
class Remedy:
    """One change, and the peak with it."""

    change: str
    peak_bytes: int
    slowdown: float = 1.0
    """Seconds per sample on a rank, relative to the closest candidate."""

    def to_dict(self) -> dict[str, Any]:
        """Return all fields."""
        return {"change": self.change, "peak_allocated_bytes": self.peak_bytes, "slowdown": self.slowdown}


def remedies(
    scorer: Scorer, closest: Scored, budget_bytes: int, short_of_host: HostShortage | None = None
) -> tuple[Remedy, ...]:
    """Return the cheapest changes after which `closest`, the smallest candidate, is predicted to fit.

    Tries a smaller micro-batch, other kinds in the slots (the search may have excluded them) and more ranks;
    if no single change suffices on as many ranks, two other kinds; if more ranks do not suffice either, other
    kinds on more ranks. More host memory comes first, if some candidate lacks nothing else. A larger limit
    always suffices and comes last.
    """
    rewriter = scorer.rewriter
    scorer = Scorer(rewriter, host_bytes=scorer.host_bytes)

    def enough(tried: Iterator[Remedy]) -> list[Remedy]:
        return [each for each in tried if each.peak_bytes <= budget_bytes]

    found = enough(_one_change(scorer, closest)) or enough(_two_changes(scorer, closest))
    found += enough(_wider(scorer, closest.choice, closest, "")) or (
        [] if found else enough(_changed_and_wider(scorer, closest))
    )
    unique = {
        each.change: each for each in sorted(found, key=lambda each: (-each.slowdown, -each.peak_bytes))
    }
    cheapest = sorted(unique.values(), key=lambda each: (each.slowdown, each.peak_bytes))[: _MOST - 1]
    needs = max(
        closest.prediction.peak_allocated_bytes, budget_bytes + 1
    )  # a trial may have needed more than predicted
    if short_of_host is not None:
        cheapest = [more_host_memory(short_of_host), *cheapest]
    return (*cheapest, Remedy(more_memory(rewriter.target.hardware, needs), needs, 1.0))


@dataclass(frozen=True)
class Improvement:
    """One change of the target that makes a step faster, and its prediction."""

    change: str
    samples_per_s: float
    speedup: float
    """Samples/s relative to the fastest candidate that fits."""
    peak_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)


def improvements(scorer: Scorer, best: Scored, others: Iterable[Scored]) -> tuple[Improvement, ...]:
    """Return the changes of memory, batch and ranks predicted to be faster than `best`, largest first."""
    base = best.prediction.samples_per_s
    tried = (*_more_memory(scorer, others), *_larger_batch(scorer, best.choice), *_more_ranks(scorer, best))
    found = [
        Improvement(change, now.samples_per_s, now.samples_per_s / base, now.peak_allocated_bytes)
        for change, now in tried
        if now.samples_per_s > (1 + _NOTICEABLE) * base
    ]
    return tuple(sorted(found, key=lambda each: -each.speedup)[:_MOST])


def _more_memory(scorer: Scorer, others: Iterable[Scored]) -> Iterator[tuple[str, Prediction]]:
    target = scorer.rewriter.target
    least, most = target.budget_bytes or math.inf, _largest_card_bytes(target.hardware, target.ranks)
    larger = [each for each in others if least < each.prediction.peak_allocated_bytes <= most]
    if larger:
        fastest = scorer.refined(min(larger, key=lambda each: each.rank_among_levels("throughput")))
        needs = more_memory(target.hardware, fastest.prediction.peak_allocated_bytes)
        yield f"{needs}, then {fastest.choice.sentence}", fastest.prediction


def _larger_batch(scorer: Scorer, choice: Choice) -> Iterator[tuple[str, Prediction]]:
    target, execution = scorer.rewriter.target, choice.execution
    size = 2 * (execution.micro_batch or 1)
    changed = Execution.model_validate({**execution.model_dump(), "micro_batch": size})
    scored = scorer.score(Choice(changed, choice.techniques), level="events")
    if not isinstance(scored, Reason) and scored.prediction.is_within(target.budget_bytes):
        samples = size * execution.accumulate * target.ranks
        yield f"--global-batch {samples}, if other results are acceptable", scored.prediction


def _more_ranks(scorer: Scorer, best: Scored) -> Iterator[tuple[str, Prediction]]:
    rewriter = scorer.rewriter
    if rewriter.target.device == "cpu":  # more ranks share the same cores
        return
    target = replace(rewriter.target, ranks=2 * rewriter.target.ranks)
    wider = Scorer(Rewriter(rewriter.recording, target, compiled=rewriter.compiled))
    averaged = {"sharding.states": find("sharding.states", "ddp")(kind="ddp")} | best.choice.chosen
    scored = wider.score(Choice.of(best.choice.execution, averaged), level="events")
    if not isinstance(scored, Reason):
        yield f"--gpus {target.ranks}, with twice the samples a step", scored.prediction


def more_host_memory(shortage: HostShortage) -> Remedy:
    """Return the change after which a candidate that lacks host memory fits."""
    return Remedy(f"--host-memory {rounded_up(shortage.needed_bytes)}", shortage.peak_bytes)


def _largest_card_bytes(now: Hardware, ranks: int) -> float:
    """Return what the largest known card has for tensors; a CPU has no limit here."""
    if now.device == "cpu":
        return math.inf
    return max(hardware.find(each).usable_bytes(ranks) for each in hardware.names())


def more_memory(now: Hardware, n_bytes: int) -> str:
    """Return the advice for a need of `n_bytes`: no limit helps above the GPU's memory."""
    if now.device != "cpu" and n_bytes > now.memory_bytes:
        return f"a card with {rounded_up(n_bytes)} of memory"
    if now.device == "cpu":
        return f"--max-memory {rounded_up(n_bytes)}"
    return f"--max-memory {rounded_up(n_bytes, now.memory_bytes)} or a card with more memory"


def rounded_up(n_bytes: int, most_bytes: int | None = None) -> str:
    """Return a short size for `--max-memory`.

    At least `n_bytes`, and at most `most_bytes` unless `n_bytes` is more.
    """
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"))[n_bytes < 2**30 :]:
        tenths = -(-n_bytes * 10 // unit)
        if most_bytes is None or tenths * unit <= most_bytes * 10:
            whole, tenth = divmod(tenths, 10)
            return f"{whole}.{tenth}{name}" if tenth else f"{whole}{name}"
    return f"{n_bytes}B"


def describe(remedy: Remedy) -> str:
    """Return the remedy in one line."""
    frozen = re.findall(r"--freeze ([\w.]+)=(\w+)", remedy.change)
    clauses = [find(slot, kind)(kind=kind).sentence() for slot, kind in frozen]
    meaning = f"; {', '.join(clauses)}" if clauses else ""
    cost = f", {remedy.slowdown:.2g}× the time per sample" if remedy.slowdown > 1.005 else ""
    return f"{remedy.change}: {format_bytes(remedy.peak_bytes)}{cost}{meaning}"


def _one_change(scorer: Scorer, closest: Scored) -> Iterator[Remedy]:
    choice = closest.choice
    size = choice.execution.micro_batch or 1
    while size > 1:
        size //= 2
        smaller = Choice(choice.execution.of_size(size), choice.techniques)
        yield from _remedy(scorer, smaller, closest, f"a micro-batch of {size} (a smaller global batch)")
    for other, name in _other_kinds(choice):
        yield from _remedy(scorer, other, closest, name)


def _two_changes(scorer: Scorer, closest: Scored) -> Iterator[Remedy]:
    for one, first in _other_kinds(closest.choice):
        for both, second in _other_kinds(one):
            if first < second and second.split("=")[0] != first.split("=")[0]:
                yield from _remedy(scorer, both, closest, f"{first} and {second}")


def _changed_and_wider(scorer: Scorer, closest: Scored) -> Iterator[Remedy]:
    for one, first in _other_kinds(closest.choice):
        yield from _wider(scorer, one, closest, first + " and ")


def _wider(scorer: Scorer, choice: Choice, closest: Scored, prefix: str) -> Iterator[Remedy]:
    """Yield `choice` on more ranks, unchanged and fully sharded."""
    rewriter = scorer.rewriter
    for times in (2, 4, 8):
        ranks = rewriter.target.ranks * times
        wider = Scorer(
            Rewriter(
                rewriter.recording,
                replace(rewriter.target, ranks=ranks),
                compiled=rewriter.compiled,
                in_precision=rewriter.in_precision,
            )
        )
        for techniques in _sharded(choice):
            yield from _remedy(wider, Choice(choice.execution, techniques), closest, f"{prefix}{ranks} ranks")


def _other_kinds(choice: Choice) -> Iterator[tuple[Choice, str]]:
    used = {each.slot: each for each in choice.techniques}
    for slot in _LEAN:
        for kind in kinds(slot):
            technique = find(slot, kind)(kind=kind)
            if kind not in ("none", used[slot].kind if slot in used else "none"):
                other = Choice.of(choice.execution, {**used, slot: technique})
                yield other, f"--freeze {slot}={kind}"


def _sharded(choice: Choice) -> list[tuple[Technique, ...]]:
    rest = tuple(each for each in choice.techniques if each.slot != "sharding.states")
    return [choice.techniques, (*rest, find("sharding.states", "fsdp")(kind="fsdp"))]


def _remedy(scorer: Scorer, choice: Choice, closest: Scored, change: str) -> Iterator[Remedy]:
    scored = scorer.score(choice)
    if not isinstance(scored, Reason):
        before, after = _rank_sample_s(closest), _rank_sample_s(scored)
        yield Remedy(change, scored.prediction.peak_allocated_bytes, after / before if before else 1.0)


def _rank_sample_s(scored: Scored) -> float:
    """Return seconds per sample on one rank."""
    execution = scored.choice.execution
    return scored.prediction.step_s / ((execution.micro_batch or 1) * execution.accumulate)
