"""`memtune plan`: the prediction of every candidate, or of one config, without running a trial."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from memtune.api import begins_with_shards, starts_off_device
from memtune.autotune.predict import (
    AS_CONFIGURED,
    AllocatorSettings,
    ParallelMap,
    PeakRow,
    TightSetting,
    at_peak,
    oom_probability,
    rank_settings,
)
from memtune.autotune.search.dry_runs import DryRuns
from memtune.autotune.search.predictions import predicted_config
from memtune.autotune.search.preparation import Setup, prepare
from memtune.autotune.space import (
    Candidate,
    Choice,
    Improvement,
    PlanOptions,
    Pruner,
    Remedy,
    Scored,
    Scores,
    alike,
    baselines,
    improvements,
    largest_micro_batch,
    more_host_memory,
    processes,
    refined_front,
    remedies,
    same_passes,
)
from memtune.config import TunedConfig, save
from memtune.errors import UsageError
from memtune.executors import Probing
from memtune.progress import advance
from memtune.search_spaces import find, is_null, matching
from memtune.technique import Reason, Technique
from memtune.units import format_bytes, format_rate, format_seconds

SCHEMA = 1
EXACT_ROWS = 5
"""Rows of the front to dry-run on request; each takes as long as recording the model."""
MOST_SIMULATED = 64
"""Candidates simulated op by op to find the front, in addition to the best; others may be missing."""
Status = Literal["ok", "tight", "oom", "unfit"]


@dataclass(frozen=True)
class PlanRow:
    """One predicted candidate."""

    summary: str
    settings: dict[str, Any]
    status: Status
    """`ok` if the predicted peak is within the budget; `tight` if allocated bytes are, but reserved ones are
    not, so that the allocator returns cached memory and asks again; `oom` if neither, or if replays under
    the budget run out of memory with all settings of the allocator; `unfit` if a technique refused.
    """
    reason: str = ""
    baseline: str = ""
    sentence: str = ""
    """The techniques as clauses that a user can read."""
    peak_allocated_bytes: int | None = None
    peak_low_bytes: int | None = None
    peak_high_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    step_s: float | None = None
    step_low_s: float | None = None
    step_high_s: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    """None if a batch holds no tokens."""
    exactness: str = "bitwise"
    """The least exact class of its techniques."""
    micro_batch: int | None = None
    accumulate: int = 1
    n_equal: int = 1
    """Number of candidates with equal predictions."""
    largest_micro_batch: int | None = None
    """Largest micro-batch at which the techniques fit; None if not requested or unlimited."""
    oom_probability: float | None = None
    """Probability of exceeding the budget; None (uncalibrated) after too few trials on this machine."""
    exact_peak_bytes: int | None = None
    """Peak of a dry run, if requested and possible."""
    exact_reason: str = ""
    """Reason why a requested dry run was not possible."""
    device_bytes: int | None = None
    """Peak of the device's memory in use, as nvidia-smi shows it: reserved bytes, context and
    communicators."""
    device_low_bytes: int | None = None
    device_high_bytes: int | None = None
    unmet: tuple[str, ...] = ()
    """Lines on what the settings ask for and their plans do not do."""
    allocators: tuple[TightSetting, ...] = ()
    """Settings of the allocator under the budget, best first, where only allocated bytes fit."""
    details: dict[str, Any] = field(default_factory=dict)
    """The full prediction."""

    def __repr__(self) -> str:
        """Return the setting with its rate and peak; `to_dict` has all fields."""
        facts = [f"{format_rate(self.samples_per_s)} samples/s"] if self.samples_per_s else []
        facts += [f"peak {format_bytes(self.peak_allocated_bytes)}"] if self.peak_allocated_bytes else []
        return f"<{self.summary}: {', '.join([*facts, self.status])}, predicted>"

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain data; `prediction` includes `calibrated`, busy and exposed times."""
        values = {name: value for name, value in vars(self).items() if name not in ("details", "allocators")}
        settings = [each.to_dict() for each in self.allocators]
        return {**values, "allocators": settings, "prediction": self.details}


