"""Optuna behind one class: draw choices, store every trial with its result, report results to the sampler.

The only file that imports optuna. One process writes (the search driver), to one SQLite file that workers
never open. Values are minimised. A trial that does not fit has an infinite value and the constraint it
violates, so that the sampler learns the border; a candidate not worth running is PRUNED with the reason.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sqlite3
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import event
from sqlalchemy.exc import SQLAlchemyError

from memtune.autotune.space.candidates import Choice
from memtune.autotune.space.search_space import Space, knob_values
from memtune.errors import EnvironmentFault, UsageError
from memtune.executors import TrialResult
from memtune.technique import Technique

TrialOutcome = Literal["complete", "pruned", "running", "failed"]
DAMAGE = (KeyError, IndexError, ValueError, TypeError, AttributeError, RuntimeError, OverflowError)
"""Errors by which Optuna and the validation of results notice a damaged study."""
_OUTCOMES: dict[TrialState, TrialOutcome] = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "running",
    TrialState.FAIL: "failed",
}


@dataclass(frozen=True)
class StoredTrial:
    """A trial as stored in the study, which outlives the process."""

    number: int
    outcome: TrialOutcome
    role: str
    name: str
    settings: dict[str, Any] | None
    """None if the process died between asking for the trial and storing its settings."""
    result: TrialResult | None
    reason: str = ""


class Sampler:
    """A study on disk and the TPE sampler over `space`.

    Args:
        path: The SQLite file; created if missing, continued otherwise.
        space: The space to search.
        seed: Of the sampler; the same seed and results give the same choices.

    Raises:
        EnvironmentFault: The file cannot be written or is no study.
    """

    def __init__(self, path: Path, space: Space, seed: int) -> None:
        self._path, self._space = path, space
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._by_value = {
            slot: {(each.kind, *(value for _, value in each.knobs())): each for each in techniques}
            for slot, techniques in space.slots.items()
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            # `multivariate`: knobs of one technique depend on each other. `group`: other techniques' knobs do
            # not.
            tpe = optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True)
        with self._storage_errors():
            with contextlib.suppress(OSError):  # SQLite reports it
                os.close(os.open(path, os.O_CREAT | os.O_CLOEXEC, 0o600))  # it would be readable by all
            storage = optuna.storages.RDBStorage(
                f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": 30}}
            )
            event.listen(storage.engine, "connect", _without_fsync)
            storage.engine.dispose()  # the connection that made the tables
            self._study = optuna.create_study(
                storage=storage, sampler=tpe, study_name="memtune", direction="minimize", load_if_exists=True
            )
            self._storage = storage
            self._withdraw_enqueued()
            self._optuna = {
                _number(each): each.number
                for each in self._study.get_trials(deepcopy=False)
                if each.state != TrialState.PRUNED
            }
            """Optuna's number by number. A pruned suggestion gives its number back: those that run have no
            holes.
            """

    def _withdraw_enqueued(self) -> None:
        """Prune trials that a process enqueued and did not start before it died.

        `ask` would start them instead of what is asked for, and they cannot fail.
        """
        for each in self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            self._storage.set_trial_state_values(each._trial_id, TrialState.PRUNED)

    def ask(
        self, choice: Choice | None = None, *, role: str = "search", name: str = ""
    ) -> tuple[int, Choice | None]:
        """Start a trial of `choice` or of a suggestion (None if its knobs exclude each other).

        Returns:
            Its number, and the choice.
        """
        with self._storage_errors():
            parameters = self._parameters(choice) if choice is not None else {}
            # Enqueued, so that the sampler learns from choices that it did not suggest.
            if parameters:
                self._study.enqueue_trial(parameters)
            trial = self._study.ask()
            asked, number = choice, self._next_number()
            self._optuna[number] = trial.number
            trial.set_user_attr("number", number)
            if choice is None or parameters:
                suggested = self._suggest(trial)
                asked = suggested if choice is None else choice
            if asked is not None:
                self._note(trial, role=role, name=name, settings=asked.dump())
            return number, asked

    def tell(self, number: int, result: TrialResult, value: float | None, over_bytes: float = 0.0) -> None:
        """Report a trial's result: `value` None without a measurement, `over_bytes` beyond the budget."""
        with self._storage_errors():
            trial = self._trial(number)
            self._note(trial, result=result.model_dump(mode="json"))
            trial.set_constraint("over_bytes", over_bytes)
            # A crash says nothing about the settings; running out of memory does, and is not a failure here.
            if value is None and not over_bytes:
                self._study.tell(self._optuna[number], state=TrialState.FAIL)
            else:
                self._study.tell(self._optuna[number], math.inf if value is None else value)

    def prune(self, number: int, reason: str) -> None:
        """Mark a trial as not worth running, with the reason; the next one has its number."""
        with self._storage_errors():
            self._note(self._trial(number), reason=reason)
            self._study.tell(self._optuna.pop(number), state=TrialState.PRUNED)

    def fail(self, number: int, reason: str) -> None:
        """Mark a started trial without a result: the search ended or its process died."""
        with self._storage_errors():
            self._note(self._trial(number), reason=reason)
            self._study.tell(self._optuna[number], state=TrialState.FAIL)

    def skip(self) -> int:
        """Use up the next number, for a trial of which nothing is known; return it."""
        with self._storage_errors():
            trial, number = self._study.ask(), self._next_number()
            self._optuna[number] = trial.number
            trial.set_user_attr("number", number)
            self._study.tell(trial, state=TrialState.FAIL)
            return number

    def trials(self) -> list[StoredTrial]:
        """Return every trial so far, in order."""
        with self._storage_errors():
            return [_stored(each) for each in self._study.get_trials(deepcopy=False)]

    def holds(self, results: Mapping[int, tuple[dict[str, Any], TrialResult]]) -> bool:
        """Return whether every trial can be read, and those in `results` have these settings and results.

        Args:
            results: Settings and result of trials, by number.
        """
        try:
            kept = [each for each in self.trials() if each.outcome != "pruned"]
            found = {each.number: (each.settings, each.result) for each in kept}
        except (EnvironmentFault, *DAMAGE):
            return False
        return all(found.get(number) == _stored_form(*each) for number, each in results.items())

    def close(self) -> None:
        """Release the file."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    def _next_number(self) -> int:
        return max(self._optuna, default=-1) + 1

    def _trial(self, number: int) -> optuna.Trial:
        stored = self._study.get_trials(deepcopy=False)[self._optuna[number]]
        return optuna.Trial(self._study, stored._trial_id)

    def _note(self, trial: optuna.Trial, **attributes: Any) -> None:
        for key, value in attributes.items():
            trial.set_user_attr(key, json.dumps(value) if isinstance(value, dict) else value)

    def _parameters(self, choice: Choice) -> dict[str, Any]:
        """Return `choice` as Optuna parameters.

        Empty if it lies outside the space (a baseline of an axis not searched).
        """
        if choice.execution not in self._space.executions:
            return {}
        if any(choice.technique(slot) not in techniques for slot, techniques in self._space.slots.items()):
            return {}
        return {name: _plain(value) for name, value in self._space.parameters(choice).items()}

    def _suggest(self, trial: optuna.Trial) -> Choice | None:
        sizes = [each.micro_batch for each in self._space.executions]
        size = trial.suggest_categorical("micro_batch", sizes)
        techniques: dict[str, Technique] = {}
        for slot, among in self._space.slots.items():
            kind = trial.suggest_categorical(slot, list(dict.fromkeys(each.kind for each in among)))
            values = []
            for knob, choices in knob_values(among, str(kind)).items():
                values.append(
                    choices[0] if len(choices) == 1 else _pick(trial, f"{slot}.{kind}.{knob}", choices)
                )
            found = self._by_value[slot].get((str(kind), *values))
            if found is None:
                return None
            techniques[slot] = found
        return Choice.of(self._space.executions[sizes.index(int(str(size)))], techniques)

    def _storage_errors(self) -> _StorageErrors:
        return _StorageErrors(self._path)


def _without_fsync(connection: sqlite3.Connection, _: object) -> None:
    """Commit without waiting for the disk.

    Commits survive the death of this process; after a power cut the event log restores the study. Optuna
    commits every parameter of every trial, so waiting took most of a search's own time.
    """
    connection.execute("PRAGMA synchronous = OFF")


def _pick(trial: optuna.Trial, name: str, choices: tuple[Any, ...]) -> Any:
    plain = [_plain(value) for value in choices]
    return choices[plain.index(trial.suggest_categorical(name, plain))]


def _plain(value: Any) -> Any:
    """Return a scalar for Optuna's categories; other values become JSON text."""
    return value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value)


