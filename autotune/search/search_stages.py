"""The stages of a search, from its first trial to the config it writes."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from memtune.autotune.predict import SearchErrors, store_search
from memtune.autotune.search import search_events
from memtune.autotune.search.driver import Driver, FinishedTrial, Job
from memtune.autotune.search.numerics_check import numerics
from memtune.autotune.search.outcome import SearchOutcome, nothing_fits, numbers, trial_rows, tuned_config
from memtune.autotune.search.predictions import predicted, timelines
from memtune.autotune.search.study_store import RESULT, TIMELINES, StudyFolder
from memtune.autotune.search.trial_verdict import Verdict, finalists, finalists_to_repeat, judge
from memtune.autotune.space import (
    Baseline,
    Choice,
    Proposer,
    Sampler,
    Scored,
    Scores,
    baselines,
    fits_budget,
    predict_again,
)
from memtune.errors import MemtuneError, NothingFits, UsageError
from memtune.hardware import BUSY
from memtune.technique import Reason

Ended = Literal["done", "stopped", "interrupted"]
_DRIFT = 0.05
"""Relative change of a baseline's time between start and end that flags the study."""

_TRIALS_PER_BASELINE = 4
"""One baseline is run before any candidate per this many trials; the others have to be promising."""
_TRIALS_FOR_AUDIT = 8
"""Least number of trials of which one is spent on the audit."""
_MORE_ROUNDS = 4
"""Rounds beyond `repeats` while the finalists cannot be distinguished."""


