"""Plans of length buckets: shorter batches recompute and offload less than the largest one.

The settings and plan of a candidate are made for the largest batch. In each smaller bucket the techniques on
saved tensors (`BUCKET_SLOTS`) are chosen and planned again, for the fastest step within the peak of the
largest batch. So no bucket needs more memory than the candidate's prediction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from memtune.autotune.predict import AllocatorSettings, Prediction, simulate
from memtune.autotune.search.bucket_recordings import BucketRecording
from memtune.autotune.search.preparation import Setup
from memtune.autotune.space import Candidate, Choice, Rewriter, python_work
from memtune.config import BUCKET_SLOTS, Bucket, Settings
from memtune.search_spaces._support import one_for_all_buckets
from memtune.search_spaces.execution import Execution
from memtune.technique import Plan, Reason, Technique


def plan_buckets(setup: Setup, candidate: Candidate) -> tuple[Bucket, ...]:
    """Return the length buckets of `candidate` that have techniques and plans of their own, ascending."""
    # Without any, all batches follow the candidate's own. A bucket that no combination is known to fit
    # follows the next larger one.
    choice = candidate.choice
    if choice not in setup.bucket_plans:
        setup.bucket_plans[choice] = _planned_buckets(setup, candidate)
    return setup.bucket_plans[choice]


def _planned_buckets(setup: Setup, candidate: Candidate) -> tuple[Bucket, ...]:
    choice = candidate.choice
    _, refused = one_for_all_buckets(choice.chosen, choice.execution.compile)
    if refused is not None or choice.precision is not None or not choice.chosen.keys() & set(BUCKET_SLOTS):
        return ()
    most = _simulated(setup, candidate)
    found = (_planned(setup, candidate, each, most) for each in setup.buckets)
    buckets = tuple(each for each in found if each is not None)
    # A bucket that decides as the largest batch does is needed only below one that does not.
    return buckets if any(not _decides_the_same(each, candidate) for each in buckets) else ()


def _planned(setup: Setup, candidate: Candidate, bucket: BucketRecording, most: Prediction) -> Bucket | None:
    target = replace(setup.scorer.rewriter.target, budget_bytes=most.peak_allocated_bytes, sharded=None)
    rewriter = Rewriter(bucket.recording, target)
    fitting = []
    for choice in _with_fewer(candidate.choice):
        found = rewriter.candidate(choice)
        # Techniques in the other slots run by one plan in all buckets.
        if isinstance(found, Reason) or _other_plans(found) != _other_plans(candidate):
            continue
        prediction = _simulated(setup, found)
        if (
            prediction.peak_allocated_bytes <= most.peak_allocated_bytes
            and prediction.peak_reserved_bytes <= most.peak_reserved_bytes
        ):
            fitting.append((prediction.step_s, len(choice.techniques), found, prediction))
    size = candidate.choice.execution.micro_batch
    if not fitting or size is None:
        return None
    _, _, best, prediction = min(fitting, key=lambda each: each[:2])
    return Bucket(
        inputs=bucket.inputs(size),
        settings=Settings.of(Execution(), _droppable_techniques(best.choice)),
        plan=_decided(best),
        predicted={"peak_bytes": prediction.peak_allocated_bytes, "step_s": prediction.step_s},
    )


def _with_fewer(choice: Choice) -> Iterator[Choice]:
    """Yield `choice` with none, one or both of its techniques on saved tensors."""
    used = _droppable_techniques(choice)
    rest = {slot: each for slot, each in choice.chosen.items() if slot not in used}
    for count in range(len(used) + 1):
        for kept in combinations(used.items(), count):
            yield Choice.of(choice.execution, rest | dict(kept))


def _droppable_techniques(choice: Choice) -> dict[str, Technique]:
    """Return the techniques of `choice` that a length bucket may drop, by slot."""
    return {slot: each for slot, each in choice.chosen.items() if slot in BUCKET_SLOTS}


def _decided(candidate: Candidate) -> dict[str, Plan]:
    return {slot: plan for slot, plan in candidate.plans.items() if slot in BUCKET_SLOTS}


def _other_plans(candidate: Candidate) -> dict[str, Plan]:
    return {slot: plan for slot, plan in candidate.plans.items() if slot not in BUCKET_SLOTS}


def _decides_the_same(bucket: Bucket, candidate: Candidate) -> bool:
    return bucket.settings.chosen == _droppable_techniques(candidate.choice) and bucket.plan == _decided(
        candidate
    )


def _simulated(setup: Setup, candidate: Candidate) -> Prediction:
    return simulate(
        candidate.program,
        setup.scorer.rewriter.target.hardware,
        level="events",
        allocator=AllocatorSettings.from_env(candidate.choice.env()),
        python=python_work(candidate),
    )