@dataclass(frozen=True)
class PlanReport:
    """The ranking, or one config's prediction, with its basis."""

    facts: dict[str, Any]
    rows: tuple[PlanRow, ...] = ()
    baselines: tuple[PlanRow, ...] = ()
    front: tuple[PlanRow, ...] = ()
    """Candidates that fit, beaten by none in both cost and memory, cheapest first (`space/pareto.py`)."""
    unfit: dict[str, str] = field(default_factory=dict)
    """Reason why each technique (`slot: kind`) was omitted."""
    refused: dict[str, int] = field(default_factory=dict)
    """Number of refused combinations, by reason."""
    n_candidates: int = 0
    n_merged: int = 0
    pruned: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Candidates that cannot fit: number and least need, by technique that shards or offloads states."""
    peak: tuple[PeakRow, ...] = ()
    """The bytes at the peak of the front's first row, of the closest candidate, or of the config."""
    remedies: tuple[Remedy, ...] = ()
    """Changes that would help if nothing fits."""
    improvements: tuple[Improvement, ...] = ()
    """Changes under which the front's first row would be faster."""
    absences: tuple[Absence, ...] = ()
    """Reasons for the technique of `PlanOptions.why_not`."""
    out: str | None = None
    """File to which the config of a row was written."""
    notes: tuple[str, ...] = ()
    recording_notes: tuple[str, ...] = ()
    """Those of `notes` that say how sizes were recorded."""
    config: PlanRow | None = None
    """Set if one config was requested; there is no ranking then."""

    @property
    def n_pruned(self) -> int:
        """Return the number of candidates that cannot fit."""
        return sum(count for count, _ in self.pruned.values())

    @property
    def feasible(self) -> bool:
        """Return whether the config, or any candidate, is predicted to be within the budget."""
        return bool(self.front) if self.config is None else self.config.status in ("ok", "tight")

    def to_dict(self) -> dict[str, Any]:
        """Return one document; for one config, with its `status`, peaks and `step_s` at the top level."""
        head: dict[str, Any] = {"schema": SCHEMA, **self.facts, "notes": list(self.notes)}
        head["peak_by_module"] = [row.to_dict() for row in self.peak]
        if self.config is not None:
            return head | self.config.to_dict()
        return head | {
            "candidates": [each.to_dict() for each in self.rows],
            "baselines": [each.to_dict() for each in self.baselines],
            "front": [each.to_dict() for each in self.front],
            "remedies": [each.to_dict() for each in self.remedies],
            "improvements": [each.to_dict() for each in self.improvements],
            "why_not": [each.to_dict() for each in self.absences],
            "out": self.out,
            "n_candidates": self.n_candidates,
            "n_merged": self.n_merged,
            "n_pruned": self.n_pruned,
            "pruned": {
                name: {"candidates": count, "least_bytes": least}
                for name, (count, least) in self.pruned.items()
            },
            "n_unfit": sum(self.refused.values()),
            "unfit": self.unfit,
            "refused": self.refused,
        }


def plan(
    options: PlanOptions, *, say: Callable[[str], None] = lambda text: None, begun: Probing | None = None
) -> PlanReport:
    """Predict every candidate, or one config, for a target that need not be present; `begun` as in `prepare`.

    Raises:
        WorkloadError: `model.py` cannot be used.
        UsageError: The options contradict each other or the workload.
        ConfigError: The config cannot be read.
    """
    if options.why_not is not None:
        matching(options.why_not)  # a typo should cost no recording
    setup = prepare(options, say=say, for_trials=False, begun=begun)
    pruner = Pruner(setup.budget_bytes)
    basis = PlanReport(
        _facts(setup),
        notes=(*setup.recording.notes, *setup.space.notes),
        recording_notes=tuple(each for each in setup.recording.notes if each not in setup.advice),
    )
    if options.config is not None:
        planned, peak, out = _plan_config(setup, pruner, options)
        return replace(basis, config=planned, peak=peak, out=out)
    return _plan_all(setup, pruner, options, say, basis)


def _plan_all(
    setup: Setup, pruner: Pruner, options: PlanOptions, say: Callable[[str], None], basis: PlanReport
) -> PlanReport:
    """Return `basis` with predictions of every candidate, and of changes that help."""
    say("scoring settings")
    scores = setup.score(options.seed)
    say("simulating the best op by op")
    found, refused = baselines(setup.scorer, setup.global_batch)
    # Rows also list what is over the budget as predicted but within it at the low end of its interval.
    alive = [each for each in scores.by_key.values() if pruner.reason(each.prediction) is None]
    budget = setup.budget_bytes
    ranked = sorted(alive, key=lambda each: (not each.prediction.is_within(budget), each.rank(options.goal)))
    fitting = [each for each in scores.by_key.values() if each.prediction.is_within(budget)]
    front = _simulated(setup, fitting, options.top)
    # Where nothing fits, the report is about the candidate that is closest.
    first = (
        front[0] if front else min(scores.by_key.values(), key=lambda each: each.rank("memory"), default=None)
    )
    say("looking for larger micro-batches and other changes that help")
    out = _written(setup, front, options)
    return replace(
        basis,
        rows=tuple(
            _row(setup, each, pruner, n_equal=count) for each, count in _merge_alike(ranked, options.top)
        ),
        baselines=tuple(
            _row(setup, setup.scorer.refined(each.scored), pruner, baseline=each.name) for each in found
        ),
        front=_dry_run(setup, _front(setup, pruner, front), EXACT_ROWS if options.exact else 0),
        unfit={name: str(reason) for name, reason in setup.space.unfit.items()},
        refused={**scores.unfit, **{f"{name}: {reason}": 1 for name, reason in refused.items()}},
        n_candidates=scores.n_candidates,
        n_merged=scores.n_merged,
        pruned=_pruned(scores, pruner),
        peak=at_peak(setup.scorer.program(first.choice).step) if first else (),
        remedies=() if front else _remedies(setup, first, scores),
        improvements=(
            improvements(setup.scorer, front[0], scores.by_key.values())
            if front and options.goal == "throughput"
            else ()
        ),
        absences=(
            absences(setup, scores, pruner, front[0] if front else None, options.why_not)
            if options.why_not is not None
            else ()
        ),
        out=out,
    )