def _stored_form(settings: dict[str, Any], result: TrialResult) -> tuple[dict[str, Any], TrialResult]:
    """Return settings and result as they are after storing them."""
    document = json.dumps(result.model_dump(mode="json"))
    return json.loads(json.dumps(settings)), TrialResult.model_validate_json(document)


def _number(trial: FrozenTrial) -> int:
    """Return the number of a stored trial; the process may have died before it was noted."""
    return int(trial.user_attrs.get("number", trial.number))


def _stored(trial: FrozenTrial) -> StoredTrial:
    notes = trial.user_attrs
    return StoredTrial(
        number=_number(trial),
        outcome=_OUTCOMES[trial.state],
        role=notes.get("role", "search"),
        name=notes.get("name", ""),
        settings=json.loads(notes["settings"]) if "settings" in notes else None,
        result=TrialResult.model_validate_json(notes["result"]) if "result" in notes else None,
        reason=notes.get("reason", ""),
    )


class _StorageErrors:
    """Turns storage errors into one message with the path; Optuna hides a full disk behind other errors."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Raise EnvironmentFault for storage errors, UsageError for a study of another space."""
        if isinstance(error, ValueError) and "dynamic value space" in str(error):
            raise UsageError(
                f"The study {self._path} was made with a different search space.",
                evidence="The available techniques changed: a drive, measured rates, or memtune itself.",
                fix="undo the change, or start a new study with --study another",
                code="MT406",
            ) from error
        if isinstance(
            error, optuna.exceptions.StorageInternalError | SQLAlchemyError | sqlite3.Error | AssertionError
        ):
            cause = error.__cause__ or error
            raise EnvironmentFault(
                f"The study {self._path} cannot be read or written.",
                evidence=str(cause).strip().split("\n")[0],
                fix="free space in that folder and continue with --resume, or start a new study with --study",
                code="MT402",
            ) from error
