"""Run jobs on an executor and record their results: the only writer of the study and of the event log.

Invariants:

1. A result is reported to the study first, then written to the log; results that a crash kept out of the log
  are added on resume.
2. Losses are compared with those of the first baseline that fits; a result that disagrees is kept but never
  wins.
3. The same crash `BREAKER` times in a row stops the search: the cause is the user's code or the machine, not
  a setting.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from memtune.autotune.predict import Calibration
from memtune.autotune.search import search_events
from memtune.autotune.search.control import Control
from memtune.autotune.search.predictions import trial_config
from memtune.autotune.search.preparation import Setup
from memtune.autotune.search.trial_verdict import (
    WORTH_A_ROUND,
    Measured,
    judge,
    loss_tolerance,
    losses_disagree,
    relative_spread,
)
from memtune.autotune.space import (
    Choice,
    Kind,
    Observed,
    Pruner,
    Sampler,
    Scored,
    SearchOptions,
    StepTimeModel,
    StoredTrial,
    fits_budget,
    kinds,
    refusing_techniques,
)
from memtune.executors import Executor, Progress, Trial, TrialResult
from memtune.hardware import BUSY, OpTime, matmul_dtype
from memtune.offload.optimizer import available_bytes
from memtune.technique import Reason
from memtune.units import format_bytes

BREAKER = 5
_MEASURE_S = 2.0
"""Measured steps together take about this long, within `_STEPS`."""
_STEPS = (3, 20)
_COUNTED = ("baseline", "search", "audit")
_DECISIVE = ("repeat", "confirm")
"""A choice that fails in one of these roles is excluded, whatever its earlier results."""
_QUIET_ROUNDS = 3
"""Rounds on a quiet machine from which on disturbed ones do not count."""
_POLL_S = 0.25
_PROCESS_BYTES = 2**28
"""Host memory of a rank's process besides its tensors: torch's own, which forks share in part."""


@dataclass(frozen=True)
class Job:
    """A trial to run, and its role."""

    role: search_events.Role
    scored: Scored
    name: str = ""
    number: int | None = None


@dataclass(frozen=True)
class FinishedTrial:
    """A trial with its result, as the search counts it."""

    job: Job
    number: int
    result: TrialResult


class Driver:
    """State of a search, updated by each result.

    Attributes:
        finished: All trials with a result, in order.
        pruner: With the current calibration.
        stopped: Reason why no more trials are run; empty while they are.
        broken: Reason of the crashes that stopped the search.
        finalists: Keys of the choices that run again in alternating rounds; after one full round, only rounds
            decide.
        raced_out: Those of them that have left the rounds, because the best one beats them.
        unit: One rounding of the dtype that the model computes in.
        reference: The trial whose losses others are compared with: the first baseline that fits, else the
            first trial.
    """

    def __init__(
        self,
        setup: Setup,
        options: SearchOptions,
        sampler: Sampler,
        executor: Executor,
        log: search_events.EventLog,
        control: Control,
        began_s: float | None = None,
    ) -> None:
        self.setup, self.options, self.control = setup, options, control
        self.pruner = Pruner(setup.budget_bytes)
        self.finished: list[FinishedTrial] = []
        self.running: dict[int, Job] = {}
        self.tried: set[str] = set()
        self._struck: set[frozenset[Kind]] = set()
        self.finalists: set[str] = set()
        self.raced_out: set[str] = set()
        self.stopped = self.broken = ""
        self._sampler, self._executor, self._log = sampler, executor, log
        self.reference: FinishedTrial | None = None
        self.executor_name, self.slots, self.measures = executor.name, executor.slots, executor.measures
        # Results of candidates that came before the baseline's whose losses they are compared with.
        self._held: list[tuple[Job, TrialResult]] = []
        # On Ray, trials run on other machines too, whose free memory is not known here.
        self._host_room_bytes = available_bytes() if executor.name == "local" else None
        self._best_number: int | None = None
        self._crashes: list[str] = []
        self._started_s = time.monotonic() if began_s is None else began_s
        self._paused = self._noted_disturbance = False
        # bfloat16 has 8 significant bits, float16 has 11; the tolerance must cover both.
        self.unit = 2.0**-8 if matmul_dtype(setup.recording.step) in ("bfloat16", "float16") else 2.0**-24
        self._draws_random = bool(setup.recording.step.ops.rng.any())

    # -- what is known ---------------------------------------------------------------------------------------

    @property
    def n_trials(self) -> int:
        """Return the number of trials that count against the limit, including pending ones."""
        return sum(job.role in _COUNTED for job in (*(each.job for each in self.finished), *self.pending()))

    @property
    def elapsed_s(self) -> float:
        """Return seconds since the search was requested, recording and scoring included."""
        return time.monotonic() - self._started_s

    def measured(self) -> list[Measured]:
        """Return valid results that fit, grouped by choice.

        `rounds` holds those of completed alternating rounds.
        """
        rejected = {
            each.job.scored.key
            for each in self.finished
            # A setting that fits only sometimes must not win.
            if each.result.status != "ok" and each.job.role in _DECISIVE
        }
        groups: dict[str, list[FinishedTrial]] = {}
        for each in self.finished:
            if each.result.status == "ok" and each.job.scored.key not in rejected:
                groups.setdefault(each.job.scored.key, []).append(each)
        repeats = {
            key: [each.result for each in group if each.job.role == "repeat"] for key, group in groups.items()
        }
        # Only whole rounds: in a round each finalist met the same state of the machine.
        racing = self.finalists - rejected - self.raced_out  # those raced out have fewer rounds
        complete = min((len(repeats.get(key, ())) for key in racing), default=0)
        quiet = [
            round_
            for round_ in range(complete)
            if not any(self.is_disturbed(repeats[key][round_]) for key in racing)
        ]
        # Few quiet rounds would decide by chance, so then all of them count.
        counted = quiet if len(quiet) >= _QUIET_ROUNDS else range(complete)
        return [
            Measured(
                group[0].job.scored.choice,
                tuple(each.result for each in group),
                baseline=next((each.job.name for each in group if each.job.role == "baseline"), ""),
                rounds=tuple(
                    repeats[key][round_] if round_ < len(repeats[key]) else None for round_ in counted
                )
                if key in self.finalists
                else (),
            )
            for key, group in groups.items()
        ]

    def best_value(self) -> float | None:
        """Return the best measured value, None before anything fits."""
        return min((each.value(self.setup.goal) for each in self.measured()), default=None)

    def pending(self) -> list[Job]:
        """Return the jobs that run, or whose result waits for the reference."""
        return [*self.running.values(), *(job for job, _ in self._held)]

    def best_with_pending(self) -> tuple[float | None, StepTimeModel]:
        """Return best value and model of step times as if pending trials had run as expected."""
        best, model = self.best_value(), self.step_times()
        # Without this, concurrent slots would all get neighbours of the same candidate.
        pending = [job.scored for job in self.pending()]
        if best is not None and self.setup.goal == "throughput":
            for each in pending:
                prediction = each.prediction
                if fits_budget(prediction, self.pruner.budget_bytes, self.pruner.calibration):
                    samples = prediction.samples_per_s * prediction.step_s
                    best = min(best, model.step_s(each)[0] / samples)
        return best, model.believing(pending)

    def median_wall_s(self) -> float:
        """Return the median wall time of a trial that fits, 0 before there is one."""
        return statistics.median(
            [each.result.wall_s for each in self.finished if each.result.status == "ok"] or [0.0]
        )

    # -- running ---------------------------------------------------------------------------------------------

    def drive(self, next_job: Callable[[], Job | None], *, alone: bool = False) -> None:
        """Run the jobs of `next_job` until it returns None and none is running, or the search is stopped.

        `next_job` is asked again after each result. With `alone`, one job runs at a time and has the whole
        machine, so that times can be compared.
        """
        waiting: Job | None = None
        exhausted = False
        while not self._stop_asked():
            self._note_pause()
            while (
                not exhausted
                and not self._paused
                and not self.stopped
                and len(self.running) < (1 if alone else self.slots)
            ):
                # Kept if host memory has no room for it yet: a proposal must not be lost or made twice.
                waiting = waiting or next_job()
                exhausted = waiting is None
                if waiting is None or not self._has_room(waiting):
                    break
                job, waiting = waiting, None
                self._start(job, alone=alone)
            if not self.running and (exhausted or self.stopped):
                break
            for happened in self._executor.wait(_POLL_S):
                if isinstance(happened, Progress):
                    self._log.write(
                        search_events.TrialProgress(
                            number=happened.number, stage=happened.stage, device_bytes=happened.device_bytes
                        )
                    )
                # Not of a job that was cancelled meanwhile: that one has its record.
                elif happened.number in self.running:
                    exhausted = False
                    # A result changes what is proposed, so `next_job` is asked again.
                    self._held.append((self.running.pop(happened.number), happened))
                    self._finish_held()
            if self._paused and not self.running:
                time.sleep(_POLL_S)
        self._finish_held()
        if waiting is not None and waiting.number is not None:
            # The sampler counts it as running, and a resumed search would start it.
            self._sampler.fail(waiting.number, self.stopped)

    def run_all(self, jobs: Iterable[Job], *, alone: bool = False) -> None:
        """Run the jobs in order."""
        waiting = iter(list(jobs))
        self.drive(lambda: next(waiting, None), alone=alone)

    def _finish_held(self) -> None:
        """Record results; those of candidates wait while a baseline runs whose losses they must share."""
        for is_baseline in (True, False):
            if not is_baseline and self.reference is None and self._runs_baseline():
                return
            for each in [each for each in self._held if is_baseline == (each[0].role == "baseline")]:
                self._held.remove(each)
                self._finish(*each)

    def _runs_baseline(self) -> bool:
        return any(job.role == "baseline" for job in self.running.values())

    def _has_room(self, job: Job) -> bool:
        """Return whether host memory holds `job` and what runs; the only job is always tried."""
        if not self.running or self._host_room_bytes is None:
            return True
        needed = sum(self._host_bytes(each) for each in (job, *self.running.values()))
        return needed <= self._host_room_bytes

    def _host_bytes(self, job: Job) -> int:
        """Return the bytes of host memory that the ranks of a trial on this machine are predicted to need."""
        prediction = job.scored.prediction
        # On CPU the device tier is host memory as well.
        on_host = prediction.peak_allocated_bytes if self.setup.device == "cpu" else 0
        return self.setup.ranks * (on_host + prediction.host_peak_bytes + _PROCESS_BYTES)

    def run_outside_study(self, trial: Trial) -> TrialResult | None:
        """Run a trial outside of the study; return None if the search is stopped meanwhile."""
        self._executor.submit(trial)
        while not self.control.stopping:
            for happened in self._executor.wait(_POLL_S):
                if isinstance(happened, TrialResult) and happened.number == trial.number:
                    return happened
        self._executor.cancel(trial.number)
        return None

    def log_text(self, text: str, *, warning: bool = False) -> None:
        """Write a line to the log that belongs to no trial."""
        self._log.write(search_events.Note(text=text, level="warning" if warning else "info"))

    def _stop_asked(self) -> bool:
        for number in self.control.take_kills():
            if number in self.running:
                self._cancel(number, "ended by you")
        if self.control.stopping or self.broken:
            self.stopped = self.stopped or self.broken or "stopped by you"
            for number in list(self.running):
                self._cancel(number, self.stopped)
            return True
        return False

    def _note_pause(self) -> None:
        if self.control.paused != self._paused:
            self._paused = self.control.paused
            self._log.write(search_events.Paused() if self._paused else search_events.Resumed())

    def _cancel(self, number: int, reason: str) -> None:
        self._executor.cancel(number)
        del self.running[number]
        self._sampler.fail(number, reason)
        self._log.write(search_events.TrialCancelled(number=number, reason=reason))

    def _start(self, job: Job, *, alone: bool) -> None:
        number = job.number
        if number is None:
            number, _ = self._sampler.ask(job.scored.choice, role=job.role, name=job.name)
        self.tried.add(job.scored.key)
        self.running[number] = job
        prediction, choice = job.scored.prediction, job.scored.choice
        self._log.write(
            search_events.TrialStarted(
                number=number,
                role=job.role,
                name=job.name,
                settings=choice.dump(),
                summary=choice.summary,
                predicted_peak_bytes=prediction.peak_allocated_bytes,
                predicted_step_s=self._expected_step_s(job.scored),
            )
        )
        self._executor.submit(self._trial(number, job, alone=alone))

    def _trial(self, number: int, job: Job, *, alone: bool) -> Trial:
        setup, choice = self.setup, job.scored.choice
        expected = self._expected_step_s(job.scored)
        measure_s = _MEASURE_S * (2 if job.role in _DECISIVE else 1)
        steps = min(max(round(measure_s / expected) if expected else _STEPS[1], _STEPS[0]), _STEPS[1])
        slowest = max(
            (each.result.wall_s for each in self.finished if each.result.status == "ok"), default=0.0
        )
        samples = choice.execution.micro_batch or 1
        # Clocking disturbs the step, so op times are taken once, from a baseline if there is one.
        clocked = job.role == "baseline" or not (self.op_times() or self._runs_baseline())
        return Trial(
            number=number,
            workload=self.options.workload,
            config=trial_config(setup, choice).document(),
            device=setup.device,
            ranks=setup.ranks,
            budget_bytes=setup.budget_bytes,
            steps=steps,
            seed=self.options.seed,
            global_batch=samples * choice.execution.accumulate * setup.ranks,
            # Wall times vary with compile and first touch of files; only a hang takes five times the slowest.
            deadline_s=max(60.0, 5 * slowest) if slowest else self.options.trial_deadline_s,
            clock_ops=clocked and not choice.execution.compile,
            alone=alone or self.slots == 1,
            env=choice.env(),
        )

    def _expected_step_s(self, scored: Scored) -> float:
        return scored.prediction.step_s * self.pruner.calibration.step_correction

    # -- results ---------------------------------------------------------------------------------------------

    def _finish(self, job: Job, raw: TrialResult) -> None:
        done = FinishedTrial(job, raw.number, self._validated(job, raw))
        # In this order (rule 1): a crash after `_tell` is mended on resume, one after `_write` could not be.
        self._tell(done)
        self._write(done)
        self._absorb(done)
        self._after(done)

    def _validated(self, job: Job, result: TrialResult) -> TrialResult:
        """Return `result`, marked invalid with the reason if it may not count (rule 2)."""
        if result.status != "ok":
            return result
        budget, peak = self.setup.budget_bytes, result.peak_allocated_bytes
        if budget is not None and peak is not None and peak > budget:
            return result.model_copy(
                update={"status": "oom", "reason": f"peak {format_bytes(peak)} exceeds the budget"}
            )
        if result.step_s is None or peak is None:
            return result.model_copy(
                update={"status": "crash", "reason": "the trial reported no step time or no peak"}
            )
        if (
            self.reference is None or self.setup.goal == "batch"
        ):  # other micro-batches without accumulation train on other data
            return result
        tolerance = loss_tolerance(
            job.scored.choice,
            self.reference.job.scored.choice,
            unit=self.unit,
            draws_random=self._draws_random,
        )
        wrong = tolerance is not None and losses_disagree(
            result.losses, self.reference.result.losses, tolerance
        )
        return (
            result.model_copy(update={"status": "unfit", "reason": f"invalid: {wrong}"}) if wrong else result
        )

    def _tell(self, done: FinishedTrial) -> None:
        job, result, goal = done.job, done.result, self.setup.goal
        value = Measured(job.scored.choice, (result,)).value(goal) if result.status == "ok" else None
        over = 0.0
        if result.status == "oom":
            # The sampler orders infeasible trials by this excess; 1 is the least that is not feasible.
            over = float(max(job.scored.prediction.peak_allocated_bytes - (self.setup.budget_bytes or 0), 1))
        self._sampler.tell(done.number, result, value, over)

    def _write(self, done: FinishedTrial) -> None:
        prediction, choice = done.job.scored.prediction, done.job.scored.choice
        self._log.write(
            search_events.TrialFinished(
                number=done.number,
                role=done.job.role,
                name=done.job.name,
                settings=choice.dump(),
                summary=choice.summary,
                predicted_peak_bytes=prediction.peak_allocated_bytes,
                predicted_step_s=self._expected_step_s(done.job.scored),
                result=done.result,
            )
        )

    def _absorb(self, done: FinishedTrial) -> None:
        """Update the state with a result, new or restored from the study."""
        self.finished.append(done)
        self.tried.add(done.job.scored.key)
        self._update_refused_sets()
        result, prediction = done.result, done.job.scored.prediction
        if result.status == "oom":
            self.pruner = self.pruner.after_failure(prediction)
        if result.status == "ok":
            baseline_is_due = self.reference is None or (
                done.job.role == "baseline" and self.reference.job.role != "baseline"
            )
            if baseline_is_due:
                self.reference = done
            if result.op_times:
                self._recalibrate()  # op times change the predictions of earlier trials too
            else:
                calibration = self.pruner.calibration.add(
                    prediction, result.peak_allocated_bytes, result.step_s
                )
                self.pruner = self.pruner.calibrated(calibration)
            if done.job.role == "audit" and result.peak_allocated_bytes:
                # After the calibration: the audit widens the interval that trials gave.
                self.pruner = self.pruner.after_audit(prediction, result.peak_allocated_bytes)

    def op_times(self, *, without: int | None = None, quiet: bool = False) -> list[OpTime]:
        """Return the op times measured by all trials, or by all but one, or by those on a quiet machine."""
        return [
            row
            for each in self.finished
            if each.number != without and not (quiet and self.is_disturbed(each.result))
            for row in each.result.op_times
        ]

    def rates(self) -> dict[str, float]:
        """Return the median of each constant that trials measured."""
        found: dict[str, list[float]] = {}
        for each in self.finished:
            for name, value in each.result.rates.items():
                found.setdefault(name, []).append(value)
        return {name: statistics.median(values) for name, values in found.items()}

    def _recalibrate(self) -> None:
        """Predict all finished trials again and calibrate by them."""
        # A trial is predicted without its own op times, so that its error is not hidden.
        scorer, calibration = self.setup.scorer, Calibration()
        scorer.learn(self.op_times(), self.rates())
        for i, each in enumerate(self.finished):
            # None keeps what `learn` above has set: without op times of its own nothing is hidden.
            taught_by = self.op_times(without=each.number) if each.result.op_times else None
            scored = scorer.again(each.job.scored, taught_by=taught_by)
            self.finished[i] = replace(each, job=replace(each.job, scored=scored))
            if each.result.status == "ok":
                calibration = calibration.add(
                    scored.prediction, each.result.peak_allocated_bytes, each.result.step_s
                )
        self.pruner = self.pruner.calibrated(calibration)

    def step_times(self) -> StepTimeModel:
        """Return the model of step times by the trials that fit."""
        ok = [each for each in self.finished if each.result.status == "ok" and each.result.step_s]
        return StepTimeModel(
            tuple(
                Observed(each.job.scored, each.result.step_s or 0.0, self._noise(each.result)) for each in ok
            )
        )

    def expected(self, measured: Sequence[Measured]) -> dict[Choice, tuple[float, float]]:
        """Return mean and standard deviation of the logarithm of seconds per sample, by all trials."""
        known = {each.job.scored.choice: each.job.scored for each in self.finished}
        scored = [known[each.choice] for each in measured]
        mean, sd = self.step_times().posterior(scored)
        log_s = mean - np.log([each.prediction.samples_per_s for each in scored])
        return {
            each.choice: (float(at), float(error)) for each, at, error in zip(scored, log_s, sd, strict=True)
        }

    def possibly_slowed_down(self) -> set[Choice]:
        """Return choices whose only trial may have been slowed down by others, and that may be the best."""
        best = self.best_value()
        gains = self.step_times().repeat_gains(best) if best is not None else {}
        return {
            each.job.scored.choice
            for each in self.finished
            if gains.get(each.job.scored.key, 0.0) > WORTH_A_ROUND
        }

    def _noise(self, result: TrialResult) -> float:
        """Return the relative uncertainty of a step time: unsteady steps, other load, a changed machine."""
        return relative_spread(result) + result.other_load + abs(math.log(self._slowdown(result)))

    def _slowdown(self, result: TrialResult) -> float:
        """Return the time of the reference op in a trial relative to the median of all trials."""
        # The median, not the minimum: one boosted measurement must not make all others look slow.
        known = [each.result.reference_s for each in self.finished if each.result.reference_s]
        return result.reference_s / statistics.median(known) if result.reference_s and known else 1.0

    def is_disturbed(self, result: TrialResult) -> bool:
        """Return whether other load or a changed machine makes a trial's time doubtful."""
        return result.other_load > BUSY or abs(math.log(self._slowdown(result))) > BUSY

    def _disturbance(self, result: TrialResult) -> str:
        """Return the causes for which `is_disturbed` holds."""
        slowdown, found = self._slowdown(result), []
        if result.other_load > BUSY:
            found.append(f"others used {result.other_load:.0%} of its cores")
        if abs(math.log(slowdown)) > BUSY:
            found.append(f"a fixed matrix product took {slowdown:.2f} times as long as in the median trial")
        return " and ".join(found)

    def refuses(self, choice: Choice) -> bool:
        """Return whether `choice` has all techniques of a set that refused the live model in two trials."""
        return any(struck <= kinds(choice) for struck in self._struck)

    def _update_refused_sets(self) -> None:
        """Recompute the refused sets after each result: a set that worked once is removed."""
        refused: dict[str, list[frozenset[Kind]]] = {}
        for each in self.finished:
            if each.result.refusal is not None:
                refused.setdefault(each.result.refusal, []).append(kinds(each.job.scored.choice))
        worked = (
            {kinds(each.job.scored.choice) for each in self.finished if each.result.status == "ok"}
            if refused
            else set()
        )
        self._struck = {
            struck for trials in refused.values() for struck in refusing_techniques(trials, worked)
        }

    def _after(self, done: FinishedTrial) -> None:
        if done.result.status == "ok":
            self._log.write(self._calibrated())
            if self.is_disturbed(done.result) and not self._noted_disturbance:
                self._noted_disturbance = True
                self.log_text(
                    f"the machine was not quiet during trial {done.number}: {self._disturbance(done.result)}",
                    warning=True,
                )
        verdict = judge(self.measured(), self.setup.goal)
        if verdict is not None and verdict.winner.number != self._best_number:
            winner = verdict.winner
            self._best_number = winner.number
            self._log.write(
                search_events.BestChanged(
                    number=winner.number,
                    summary=winner.choice.summary,
                    peak_bytes=winner.peak_bytes,
                    samples_per_s=winner.samples_per_s,
                )
            )
        # The same crash again and again is a fault of the environment or the model, not of a candidate.
        cause = done.result.crash_cause
        self._crashes = [] if cause is None else [*(each for each in self._crashes if each == cause), cause]
        if len(self._crashes) >= BREAKER:
            self.broken = done.result.reason

    def _calibrated(self) -> search_events.Calibrated:
        correction = self.pruner.calibration.step_correction
        peaks, steps = [], []
        for each in self.finished:
            prediction, result = each.job.scored.prediction, each.result
            if result.status == "ok" and result.peak_allocated_bytes and result.step_s:
                peaks.append(abs(prediction.peak_allocated_bytes / result.peak_allocated_bytes - 1))
                steps.append(abs(prediction.step_s * correction / result.step_s - 1))
        return search_events.Calibrated(
            peak_error=statistics.median(peaks), step_error=statistics.median(steps), n_trials=len(peaks)
        )

    # -- resuming --------------------------------------------------------------------------------------------

    def restore(self, stored: Iterable[StoredTrial], logged: set[int], started: set[int]) -> list[Job]:
        """Take over the trials of an earlier process (rule 1).

        Args:
            stored: Trials of the study.
            logged: Numbers of those whose result is in the event log.
            started: Numbers of those that the event log says were started.

        Returns:
            Those that were running, to run them again.
        """
        again = []
        for trial in stored:
            # No process of it is left, so Optuna must not count it as running.
            if trial.outcome == "running":
                self._sampler.fail(trial.number, "its process ended")
            if trial.settings is None or trial.outcome == "pruned":
                continue
            scored = self.setup.scorer.score(Choice.from_document(trial.settings))
            if isinstance(scored, Reason):
                continue
            role: search_events.Role = trial.role  # type: ignore[assignment]  # written by this class
            job = Job(role, self.setup.scorer.refined(scored), trial.name)
            if trial.result is not None:
                done = FinishedTrial(job, trial.number, trial.result)
                if trial.number not in logged:
                    self._write(done)
                self._absorb(done)
            # A suggestion that was not started yet may be one to prune, such as a candidate that ran.
            elif trial.outcome == "running" and role in _COUNTED and trial.number in started:
                again.append(job)
        return again

    def rebuild(self, finished: Iterable[search_events.TrialFinished]) -> None:
        """Fill an empty study from the event log; trials keep their numbers."""
        number = 0
        for event in sorted(finished, key=lambda each: each.number):
            scored = self.setup.scorer.score(Choice.from_document(event.settings))
            if isinstance(scored, Reason):
                continue
            # Numbers of pruned candidates, which the log does not repeat, remain unused.
            while number < event.number:
                number = self._sampler.skip() + 1
            job = Job(event.role, scored, event.name)
            number, _ = self._sampler.ask(scored.choice, role=job.role, name=job.name)
            self._tell(FinishedTrial(job, number, event.result.model_copy(update={"number": number})))
            number += 1