def _written(setup: Setup, front: Sequence[Scored], options: PlanOptions) -> str | None:
    """Write the config of the requested row, if one is requested and anything fits; return its path."""
    if options.out is None or not front:
        return None
    if options.row > len(front):
        raise UsageError(
            f"--row {options.row}: the table has {len(front)} rows.",
            fix=f"--row 1 to {len(front)}, or more rows with --top",
            code="MT100",
        )
    save(predicted_config(setup, front[options.row - 1]), options.out)
    return str(options.out)


def _simulated(setup: Setup, scored: list[Scored], top: int) -> list[Scored]:
    """Return the cheapest `top` of the front of `scored`, simulated op by op."""
    with ParallelMap(
        setup.scorer.refined, lambda each: same_passes(each.choice), processes(), worth_s=0.0
    ) as side_by_side:
        return refined_front(
            scored,
            lambda each: side_by_side.map(each, lambda done: advance(done, "settings")),
            MOST_SIMULATED,
            setup.budget_bytes,
            top,
        )[:top]


def _front(setup: Setup, pruner: Pruner, shown: Sequence[Scored]) -> tuple[PlanRow, ...]:
    """Return the rows of the front, each with the largest micro-batch of its techniques."""
    with ParallelMap(
        lambda choice: largest_micro_batch(setup.scorer, choice, pruner),
        same_passes,
        processes(),
        worth_s=0.0,
    ) as side_by_side:
        sizes = side_by_side.map([each.choice for each in shown])
    return tuple(
        replace(_row(setup, each, pruner), largest_micro_batch=n)
        for each, n in zip(shown, sizes, strict=True)
    )


def _dry_run(setup: Setup, rows: tuple[PlanRow, ...], count: int) -> tuple[PlanRow, ...]:
    """Return `rows`, the first `count` of them with the peak of a dry run or the reason why there is none."""
    runs = DryRuns(setup, {row.micro_batch or 1 for row in rows[:count]})
    done = []
    for row in rows[:count]:
        found = runs.peak_bytes(Choice.from_document(row.settings), row.peak_allocated_bytes or 0)
        reason = str(found) if isinstance(found, Reason) else ""
        done.append(
            replace(row, exact_peak_bytes=None if isinstance(found, Reason) else found, exact_reason=reason)
        )
    return (*done, *rows[count:])


def _pruned(scores: Scores, pruner: Pruner) -> dict[str, tuple[int, int]]:
    counts: Counter[str] = Counter()
    least: dict[str, int] = {}
    for each in scores.by_key.values():
        if pruner.reason(each.prediction) is None:
            continue
        used = {technique.slot: technique.kind for technique in each.choice.techniques}
        name = (
            " · ".join(used[slot] for slot in ("sharding.states", "offload.states") if slot in used)
            or "nothing sharded"
        )
        counts[name] += 1
        low = pruner.peak_low_bytes(each.prediction)
        least[name] = min(least.get(name, low), low)
    return {name: (count, least[name]) for name, count in counts.most_common()}


def _remedies(setup: Setup, closest: Scored | None, scores: Scores) -> tuple[Remedy, ...]:
    if closest is None:  # every candidate was refused
        return () if scores.short_of_host is None else (more_host_memory(scores.short_of_host),)
    budget = setup.budget_bytes
    assert budget is not None  # without a limit everything fits
    return remedies(setup.scorer, closest, budget, scores.short_of_host)


