"""Runs jobs on an executor and keeps the books: the only writer of the study and of the event log.

Rules:
1. A result is told to the study first, then written to the log; what a crash left out of the log is added on resume.
2. Losses are compared with those of the first guard that fits; a result that disagrees is kept but never wins.
3. The same crash `BREAKER` times in a row stops the search: it is the user's code or the machine, not a setting.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from memtune.autotune import events
from memtune.autotune.candidates import Choice
from memtune.autotune.control import Control
from memtune.autotune.effects import Effects, Kind, effects, kinds
from memtune.autotune.judge import Measured, judge, loss_tolerance, losses_disagree
from memtune.autotune.options import SearchOptions
from memtune.autotune.pruning import Pruner
from memtune.autotune.refusals import blamed
from memtune.autotune.sampler import Sampler, StoredTrial
from memtune.autotune.scoring import Scored
from memtune.autotune.setup import Setup
from memtune.autotune.simulate import Calibration
from memtune.config import TunedConfig
from memtune.executors.base import Executor, Progress, Trial, TrialResult
from memtune.op_costs import matmul_dtype
from memtune.runtime.op_times import OpTime
from memtune.technique import Plan, Reason
from memtune.units import format_bytes

BREAKER = 5
_MEASURE_S = 2.0
"""Measured steps together take about this long, within `_STEPS`."""
_STEPS = (3, 20)
_COUNTED = ("guard", "search", "audit")
_DECISIVE = ("repeat", "confirm")
"""What fails in one of these is out, however it did before."""
_POLL_S = 0.25


@dataclass(frozen=True)
class Job:
    """A trial to run and why."""

    role: events.Role
    scored: Scored
    name: str = ""
    number: int | None = None


@dataclass(frozen=True)
class Finished:
    """A trial with its result, as the search believes it."""

    job: Job
    number: int
    result: TrialResult


class Driver:
    """State of a search that grows by results.

    Attributes:
        finished: All trials with a result, in order.
        pruner: With the calibration so far.
        stopped: Why no more trials are run, empty while they are.
        broken: The reason of the crashes that stopped the search.
        finalists: Keys of what runs again in turn; once a round of all of them is done, only those rounds decide.
        unit: One rounding of the dtype that the model computes in.
        reference: The trial with whose losses others are compared: the first guard that fits, else the first trial.
    """

    def __init__(
        self,
        setup: Setup,
        options: SearchOptions,
        sampler: Sampler,
        executor: Executor,
        log: events.EventLog,
        control: Control,
        began_s: float | None = None,
    ) -> None:
        self.setup, self.options, self.control = setup, options, control
        self.pruner = Pruner(setup.budget_bytes)
        self.finished: list[Finished] = []
        self.running: dict[int, Job] = {}
        self.tried: set[str] = set()
        self._struck: set[frozenset[Kind]] = set()
        self.finalists: set[str] = set()
        self.stopped = self.broken = ""
        self._sampler, self._executor, self._log = sampler, executor, log
        self.reference: Finished | None = None
        self.executor_name = executor.name
        self._best_number: int | None = None
        self._crashes: list[str] = []
        self._started_s = time.monotonic() if began_s is None else began_s
        self._paused = False
        self.unit = 2.0**-8 if matmul_dtype(setup.recording.step) in ("bfloat16", "float16") else 2.0**-24
        self._draws_random = bool(setup.recording.step.op_rng.any())

    # -- what is known ---------------------------------------------------------------------------------------------------

    @property
    def n_trials(self) -> int:
        """Trials that count against the limit, running ones too."""
        done = sum(each.job.role in _COUNTED for each in self.finished)
        return done + sum(job.role in _COUNTED for job in self.running.values())

    @property
    def elapsed_s(self) -> float:
        """Since the search was asked for, recording and scoring included."""
        return time.monotonic() - self._started_s

    def measured(self) -> list[Measured]:
        """What fits and may be believed, all trials of a choice together; `rounds` of those that ran in turn to the end."""
        rejected = {each.job.scored.key for each in self.finished if each.result.status != "ok" and each.job.role in _DECISIVE}
        groups: dict[str, list[Finished]] = {}
        for each in self.finished:
            if each.result.status == "ok" and each.job.scored.key not in rejected:
                groups.setdefault(each.job.scored.key, []).append(each)
        repeats = {key: [each.result for each in group if each.job.role == "repeat"] for key, group in groups.items()}
        complete = min((len(repeats.get(key, ())) for key in self.finalists - rejected), default=0)
        return [
            Measured(
                group[0].job.scored.choice,
                tuple(each.result for each in group),
                guard=next((each.job.name for each in group if each.job.role == "guard"), ""),
                rounds=tuple(repeats[key][:complete]) if key in self.finalists else (),
            )
            for key, group in groups.items()
        ]

    def best_value(self) -> float | None:
        """Value of the best that was measured, None before anything fits."""
        return min((each.value(self.setup.goal) for each in self.measured()), default=None)

    def median_wall_s(self) -> float:
        """How long a trial takes that fits, 0 before there is one."""
        return statistics.median([each.result.wall_s for each in self.finished if each.result.status == "ok"] or [0.0])

    # -- running ---------------------------------------------------------------------------------------------------------

    def drive(self, next_job: Callable[[], Job | None]) -> None:
        """Run what `next_job` gives until it gives None and nothing runs any more, or the search is stopped."""
        exhausted = False
        while not self._stop_asked():
            self._note_pause()
            while not exhausted and not self._paused and not self.stopped and len(self.running) < self._executor.slots:
                job = next_job()
                exhausted = job is None
                if job is not None:
                    self._start(job)
            if not self.running and (exhausted or self.stopped):
                return
            for happened in self._executor.wait(_POLL_S):
                if isinstance(happened, Progress):
                    self._log.write(
                        events.TrialProgress(number=happened.number, stage=happened.stage, device_bytes=happened.device_bytes)
                    )
                elif happened.number in self.running:
                    self._finish(self.running.pop(happened.number), happened)
            if self._paused and not self.running:
                time.sleep(_POLL_S)

    def run_all(self, jobs: Iterable[Job]) -> None:
        """Run the jobs in order."""
        waiting = iter(list(jobs))
        self.drive(lambda: next(waiting, None))

    def aside(self, trial: Trial) -> TrialResult | None:
        """Run a trial that is no part of the study; None if the search is stopped meanwhile."""
        self._executor.submit(trial)
        while not self.control.stopping:
            for happened in self._executor.wait(_POLL_S):
                if isinstance(happened, TrialResult) and happened.number == trial.number:
                    return happened
        self._executor.cancel(trial.number)
        return None

    def note(self, text: str, *, warning: bool = False) -> None:
        """One line in the log that belongs to no trial."""
        self._log.write(events.Note(text=text, level="warning" if warning else "info"))

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
            self._log.write(events.Paused() if self._paused else events.Resumed())

    def _cancel(self, number: int, reason: str) -> None:
        self._executor.cancel(number)
        del self.running[number]
        self._sampler.fail(number, reason)
        self._log.write(events.TrialCancelled(number=number, reason=reason))

    def _start(self, job: Job) -> None:
        number = job.number
        if number is None:
            number, _ = self._sampler.ask(job.scored.choice, role=job.role, name=job.name)
        self.tried.add(job.scored.key)
        self.running[number] = job
        prediction, choice = job.scored.prediction, job.scored.choice
        self._log.write(
            events.TrialStarted(
                number=number,
                role=job.role,
                name=job.name,
                settings=choice.dump(),
                summary=choice.summary,
                predicted_peak_bytes=prediction.peak_allocated_bytes,
                predicted_step_s=self._expected_step_s(job.scored),
            )
        )
        self._executor.submit(self._trial(number, job))

    def _trial(self, number: int, job: Job) -> Trial:
        setup, choice = self.setup, job.scored.choice
        expected = self._expected_step_s(job.scored)
        steps = min(max(round(_MEASURE_S / expected) if expected else _STEPS[1], _STEPS[0]), _STEPS[1])
        slowest = max((each.result.wall_s for each in self.finished if each.result.status == "ok"), default=0.0)
        samples = choice.execution.micro_batch or 1
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
            deadline_s=max(60.0, 5 * slowest) if slowest else self.options.trial_deadline_s,
            clock_ops=job.role == "guard" and not choice.execution.compile,
            env=choice.env(),
        )

    def _expected_step_s(self, scored: Scored) -> float:
        return scored.prediction.step_s * self.pruner.calibration.step_correction

    # -- results ---------------------------------------------------------------------------------------------------------

    def _finish(self, job: Job, raw: TrialResult) -> None:
        done = Finished(job, raw.number, self._believed(job, raw))
        self._tell(done)
        self._write(done)
        self._absorb(done)
        self._after(done)

    def _believed(self, job: Job, result: TrialResult) -> TrialResult:
        """`result`, or the reason why it does not count (Rule 2)."""
        if result.status != "ok":
            return result
        budget, peak = self.setup.budget_bytes, result.peak_allocated_bytes
        if budget is not None and peak is not None and peak > budget:
            return result.model_copy(update={"status": "oom", "reason": f"peak {format_bytes(peak)} exceeds the budget"})
        if result.step_s is None or peak is None:
            return result.model_copy(update={"status": "crash", "reason": "the trial reported no step time or no peak"})
        if self.reference is None or self.setup.goal == "batch":  # other micro-batches without accumulation train on other data
            return result
        tolerance = loss_tolerance(
            job.scored.choice, self.reference.job.scored.choice, unit=self.unit, draws_random=self._draws_random
        )
        wrong = tolerance is not None and losses_disagree(result.losses, self.reference.result.losses, tolerance)
        return result.model_copy(update={"status": "unfit", "reason": f"invalid: {wrong}"}) if wrong else result

    def _tell(self, done: Finished) -> None:
        job, result, goal = done.job, done.result, self.setup.goal
        value = Measured(job.scored.choice, (result,)).value(goal) if result.status == "ok" else None
        over = 0.0
        if result.status == "oom":
            over = float(max(job.scored.prediction.peak_allocated_bytes - (self.setup.budget_bytes or 0), 1))
        self._sampler.tell(done.number, result, value, over)

    def _write(self, done: Finished) -> None:
        prediction, choice = done.job.scored.prediction, done.job.scored.choice
        self._log.write(
            events.TrialFinished(
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

    def _absorb(self, done: Finished) -> None:
        """Learn from a result; the same for one that just came and one that a resumed study holds."""
        self.finished.append(done)
        self.tried.add(done.job.scored.key)
        self._strike()
        result, prediction = done.result, done.job.scored.prediction
        if result.status == "ok":
            guard_is_due = self.reference is None or (done.job.role == "guard" and self.reference.job.role != "guard")
            if guard_is_due:
                self.reference = done
            if result.op_times:
                self._learn()
            else:
                calibration = self.pruner.calibration.add(prediction, result.peak_allocated_bytes, result.step_s)
                self.pruner = self.pruner.calibrated(calibration)
            if done.job.role == "audit" and result.peak_allocated_bytes:
                self.pruner = self.pruner.after_audit(prediction, result.peak_allocated_bytes)

    def op_times(self, *, without: int | None = None) -> list[OpTime]:
        """What all trials, or all but one, told of their ops."""
        return [row for each in self.finished if each.number != without for row in each.result.op_times]

    def _learn(self) -> None:
        """Predict anew what has run, trials that told of their ops without what they told themselves, and calibrate by that."""
        scorer, calibration = self.setup.scorer, Calibration()
        scorer.learn(self.op_times())
        for i, each in enumerate(self.finished):
            taught_by = self.op_times(without=each.number) if each.result.op_times else None
            scored = scorer.again(each.job.scored, taught_by=taught_by)
            self.finished[i] = replace(each, job=replace(each.job, scored=scored))
            if each.result.status == "ok":
                calibration = calibration.add(scored.prediction, each.result.peak_allocated_bytes, each.result.step_s)
        self.pruner = self.pruner.calibrated(calibration)

    def effects(self) -> Effects:
        """What the trials say of their techniques."""
        ok = [(each.job.scored, each.result.step_s) for each in self.finished if each.result.status == "ok"]
        return effects((kinds(scored.choice), step_s / scored.prediction.step_s) for scored, step_s in ok if step_s)

    def refuses(self, choice: Choice) -> bool:
        """Whether `choice` has all that two trials had in common whose techniques refused the live model for the same reason."""
        return any(struck <= kinds(choice) for struck in self._struck)

    def _strike(self) -> None:
        """Found anew with each result: what worked after all is struck out no more."""
        refused: dict[str, list[frozenset[Kind]]] = {}
        for each in self.finished:
            if each.result.refusal is not None:
                refused.setdefault(each.result.refusal, []).append(kinds(each.job.scored.choice))
        worked = {kinds(each.job.scored.choice) for each in self.finished if each.result.status == "ok"} if refused else set()
        self._struck = {struck for trials in refused.values() for struck in blamed(trials, worked)}

    def _after(self, done: Finished) -> None:
        if done.result.status == "ok":
            self._log.write(self._calibrated())
        verdict = judge(self.measured(), self.setup.goal)
        if verdict is not None and verdict.winner.number != self._best_number:
            winner = verdict.winner
            self._best_number = winner.number
            self._log.write(
                events.BestChanged(
                    number=winner.number,
                    summary=winner.choice.summary,
                    peak_bytes=winner.peak_bytes,
                    samples_per_s=winner.samples_per_step / winner.step_s,
                )
            )
        cause = re.sub(r"[0-9]+", "#", done.result.reason) if done.result.status == "crash" else None
        self._crashes = [] if cause is None else [*(each for each in self._crashes if each == cause), cause]
        if len(self._crashes) >= BREAKER:
            self.broken = done.result.reason

    def _calibrated(self) -> events.Calibrated:
        correction = self.pruner.calibration.step_correction
        peaks, steps = [], []
        for each in self.finished:
            prediction, result = each.job.scored.prediction, each.result
            if result.status == "ok" and result.peak_allocated_bytes and result.step_s:
                peaks.append(abs(prediction.peak_allocated_bytes / result.peak_allocated_bytes - 1))
                steps.append(abs(prediction.step_s * correction / result.step_s - 1))
        return events.Calibrated(peak_error=statistics.median(peaks), step_error=statistics.median(steps), n_trials=len(peaks))

    # -- resuming --------------------------------------------------------------------------------------------------------

    def restore(self, stored: Iterable[StoredTrial], logged: set[int]) -> list[Job]:
        """Take over the trials of an earlier process (Rule 1); returns those that it left running, to be run again."""
        again = []
        for trial in stored:
            if trial.outcome == "running":
                self._sampler.fail(trial.number, "its process ended")
            if trial.settings is None or trial.outcome == "pruned":
                continue
            scored = self.setup.scorer.score(Choice.from_document(trial.settings))
            if isinstance(scored, Reason):
                continue
            role: events.Role = trial.role  # type: ignore[assignment]  # written by this class
            job = Job(role, self.setup.scorer.refined(scored), trial.name)
            if trial.result is not None:
                done = Finished(job, trial.number, trial.result)
                if trial.number not in logged:
                    self._write(done)
                self._absorb(done)
            elif trial.outcome == "running" and role in _COUNTED:
                again.append(job)
        return again

    def rebuild(self, told: Iterable[events.TrialFinished]) -> None:
        """Fill an empty study from the event log; trials get new numbers in it."""
        for event in told:
            scored = self.setup.scorer.score(Choice.from_document(event.settings))
            if isinstance(scored, Reason):
                continue
            job = Job(event.role, scored, event.name)
            number, _ = self._sampler.ask(scored.choice, role=job.role, name=job.name)
            done = Finished(job, number, event.result.model_copy(update={"number": number}))
            self._tell(done)


def trial_config(setup: Setup, choice: Choice) -> TunedConfig:
    """The config of `choice` with its plans, as far as it is known before a trial."""
    candidate = setup.scorer.rewriter.candidate(choice)
    plans: dict[str, Plan] = {} if isinstance(candidate, Reason) else dict(candidate.plans)
    return TunedConfig(settings=choice, made_for=setup.made_for, plan=plans)
