"""Optuna behind one class: asks for choices, keeps every trial with its result, and is told what came of it.

The only file that imports optuna. One process writes (the search driver), through one SQLite file; workers never see it.
Values are minimised. A trial that does not fit has an infinite value and the constraint it violates, so that the sampler
learns where the border is; a trial that was not worth running is PRUNED with the reason.
"""

from __future__ import annotations

import json
import math
import sqlite3
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import event
from sqlalchemy.exc import SQLAlchemyError

from memtune.autotune.candidates import Choice
from memtune.autotune.space import Space, knob_values
from memtune.errors import EnvironmentFault, UsageError
from memtune.executors.base import TrialResult
from memtune.technique import Technique

TrialOutcome = Literal["told", "pruned", "running", "failed"]
_OUTCOMES: dict[TrialState, TrialOutcome] = {
    TrialState.COMPLETE: "told",
    TrialState.PRUNED: "pruned",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "running",
    TrialState.FAIL: "failed",
}


@dataclass(frozen=True)
class StoredTrial:
    """A trial as the study keeps it, over the end of the process."""

    number: int
    outcome: TrialOutcome
    role: str
    name: str
    settings: dict[str, Any] | None
    """None where the process died between asking for the trial and writing down what it is."""
    result: TrialResult | None
    reason: str = ""


class Sampler:
    """A study on disk and the TPE sampler over `space`.

    Args:
        path: The SQLite file; made when missing, continued when not.
        space: What is searched.
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
            tpe = optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True)
        with self._storage_errors():
            storage = optuna.storages.RDBStorage(f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": 30}})
            event.listen(storage.engine, "connect", _without_fsync)
            storage.engine.dispose()  # the connection that made the tables
            self._study = optuna.create_study(
                storage=storage, sampler=tpe, study_name="memtune", direction="minimize", load_if_exists=True
            )
            self._storage = storage

    def ask(self, choice: Choice | None = None, *, role: str = "search", name: str = "") -> tuple[int, Choice | None]:
        """A new trial: of `choice`, or of what the sampler suggests (None where its knobs exclude each other)."""
        with self._storage_errors():
            parameters = self._parameters(choice) if choice is not None else {}
            if parameters:
                self._study.enqueue_trial(parameters)
            trial = self._study.ask()
            asked = choice
            if choice is None or parameters:
                suggested = self._suggest(trial)
                asked = suggested if choice is None else choice
            if asked is not None:
                self._note(trial, role=role, name=name, settings=asked.dump())
            return trial.number, asked

    def tell(self, number: int, result: TrialResult, value: float | None, over_bytes: float = 0.0) -> None:
        """What came of a trial; `value` None for one that gave no usable measurement, `over_bytes` past the budget."""
        with self._storage_errors():
            trial = self._trial(number)
            self._note(trial, result=result.model_dump(mode="json"))
            trial.set_constraint("over_bytes", over_bytes)
            if value is None and not over_bytes:
                self._study.tell(number, state=TrialState.FAIL)
            else:
                self._study.tell(number, math.inf if value is None else value)

    def prune(self, number: int, reason: str) -> None:
        """A trial that is not worth running, and why."""
        with self._storage_errors():
            self._note(self._trial(number), reason=reason)
            self._study.tell(number, state=TrialState.PRUNED)

    def fail(self, number: int, reason: str) -> None:
        """A trial that was started and has no result: the search ended, or its process died."""
        with self._storage_errors():
            self._note(self._trial(number), reason=reason)
            self._study.tell(number, state=TrialState.FAIL)

    def trials(self) -> list[StoredTrial]:
        """Every trial so far, in order."""
        with self._storage_errors():
            return [_stored(each) for each in self._study.get_trials(deepcopy=False)]

    def close(self) -> None:
        """Release the file."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    def _trial(self, number: int) -> optuna.Trial:
        return optuna.Trial(self._study, self._study.get_trials(deepcopy=False)[number]._trial_id)

    def _note(self, trial: optuna.Trial, **attributes: Any) -> None:
        for key, value in attributes.items():
            trial.set_user_attr(key, json.dumps(value) if isinstance(value, dict) else value)

    def _parameters(self, choice: Choice) -> dict[str, Any]:
        """`choice` in Optuna's terms; empty where it lies outside the space (a guard of an axis that is not searched)."""
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
                values.append(choices[0] if len(choices) == 1 else _pick(trial, f"{slot}.{kind}.{knob}", choices))
            found = self._by_value[slot].get((str(kind), *values))
            if found is None:
                return None
            techniques[slot] = found
        return Choice.of(self._space.executions[sizes.index(int(str(size)))], techniques)

    def _storage_errors(self) -> _StorageErrors:
        return _StorageErrors(self._path)


def _without_fsync(connection: sqlite3.Connection, _: object) -> None:
    """What was committed survives the death of this process; after a power cut the event log rebuilds the study.

    Optuna commits every parameter of every trial by itself, so that waiting for the disk took most of a search's own time.
    """
    connection.execute("PRAGMA synchronous = OFF")


def _pick(trial: optuna.Trial, name: str, choices: tuple[Any, ...]) -> Any:
    plain = [_plain(value) for value in choices]
    return choices[plain.index(trial.suggest_categorical(name, plain))]


def _plain(value: Any) -> Any:
    """Optuna's categories are scalars; anything else goes in as its JSON text."""
    return value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value)


def _stored(trial: FrozenTrial) -> StoredTrial:
    notes = trial.user_attrs
    return StoredTrial(
        number=trial.number,
        outcome=_OUTCOMES[trial.state],
        role=notes.get("role", "search"),
        name=notes.get("name", ""),
        settings=json.loads(notes["settings"]) if "settings" in notes else None,
        result=TrialResult.model_validate_json(notes["result"]) if "result" in notes else None,
        reason=notes.get("reason", ""),
    )


class _StorageErrors:
    """Turns what the storage raises into one message with the path; Optuna hides a full disk behind other errors."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Raise EnvironmentFault for what SQLite or Optuna's storage says, UsageError for a study of another space."""
        if isinstance(error, ValueError) and "dynamic value space" in str(error):
            raise UsageError(
                f"The study {self._path} was made with other choices than there are now.",
                evidence="What can be used has changed: a drive, measured rates, or memtune itself.",
                fix="undo the change, or start anew with --study another",
                code="MT406",
            ) from error
        if isinstance(error, optuna.exceptions.StorageInternalError | SQLAlchemyError | sqlite3.Error | AssertionError):
            cause = error.__cause__ or error
            raise EnvironmentFault(
                f"The study {self._path} cannot be read or written.",
                evidence=str(cause).strip().split("\n")[0],
                fix="free space in that folder and go on with --resume, or start anew with --study",
                code="MT402",
            ) from error