@dataclass
class Stages:
    """One search from its first trial to its last; each stage is a method, `run` is their order."""

    driver: Driver
    sampler: Sampler
    scores: Scores
    folder: StudyFolder
    log: search_events.EventLog
    resumed: bool
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        setup = self.driver.setup
        self._baseline_names: dict[str, str] = {}
        self._proposer = Proposer(self.scores, setup.scorer, self.sampler, setup.goal, self._pruned)

    def run(self, logged: set[int], started: set[int]) -> SearchOutcome:
        """Run all stages after `logged` results of `started` trials; the log has what ends the search."""
        try:
            with self.driver.control.catch_signals():
                self.driver.control.begin()
                self._announce()
                # Jobs that an earlier process began and did not end.
                again = self.driver.restore(self.sampler.trials(), logged, started)
                self._explore([*self._baselines(), *(job for job in again if job.role != "baseline")])
                self._largest_batch()
                self._repeats()
                verdict, confirmed = self._confirmed()
                return self._end(verdict, confirmed, self._numerics(verdict))
        except MemtuneError as error:
            is_empty = isinstance(error, NothingFits)
            self.log.write(
                search_events.SearchFinished(
                    status="nothing_fits" if is_empty else "failed", message=error.what
                )
            )
            raise

    # -- stages ----------------------------------------------------------------------------------------------

    def _announce(self) -> None:
        setup, options = self.driver.setup, self.driver.options
        if not self.resumed:
            self.log.write(
                search_events.SearchStarted(
                    study=self.folder.name,
                    workload=setup.workload.path.name,
                    device=setup.device,
                    ranks=setup.ranks,
                    slots=self.driver.slots,
                    executor=self.driver.executor_name,
                    goal=setup.goal,
                    budget_bytes=setup.budget_bytes,
                    max_trials=options.trials,
                    time_limit_s=options.time_s,
                    seed=options.seed,
                    n_parameters=setup.made_for.parameters,
                    parameter_bytes=setup.parameter_bytes,
                    global_batch=setup.global_batch,
                    hardware=setup.hardware.title,
                )
            )
        step = setup.recording.step
        self.log.write(
            search_events.Recorded(
                rung=setup.recording.rung,
                record_s=setup.recording.record_s,
                n_ops=step.ops.n,
                blocks=len(step.blocks),
                plain_peak_bytes=self._plain_peak_bytes(),
            )
        )
        self.log.write(
            search_events.CandidatesScored(
                n_candidates=self.scores.n_candidates,
                n_merged=self.scores.n_merged,
                n_pruned=self._n_pruned(),
                n_unfit=self.scores.n_unfit,
                score_s=self.scores.score_s,
                refused=dict(self.scores.unfit),
                not_used={name: str(reason) for name, reason in setup.space.unfit.items()},
            )
        )
        for text in setup.recording.notes:
            level: Literal["info", "detail"] = "info" if text in setup.advice else "detail"
            self.log.write(search_events.Note(text=text, level=level))
        for text in setup.space.notes:
            self.driver.log_text(text)
        if setup.other_load > BUSY:
            self.driver.log_text(
                f"this machine is busy: others use {setup.other_load:.0%} of its cores; times will be longer"
                " and vary, and gains below that variation cannot be found",
                warning=True,
            )
        network = self.folder.network()
        if network is not None:
            self.driver.log_text(
                f"the study lies on {network}: run no other search on it from another host", warning=True
            )

    def _plain_peak_bytes(self) -> int:
        plain = self._known_baselines()[0]
        return plain[0].scored.prediction.peak_allocated_bytes if plain else 0

    def _known_baselines(self) -> tuple[list[Baseline], dict[str, Reason]]:
        return baselines(self.driver.setup.scorer, self.driver.setup.global_batch)

    def _baselines(self) -> list[Job]:
        """Return baselines to run that are expected to fit: the user's own setting, then the fastest."""
        # The losses of the first one are the reference. The others are proposed like any candidate, if they
        # may beat what was measured.
        found, refused = self._known_baselines()
        for name, reason in refused.items():
            self.driver.log_text(f"baseline {name} cannot be used: {reason}")
        listed = [each._replace(scored=self._listed(each.scored)) for each in found]
        self._baseline_names = {each.scored.key: each.name for each in listed}
        done = {each.job.name for each in self.driver.finished if each.job.role == "baseline"}
        pruner, options = self.driver.pruner, self.driver.options
        fitting = [
            each
            for each in listed
            if fits_budget(each.scored.prediction, pruner.budget_bytes, pruner.calibration)
        ]
        goal = self.driver.setup.goal
        # "plain" first: its losses are those of the user's own code.
        fitting.sort(key=lambda each: (each.name != "plain", *each.scored.rank_among_levels(goal)))
        # A short search must keep trials for candidates.
        # Left-out baselines remain candidates, and are proposed if they may win.
        first = fitting[: max(1, options.trials // _TRIALS_PER_BASELINE)]
        return [Job("baseline", each.scored, each.name) for each in first if each.name not in done]

    def _note_losses(self) -> None:
        """Warn about a baseline with a non-finite loss."""
        # The search measures time and memory anyway, but the user should know before training.
        for each in self.driver.measured():
            if each.baseline and not all(map(math.isfinite, each.results[0].losses)):
                step = next(
                    i for i, loss in enumerate(each.results[0].losses, start=1) if not math.isfinite(loss)
                )
                self.driver.log_text(
                    f"the loss is {each.results[0].losses[step - 1]} from step {step} on with"
                    f" {each.baseline}, which changes no numbers: check learning rate, data and precision"
                    " before training with the result",
                    warning=True,
                )
                return

    def _listed(self, scored: Scored) -> Scored:
        """Return the entry of the scores for a candidate, with the refined prediction."""
        # Trials are compared with the op-by-op prediction; the coarse one is only a bound.
        refined = self.driver.setup.scorer.refined(self.scores.by_key.get(scored.key, scored))
        self.scores.by_key[scored.key] = refined
        return refined

    def _explore(self, first: list[Job]) -> None:
        """Run the jobs of `first`, then proposals, and one audit after half of the trials."""
        # Side by side if the executor has room: a proposal then expects of pending trials what the posterior
        # does. The losses of a baseline and the op times of the first trials are used as soon as they are
        # there.
        driver, waiting = self.driver, list(first)
        notes: list[Callable[[], None]] = [self._note_losses, self._use_op_times]
        audited: list[int] = []

        def next_job() -> Job | None:
            if waiting:
                return waiting.pop(0)
            # Losses and op times of a baseline: not before it has ended.
            if not any(job.role == "baseline" for job in driver.pending()):
                while notes:
                    notes.pop(0)()
            job = None
            # By half of the trials the interval has trials behind it.
            if not audited and driver.n_trials >= driver.options.trials // 2:
                job = self._audit_job()
            # An audit that fits widens the interval, after which there may be proposals again.
            job = job or self._proposed() or (None if audited else self._audit_job())
            if job is not None and job.role == "audit":
                audited.append(self._n_pruned())
            return job

        driver.drive(next_job)
        for each in [] if driver.stopped else notes:
            each()
        for n_pruned in audited:
            self._note_audit(n_pruned)

    def _use_op_times(self) -> None:
        if self.driver.op_times():
            predict_again(self.scores.by_key, self.driver.setup.scorer)

    def _proposed(self) -> Job | None:
        """Return the next candidate; None if the trials are used up or nothing may be better."""
        # One trial is reserved for an audit if one is due, unless nothing has fitted so far: then candidates
        # that may fit come first.
        driver = self.driver
        # Without anything that fits, a further candidate tells more than the audit of the interval.
        kept = int(self._to_audit() is not None and driver.best_value() is not None)
        if driver.n_trials >= driver.options.trials - kept or self._out_of_time():
            return None
        # A set of techniques that refused the live model twice would refuse it again.
        refused = {key for key, each in self.scores.by_key.items() if driver.refuses(each.choice)}
        best, model = driver.best_with_pending()
        proposal = self._proposer.next(driver.pruner, driver.tried | refused, best, model)
        if proposal is None:
            return None
        if proposal.scored.key in driver.tried:
            driver.log_text(
                f"{proposal.scored.choice.summary} runs again: its trial took longer than the other trials"
                " predict, as if other work had slowed it down"
            )
        name = self._baseline_names.get(proposal.scored.key, "")
        return Job("baseline" if name else "search", proposal.scored, name, number=proposal.number)

    def _to_audit(self) -> Scored | None:
        """Return the pruned candidate closest to the budget.

        None if there is none, if an audit was run, or if the search is short.
        """
        jobs = [*(each.job for each in self.driver.finished), *self.driver.pending()]
        if self.driver.options.trials < _TRIALS_FOR_AUDIT or any(job.role == "audit" for job in jobs):
            return None
        return self.driver.pruner.borderline(
            each for each in self.scores.by_key.values() if each.key not in self.driver.tried
        )

    def _audit_job(self) -> Job | None:
        """Return the trial of the pruned candidate closest to the budget; None if none is due."""
        driver = self.driver
        borderline, left = self._to_audit(), driver.options.trials - driver.n_trials
        # While nothing has fitted, the last trial is for a candidate that may.
        if borderline is None or left < (1 if driver.best_value() is not None else 2):
            return None
        return Job("audit", self._listed(borderline), "audit")

    def _n_pruned(self) -> int:
        reason = self.driver.pruner.reason
        return sum(reason(each.prediction) is not None for each in self.scores.by_key.values())

    def _note_audit(self, n_pruned: int) -> None:
        """Report the audit; if it fitted, the interval was too narrow and is wider since."""
        driver = self.driver
        audited = [each for each in driver.finished if each.job.role == "audit"]
        if not audited:
            return
        if audited[0].result.status != "ok":
            driver.log_text(
                "audit: the pruned candidate closest to the limit does not fit either"
                f" ({audited[0].result.reason})"
            )
            return
        driver.log_text(
            "audit: a pruned candidate fits, so the interval was too narrow;"
            f" {n_pruned - self._n_pruned()} of {n_pruned} reconsidered",
            warning=True,
        )

    def _largest_batch(self) -> None:
        """For goal batch, bisect between the largest micro-batch that fits and the next that fails."""
        driver = self.driver
        if driver.setup.goal != "batch":
            return

        def next_job() -> Job | None:
            verdict = judge(driver.measured(), "batch")
            if (
                verdict is None
                or driver.running
                or self._out_of_time()
                or driver.n_trials >= driver.options.trials
            ):
                return None
            choice = verdict.winner.choice
            low = choice.execution.micro_batch or 1
            # Again each time: the calibration has changed with the last trial.
            high = self._too_large(choice, low)
            # To about 3 %: each halving costs a trial.
            while high - low > max(1, low // 32):
                middle = _between(low, high)
                if (scored := self._may_fit(choice, middle)) is not None and scored.key not in driver.tried:
                    return Job("search", driver.setup.scorer.refined(scored))
                high = middle
            return None

        while (job := next_job()) is not None and not driver.stopped:
            driver.run_all([job])

    def _too_large(self, choice: Choice, above: int) -> int:
        """Return a micro-batch of the same techniques that failed, is refused or is pruned."""
        failed = [
            each.job.scored.choice.execution.micro_batch or 0
            for each in self.driver.finished
            if each.job.scored.choice.techniques == choice.techniques and each.result.status != "ok"
        ]
        high = min((size for size in failed if size > above), default=0)
        if not high:
            # Doubling: activations grow with the batch, so some size does not fit; all that divides `above`
            # divides it.
            high = 2 * above
            while self._may_fit(choice, high) is not None:
                high *= 2
        return high

    def _may_fit(self, choice: Choice, micro_batch: int) -> Scored | None:
        """Return `choice` with another micro-batch, scored; None if it is refused or pruned."""
        driver = self.driver
        other = Choice(choice.execution.of_size(micro_batch), choice.techniques)
        scored = driver.setup.scorer.score(other)
        if isinstance(scored, Reason) or driver.pruner.reason(scored.prediction) is not None:
            return None
        return scored

    def _repeats(self) -> None:
        """Run the best settings and the best baseline in alternation until they can be distinguished."""
        driver, goal = self.driver, self.driver.setup.goal
        measured = driver.measured()
        if driver.stopped or goal != "throughput" or len(measured) < 2:
            return
        best = finalists(measured, goal, driver.expected(measured), driver.possibly_slowed_down())
        by_choice = {each.job.scored.choice: each.job.scored for each in driver.finished}
        jobs = [Job("repeat", by_choice[each.choice], each.baseline) for each in best]
        driver.finalists = {job.scored.key for job in jobs}
        # `repeats: 1` asks for no comparison beyond the first round, so nothing races then.
        rounds = least = driver.options.repeats
        self._run_rounds(jobs, rounds)
        while least > 1 and not self._out_of_time() and not driver.stopped:
            racers = {job.scored.choice for job in jobs}
            # Only what ran in rounds is comparable: earlier trials met another state of the machine.
            in_rounds = [each for each in driver.measured() if each.rounds and each.choice in racers]
            wanted = {
                each.choice for each in finalists_to_repeat(in_rounds, goal, least + _MORE_ROUNDS - rounds)
            }
            if not wanted:
                break
            driver.raced_out |= {job.scored.key for job in jobs if job.scored.choice not in wanted}
            jobs = [job for job in jobs if job.scored.choice in wanted]
            rounds += 1
            self._run_rounds(jobs, rounds)
        self._note_drift()

    def _run_rounds(self, jobs: list[Job], rounds: int) -> None:
        """Run `jobs` in alternation until each has run `rounds` times, earlier processes included."""
        done = Counter(each.job.scored.key for each in self.driver.finished if each.job.role == "repeat")
        jobs_in_rounds = (job for round_ in range(rounds) for job in jobs if done[job.scored.key] <= round_)
        self.driver.run_all(jobs_in_rounds, alone=True)

    def _note_drift(self) -> None:
        for each in self.driver.measured():
            if each.baseline and len(each.results) > 1:
                first, last = each.results[0], each.results[-1]
                if (
                    first.step_s
                    and last.step_s
                    and abs(last.step_s / first.step_s - 1) > max(_DRIFT, 2 * each.spread_s / each.step_s)
                ):
                    self.driver.log_text(
                        f"a step of {each.baseline} took {last.step_s / first.step_s:.2g} times as long at"
                        " the end as at the start: the machine is busy or throttles, small differences mean"
                        " little",
                        warning=True,
                    )

    def _confirmed(self) -> tuple[Verdict | None, FinishedTrial | None]:
        """Run the winner again in a fresh process; if it fails, exclude it and confirm the next best."""
        driver = self.driver
        while True:
            verdict = judge(driver.measured(), driver.setup.goal)
            if verdict is None or driver.stopped:
                return verdict, None
            scored = self._scored(verdict)
            # A fresh process has none of the state that the search may have left in the last one.
            driver.run_all([Job("confirm", scored, verdict.winner.baseline)], alone=True)
            # The trial may have been cancelled by a stop, so the last confirmation need not be this winner's.
            last = next((each for each in reversed(driver.finished) if each.job.role == "confirm"), None)
            if last is not None and last.job.scored.key == scored.key and last.result.status == "ok":
                return self._unchanged(verdict), last
            if driver.stopped:
                return verdict, None
            driver.log_text(
                f"{verdict.winner.choice.summary} did not hold in a fresh process; the next best is taken",
                warning=True,
            )

    def _numerics(self, verdict: Verdict | None) -> dict[str, Any]:
        """Compare the winner's loss and gradients with the reference's, unless the search was stopped."""
        driver = self.driver
        if verdict is None or driver.stopped or not driver.measures:
            return {}
        self.say("comparing losses and gradients with the plain setting")
        found = numerics(driver, verdict.winner.choice)
        if found.get("agrees") is False:
            driver.log_text(
                f"gradients differ from {found['reference']} by {found['difference']} at"
                f" {found.get('largest_at', 'the loss')}, more than {found['tolerance']}: look before you"
                " train with this config",
                warning=True,
            )
        elif "not_run" in found:
            driver.log_text(f"gradients were not compared with a reference: {found['not_run']}", warning=True)
        else:
            unjudged = (
                f", tolerance {found['tolerance']}"
                if found.get("agrees", True) is None and "tolerance" in found
                else ""
            )
            difference = found.get("difference") or f"not compared, {found['not_compared']}"
            driver.log_text(
                f"gradients against {found['reference']}: {difference}{unjudged}", warning=bool(unjudged)
            )
        return {"numerics": found}

    def _unchanged(self, verdict: Verdict) -> Verdict:
        """Return the verdict with the confirming run among the winner's measurements."""
        winner = next(each for each in self.driver.measured() if each.choice == verdict.winner.choice)
        return verdict._replace(winner=winner)

    def _scored(self, verdict: Verdict) -> Scored:
        return next(
            each.job.scored
            for each in self.driver.finished
            if each.job.scored.choice == verdict.winner.choice
        )

    # -- the end ---------------------------------------------------------------------------------------------

    def _end(
        self, verdict: Verdict | None, confirmed: FinishedTrial | None, certificate: dict[str, Any]
    ) -> SearchOutcome:
        driver, control = self.driver, self.driver.control
        status: Ended = "interrupted" if control.interrupted else "stopped" if driver.stopped else "done"
        trials = trial_rows(driver.finished)
        if verdict is None:
            if driver.broken:
                raise _broken(driver)
            if not driver.stopped:
                raise nothing_fits(driver)
            self.log.write(search_events.SearchFinished(status=status, message=driver.stopped))
            return SearchOutcome(
                status,
                str(self.folder.path),
                f"{driver.stopped}; nothing that fits was measured yet",
                trials=trials,
                exit_code=control.exit_code or 1,
            )
        scored = self._scored(verdict)
        self.say("writing the config")
        config = tuned_config(
            driver, scored, verdict, confirmed=confirmed, numerics=certificate, study=str(self.folder.path)
        )
        out = self.folder.save_config(config, driver.options.out)
        message = verdict.text + (f" (stopped: {driver.broken})" if driver.broken else "")
        outcome = SearchOutcome(
            status=status,
            study=str(self.folder.path),
            message=message,
            config=config.document(),
            out=str(out),
            measured=numbers(verdict.winner),
            predicted=predicted(driver.setup, scored, driver.pruner.calibration),
            baselines=tuple(
                {**row, "is_winner": verdict.winner.baseline == row["name"]}
                for row in trials
                if row["role"] == "baseline"
            ),
            trials=trials,
            exit_code=control.exit_code,
        )
        if status == "done":
            self._teach_later_runs()
            self.folder.save_text(RESULT, json.dumps(outcome.to_dict(), indent=1) + "\n")
        self.log.write(
            search_events.SearchFinished(
                status=status,
                out=str(out),
                best_number=verdict.winner.number,
                samples_per_s=verdict.winner.samples_per_s,
                baselines={each.baseline: each.samples_per_s for each in driver.measured() if each.baseline},
                confirmed=confirmed is not None,
                message=message,
            )
        )
        self._save_timelines(scored)
        return outcome

    def _save_timelines(self, scored: Scored) -> None:
        """Save the data of the report's pictures that the event log does not have."""
        driver = self.driver
        if driver.measures:
            found = timelines(driver.setup, scored.choice, driver.pruner.calibration.step_correction)
            self.folder.save_text(TIMELINES, json.dumps(found, separators=(",", ":")) + "\n")

    def _teach_later_runs(self) -> None:
        driver = self.driver
        if not driver.measures:
            return
        calibration = driver.pruner.calibration
        taught = SearchErrors(
            date=datetime.now(UTC).date().isoformat(),
            workload=driver.setup.workload.path.name,
            op_times=driver.op_times(quiet=True),
            peak_ratios=list(calibration.peak_ratios),
            step_ratios=list(calibration.step_ratios),
        )
        store_search(driver.setup.device, taught)

    def _out_of_time(self) -> bool:
        """Return whether another candidate would leave no time for the repeats and the confirmation."""
        limit = self.driver.options.time_s
        if limit is None:
            return False
        # One confirmation, and rounds of about four finalists (the best three and a baseline).
        rest = 1 + (4 * self.driver.options.repeats if self.driver.setup.goal == "throughput" else 0)
        wall = self.driver.median_wall_s()
        # At most half of the limit is kept for the rest, or a short search would try nothing.
        return self.driver.elapsed_s + min((rest + 1) * wall, limit / 2) >= limit

    def _pruned(self, number: int, scored: Scored, reason: str) -> None:
        pruner = self.driver.pruner
        self.log.write(
            search_events.TrialPruned(
                number=number,
                settings=scored.choice.dump(),
                summary=scored.choice.summary,
                predicted_peak_bytes=scored.prediction.peak_allocated_bytes,
                peak_low_bytes=pruner.peak_low_bytes(scored.prediction),
                budget_bytes=pruner.budget_bytes or 0,
                reason=reason,
            )
        )


def _broken(driver: Driver) -> MemtuneError:
    last = driver.finished[-1]
    lines = [line for line in last.result.log_tail.splitlines() if line.strip()]
    return UsageError(
        f"Trial {last.number} and {len(driver.finished) - 1} more failed alike, stopping.",
        evidence=f"{driver.broken}" + (f"   last line: {lines[-1].strip()[:200]}" if lines else ""),
        fix=(
            f"memtune trial {driver.options.workload} --config … shows it alone; the logs of all trials are"
            " in the study folder"
        ),
        code="MT302",
    )


def _between(low: int, high: int) -> int:
    """Return a size near the middle that shares `low`'s largest possible divisor: a plan that cuts `low` into
    equal parts mostly cuts it too.
    """
    quarter, middle = (high - low) / 4, (low + high) / 2
    near = range(math.ceil(low + quarter), math.floor(high - quarter) + 1)
    return max(near, key=lambda size: (math.gcd(size, low), -abs(size - middle)))