def _plan_config(
    setup: Setup, pruner: Pruner, options: PlanOptions
) -> tuple[PlanRow, tuple[PeakRow, ...], str | None]:
    """Return the prediction of the one config, its bytes at the peak, and the file it was written to."""
    choice = setup.only
    assert choice is not None
    scored = setup.scorer.score(choice, level="events")
    if isinstance(scored, Reason):
        return (
            PlanRow(
                choice.summary,
                choice.dump(),
                "unfit",
                str(scored),
                sentence=choice.sentence,
                micro_batch=choice.execution.micro_batch,
            ),
            (),
            None,
        )
    (row,) = _dry_run(
        setup, (_ranked_settings(setup, scored, _row(setup, scored, pruner)),), int(options.exact)
    )
    out = None if row.status == "oom" else _written(setup, [scored], options)
    return row, at_peak(setup.scorer.program(choice).step), out


def _ranked_settings(setup: Setup, scored: Scored, row: PlanRow) -> PlanRow:
    """Return a tight `row` with the allocator's settings under the budget and the time of retries."""
    budget = setup.budget_bytes
    if row.status != "tight" or budget is None:
        return row
    own = AllocatorSettings.from_env(scored.choice.env())
    return _replayed(row, rank_settings(setup.scorer.program(scored.choice).step, own, budget), own, budget)


def _replayed(
    row: PlanRow, ranked: tuple[TightSetting, ...], own: AllocatorSettings, budget_bytes: int
) -> PlanRow:
    """Return a tight `row` as replays under the budget found it: `ranked`, of which one is its `own`."""
    mine = next(
        each
        for each in ranked
        if each.settings == AS_CONFIGURED or AllocatorSettings.parse(each.settings) == own
    )
    best = ranked[0]
    if mine.retries and mine.fits:
        does = f"{_ASKS_AGAIN}, {mine.retries} times a step, which takes {format_seconds(mine.retry_s)}"
    elif mine.fits:
        does = f"{_ASKS_AGAIN}, in the first steps only"
    else:
        does = "the allocator runs out of memory, whose free parts are too small for some tensor"
    other = f"PYTORCH_ALLOC_CONF={best.settings}" if best.settings else "torch's defaults"
    better = f"; {other} would need {format_bytes(best.peak_reserved_bytes)}"
    advice = better if best.fits and best is not mine else ""
    slower = 1 + (mine.retry_s / row.step_s if row.step_s and mine.fits else 0.0)
    factors = dict.fromkeys(_TIMES, slower) | dict.fromkeys(_RATES, 1 / slower)
    changed: dict[str, Any] = {
        name: by * was for name, by in factors.items() if (was := getattr(row, name)) is not None
    }
    return replace(
        row,
        status="tight" if best.fits else "oom",
        reason=_reserves_more(row.peak_reserved_bytes or 0, budget_bytes) + does + advice,
        allocators=ranked,
        **changed,
    )


_ASKS_AGAIN = "the allocator returns cached memory and asks again"
_TIMES, _RATES = ("step_s", "step_low_s", "step_high_s"), ("samples_per_s", "tokens_per_s")


def _reserves_more(reserved_bytes: int, budget_bytes: int) -> str:
    return f"{format_bytes(reserved_bytes)} would be reserved, more than {format_bytes(budget_bytes)}: "


def _row(setup: Setup, scored: Scored, pruner: Pruner, *, baseline: str = "", n_equal: int = 1) -> PlanRow:
    prediction, budget = scored.prediction, pruner.budget_bytes
    reason = pruner.reason(prediction) or ""
    fits = prediction.is_within(budget)
    if not fits and not reason:
        reason = "over the budget as predicted, within it at the lower end of the interval"
    interval, tokens = prediction.interval, setup.tokens_per_sample
    tight = fits and budget is not None and prediction.peak_reserved_bytes > budget
    if tight:
        reason = _reserves_more(prediction.peak_reserved_bytes, budget or 0) + _ASKS_AGAIN
    device_bytes, device_low_bytes, device_high_bytes = prediction.device_bytes
    return PlanRow(
        summary=scored.choice.summary,
        sentence=scored.choice.sentence,
        exactness=str(scored.choice.exactness),
        settings=scored.choice.dump(),
        status="tight" if tight else "ok" if fits else "oom",
        reason=reason,
        baseline=baseline,
        peak_allocated_bytes=prediction.peak_allocated_bytes,
        peak_low_bytes=interval.peak_low_bytes,
        peak_high_bytes=interval.peak_high_bytes,
        peak_reserved_bytes=prediction.peak_reserved_bytes,
        step_s=prediction.step_s,
        step_low_s=interval.step_low_s,
        step_high_s=interval.step_high_s,
        samples_per_s=prediction.samples_per_s,
        tokens_per_s=None if tokens is None else prediction.samples_per_s * tokens,
        micro_batch=scored.choice.execution.micro_batch,
        accumulate=scored.choice.execution.accumulate,
        n_equal=n_equal,
        oom_probability=oom_probability(
            setup.calibration, prediction.peak_allocated_bytes, pruner.budget_bytes
        ),
        device_bytes=device_bytes,
        device_low_bytes=device_low_bytes,
        device_high_bytes=device_high_bytes,
        unmet=_unmet(setup, scored.choice),
        details=prediction.to_dict(),
    )


