"""`memtune search`: baselines, candidates, audit, repeats, verdict, confirmation; writes one config."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from memtune.autotune.search import search_events
from memtune.autotune.search.control import Control
from memtune.autotune.search.driver import Driver
from memtune.autotune.search.outcome import SearchOutcome, weights_over_budget
from memtune.autotune.search.preparation import Setup, prepare
from memtune.autotune.search.search_stages import Stages
from memtune.autotune.search.study_store import (
    HOME,
    RESULT,
    StudyFolder,
    check_writable,
    named_study,
    read_json,
    versions,
)
from memtune.autotune.search.trials import make_executor
from memtune.autotune.space import DAMAGE, Sampler, SearchOptions, baselines
from memtune.errors import UsageError
from memtune.executors import Executor
from memtune.ssd import allowed_dirs
from memtune.workload import split_target


def search(
    options: SearchOptions,
    control: Control | None = None,
    *,
    executor: Executor | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> SearchOutcome:
    """Find the best settings for a workload by real trials, and write them.

    Args:
        options: The user's options.
        control: Through which the user pauses, stops and interrupts.
        executor: An open one, used instead of the one that the options name; it stays open.
        say: Called with one line about each phase, before there is an event log.

    Returns:
        The outcome; after an interruption with the best so far.

    Raises:
        NothingFits: No trial was within the budget.
        UsageError: The options contradict each other, the workload or the study.
        EnvironmentFault: The study is in use, or its disk, the device or the executor cannot be used.
    """
    began_s = time.monotonic()
    folder = study_folder(options)
    own = options.resume and folder.wrote(options.out)
    foreign = f"Study '{folder.name}' did not write it as it is now." if options.resume else ""
    # Before hours of trials, not after them.
    check_writable(options.out, force=options.force or own, evidence=foreign)
    if options.dry_run:
        return _dry_run(options, folder, say)
    with _locked(folder):
        finished = read_json(folder.path / RESULT)
        if finished is not None and options.resume:
            folder.check_unchanged(split_target(options.workload)[0], _identifying_options(options))
            return _finished_study(SearchOutcome.from_dict(finished), folder, options)
        setup = prepare(options, say=say)
        resumed = folder.claim(_fingerprint(options, setup), resume=options.resume)
        say("scoring settings")
        scores = setup.score(options.seed, options.trials)
        too_large = weights_over_budget(setup, scores)
        if too_large is not None:
            raise too_large
        events = list(search_events.read_events(folder.events))
        logged = [each for each in events if isinstance(each, search_events.TrialFinished)]
        started = {each.number for each in events if isinstance(each, search_events.TrialStarted)}
        opened = executor or make_executor(
            options.executor,
            device=setup.device,
            ranks=options.ranks,
            parallel=None if options.parallel is None else min(options.parallel, options.trials),
            timed=options.goal == "throughput",
            ray_address=options.ray_address,
            log_dir=folder.logs,
        )
        try:
            with search_events.EventLog(folder.events, began_s) as log:
                sampler, wrong = _opened_sampler(folder, setup, options, logged)
                try:
                    driver = Driver(setup, options, sampler, opened, log, control or Control(), began_s)
                    if wrong:
                        driver.log_text(f"the study {wrong}; rebuilt from the event log", warning=True)
                        driver.rebuild(logged)
                    stages = Stages(driver, sampler, scores, folder, log, resumed, say)
                    # Ends the line of the current phase: from here on the event log is shown.
                    say("")
                    return stages.run({each.number for each in logged}, started)
                finally:
                    sampler.close()
        finally:
            if executor is None:
                opened.close()


def _opened_sampler(
    folder: StudyFolder, setup: Setup, options: SearchOptions, logged: Sequence[search_events.TrialFinished]
) -> tuple[Sampler, str]:
    """Return the study, and why it has to be rebuilt from the event log, "" if it agrees with that one."""
    aside, is_new = folder.check_database(), not folder.database.exists()
    try:
        sampler = Sampler(folder.database, setup.space, options.seed)
    except DAMAGE:
        if is_new:
            raise
    else:
        if sampler.holds({each.number: (each.settings, each.result) for each in logged}):
            return sampler, ""
        if is_new:
            return sampler, f"was damaged and is now {aside.name}" if aside else "was missing"
        sampler.close()
    aside = folder.set_database_aside()
    sampler = Sampler(folder.database, setup.space, options.seed)
    return sampler, f"was damaged and is now {aside.name}"


def study_folder(options: SearchOptions) -> StudyFolder:
    """Return the folder of the study.

    `--study` as a name below `.memtune/` or a path, else a free name derived from the workload's.

    Raises:
        UsageError: `--resume` without a study to resume.
    """
    if options.study is not None:
        return named_study(options.study)
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(options.workload.partition(":")[0]).stem)
    taken = [
        int(match[1])
        for each in HOME.glob(f"{stem}-*")
        if (match := re.fullmatch(re.escape(stem) + r"-(\d+)", each.name))
    ]
    if options.resume and not taken:
        raise UsageError(
            f"There is no study of {options.workload} to resume.",
            evidence=f"Looked in {HOME.resolve()}",
            fix="drop --resume",
            code="MT405",
        )
    number = max(taken, default=0) + (0 if options.resume else 1)
    return StudyFolder(HOME / f"{stem}-{number}")


@contextmanager
def _locked(folder: StudyFolder) -> Iterator[None]:
    """Lock the folder; remove it afterwards if nothing was started in it."""
    is_new = not folder.path.exists()
    with folder:
        try:
            yield
        finally:
            if is_new and folder.fingerprint() is None:
                folder.discard()


def _identifying_options(options: SearchOptions) -> dict[str, object]:
    """Return the options that a study depends on, without defaults that device or workload decide."""
    given = {name: getattr(options, name) for name in ("device", "budget_bytes", "global_batch")}
    return {name: value for name, value in given.items() if value is not None} | {
        "goal": options.goal,
        "ranks": options.ranks,
        "host_memory_bytes": options.host_memory_bytes,
        "axes": list(options.axes),
        "freeze": dict(options.freeze),
        "allow_lossy": options.allow_lossy,
        "seed": options.seed,
    }


def _fingerprint(options: SearchOptions, setup: Setup) -> dict[str, object]:
    asked = {
        **_identifying_options(options),
        "device": setup.device,
        "budget_bytes": setup.budget_bytes,
        "global_batch": setup.global_batch,
        "offload_dirs": len(allowed_dirs()) or None,  # without one nothing that needs a drive is searched
    }
    workload = {
        "file": setup.workload.path.name,
        "name": setup.workload.name,
        "source_sha256": setup.workload.source_sha256,
        "imports": setup.workload.imports(),
    }
    return {"workload": workload, "options": asked, "hardware": setup.hardware.name, "versions": versions()}


def _dry_run(options: SearchOptions, folder: StudyFolder, say: Callable[[str], None]) -> SearchOutcome:
    setup = prepare(options, say=say)
    say("scoring settings")
    scores = setup.score(options.seed, options.trials)
    too_large = weights_over_budget(setup, scores)
    if too_large is not None:
        raise too_large
    found, _ = baselines(setup.scorer, setup.global_batch)
    ranked = sorted(
        scores.by_key.values(),
        key=lambda each: (not each.prediction.is_within(setup.budget_bytes), each.rank(options.goal)),
    )
    rows = [("baseline", each.name, each.scored) for each in found] + [
        ("search", "", each) for each in ranked
    ]
    trials = tuple(
        {
            "role": role,
            "name": name,
            "summary": each.choice.summary,
            "sentence": each.choice.sentence,
            "settings": each.choice.dump(),
            "predicted_peak_bytes": each.prediction.peak_allocated_bytes,
            "predicted_step_s": each.prediction.step_s,
        }
        for role, name, each in rows[: options.trials]
    )
    return SearchOutcome(
        "dry_run", str(folder.path), f"{len(trials)} trials would be run first", trials=trials
    )


def _finished_study(outcome: SearchOutcome, folder: StudyFolder, options: SearchOptions) -> SearchOutcome:
    """Return the outcome of a finished study; write its config to the requested path."""
    tuned = outcome.tuned
    if tuned is not None:
        folder.save_config(tuned, options.out)
    return replace(outcome, out=str(options.out))