def _unmet(setup: Setup, choice: Choice) -> tuple[str, ...]:
    """Return what the plans of `choice` could not meet, and why the model cannot start if it is too large."""
    techniques = [each for each in choice.techniques if type(each).unmet is not Technique.unmet]
    is_large = setup.budget_bytes is not None and setup.parameter_bytes > setup.budget_bytes
    found = setup.scorer.rewriter.candidate(choice) if techniques or is_large else None
    if not isinstance(found, Candidate):
        return ()
    lines = [
        line for each in techniques if each.slot in found.plans for line in each.unmet(found.plans[each.slot])
    ]
    config = TunedConfig(settings=choice, plan=dict(found.plans))
    if is_large and not (begins_with_shards(config, setup.ranks) or starts_off_device(config, setup.ranks)):
        lines.append(
            "the model cannot be made within the limit: its weights need"
            f" {format_bytes(setup.parameter_bytes)} on the device before memtune.apply can offload them;"
            " make them narrower, shard them over ranks, or keep the blocks off the device (l2l, stronghold,"
            " zero_infinity with parameters: host)"
        )
    return tuple(lines)


def _merge_alike(ranked: list[Scored], count: int) -> list[tuple[Scored, int]]:
    """Return the first `count` distinguishable candidates, each with its number of (adjacent) equals."""
    rows: list[tuple[Scored, int]] = []
    for each in ranked:
        if rows and alike(rows[-1][0].prediction) == alike(each.prediction):
            rows[-1] = (rows[-1][0], rows[-1][1] + 1)
        elif len(rows) == count:
            break
        else:
            rows.append((each, 1))
    return rows


def _facts(setup: Setup) -> dict[str, Any]:
    return {
        "workload": str(setup.workload.path.name),
        "hardware": setup.hardware.title,
        "rates": setup.hardware.rates_from,
        "device": setup.device,
        "ranks": setup.ranks,
        "goal": setup.goal,
        "budget_bytes": setup.budget_bytes,
        "host_memory_bytes": setup.scorer.host_bytes,
        "calibrated_by": min(len(setup.calibration.peak_ratios), len(setup.calibration.step_ratios)),
        "global_batch": setup.global_batch,
        "tokens_per_sample": setup.tokens_per_sample,
        "other_load": round(setup.other_load, 3),
        "parameters": setup.made_for.parameters,
        "parameter_bytes": setup.parameter_bytes,
        "rung": setup.recording.rung,
        "record_s": round(setup.recording.record_s, 3),
    }


# `memtune plan --why-not KIND`: the reason why a technique is not in the row that is recommended.


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
    """Return why the first row does not use the technique `kind`."""
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
    return next(_alone(setup, first, slot, kind), "it is not searched: add its axis to --axes")


def _slower(setup: Setup, best: Scored, first: Scored | None, subject: str = "its best setting") -> str:
    refined = setup.scorer.refined(best)
    facts = f"{subject} reaches {format_rate(refined.prediction.samples_per_s)} samples/s"
    if first is not None and first.prediction.samples_per_s:
        share = 1 - refined.prediction.samples_per_s / first.prediction.samples_per_s
        facts += f", {share:.0%} less than row 1" if share >= 0.005 else ", the same as row 1"
    return f"{facts}, with {format_bytes(refined.prediction.peak_allocated_bytes)}: {refined.choice.sentence}"


def _alone(setup: Setup, first: Scored | None, slot: str, kind: str) -> Iterator[str]:
    """Yield why the technique alone is unused on the plain micro-batch: refused, or not worth solving."""
    replicas = {"sharding.states": find("sharding.states", "ddp")(kind="ddp")} if setup.ranks > 1 else {}
    technique = find(slot, kind)(kind=kind)
    execution = setup.space.executions[0]
    scored = setup.scorer.score(Choice.of(execution, replicas | {slot: technique}))
    if isinstance(scored, Reason):
        yield str(scored)
    elif is_null(technique):
        yield "it is the default of its axis"
    elif setup.space.slots[slot].count(technique):
        yield _slower(setup, scored, first, "alone it")
