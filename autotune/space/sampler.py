"""Optuna behind one class: draw choices, store every trial with its result, report results to the sampler.

The only file that imports optuna. One process writes (the search driver), to one SQLite file that workers
never open. Values are minimised. A trial that does not fit has an infinite value and the constraint it
violates, so that the sampler learns the border; a candidate not worth running is PRUNED with the reason.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import sqlite3
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
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
_LOCKED_S = 30
"""Seconds to wait for another process that has the file locked."""
_SPACE = "space"
"""Attribute of the study: the hash of its parameters' values."""
_UNREACHED = (
    "SQLITE_BUSY",
    "SQLITE_LOCKED",
    "SQLITE_FULL",
    "SQLITE_CANTOPEN",
    "SQLITE_READONLY",
    "SQLITE_PERM",
)


class DamagedStudy(EnvironmentFault):
    """Error of SQLite or Optuna that the content of the study causes."""


DAMAGE = (
    *(LookupError, ValueError, TypeError, AttributeError, RuntimeError, OverflowError),
    DamagedStudy,
)
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
        EnvironmentFault: The file cannot be written; `DamagedStudy`, it is no study.
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
            if not path.exists():
                _create(path)
            storage = _storage(path)
            self._study = optuna.create_study(
                storage=storage, sampler=tpe, study_name="memtune", direction="minimize", load_if_exists=True
            )
            self._storage = storage
            self._values = _values_of(space)
            if not self._study.get_trials(deepcopy=False):
                self._study.set_user_attr(_SPACE, _text_of(self._values))
            self._optuna = {
                _number(each): each.number
                for each in self._study.get_trials(deepcopy=False)
                if each.state != TrialState.PRUNED
            }
            """Optuna's number by number. A pruned suggestion gives its number back: those that run have no
            holes.
            """

    def ask(
        self, choice: Choice | None = None, *, role: str = "search", name: str = ""
    ) -> tuple[int, Choice | None]:
        """Start a trial of `choice` or of a suggestion (None if its knobs exclude each other).

        Returns:
            Its number, and the choice.
        """
        with self._storage_errors():
            number = self._next_number()
            if choice is not None:
                self._start(number, choice, role=role, name=name)
                return number, choice
            trial = self._study.ask()
            self._optuna[number] = trial.number
            trial.set_user_attr("number", number)
            suggested = self._suggest(trial.suggest_categorical)
            if suggested is not None:
                self._note(trial._trial_id, role=role, name=name, settings=suggested.dump())
            return number, suggested

    def _start(self, number: int, choice: Choice, **notes: Any) -> None:
        """Store a running trial of `choice` with its parameters, so that the sampler learns from it."""
        # One transaction; the sampler draws nothing.
        given, distributions = self._parameters(choice), dict[str, BaseDistribution]()

        def pick(name: str, choices: Sequence[Any]) -> Any:
            distributions[name] = CategoricalDistribution(choices)
            return given[name]

        if given:
            self._suggest(pick)
        template = optuna.trial.create_trial(
            state=TrialState.RUNNING,
            params={name: given[name] for name in distributions},
            distributions=distributions,
            user_attrs=_noted({"number": number, "settings": choice.dump(), **notes}),
        )
        trial_id = self._study._storage.create_new_trial(self._study._study_id, template)
        self._optuna[number] = self._study._storage.get_trial_number_from_id(trial_id)

    def tell(self, number: int, result: TrialResult, value: float | None, over_bytes: float = 0.0) -> None:
        """Report a trial's result: `value` None without a measurement, `over_bytes` beyond the budget."""
        with self._storage_errors():
            trial_id = self._trial_id(number)
            self._note(trial_id, result=result.model_dump(mode="json"))
            optuna.Trial(self._study, trial_id).set_constraint("over_bytes", over_bytes)
            # A crash says nothing about the settings; running out of memory does, and is not a failure here.
            if value is None and not over_bytes:
                self._study.tell(self._optuna[number], state=TrialState.FAIL)
            else:
                self._study.tell(self._optuna[number], math.inf if value is None else value)

    def prune(self, number: int, reason: str) -> None:
        """Mark a trial as not worth running, with the reason; the next one has its number."""
        with self._storage_errors():
            self._note(self._trial_id(number), reason=reason)
            self._study.tell(self._optuna.pop(number), state=TrialState.PRUNED)

    def fail(self, number: int, reason: str) -> None:
        """Mark a started trial without a result: the search ended or its process died."""
        with self._storage_errors():
            self._note(self._trial_id(number), reason=reason)
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
        """Return whether every trial can be read, and those in `results` have these settings and results."""
        try:
            if self._is_garbled():
                return False
            kept = [each for each in self.trials() if each.outcome != "pruned"]
            found = {each.number: (each.settings, each.result) for each in kept}
        except DAMAGE:
            return False
        # As text: a loss that is not a number differs from itself.
        return all(
            number in found and _text(*found[number]) == _text(*each) for number, each in results.items()
        )

    def _is_garbled(self) -> bool:
        """Return whether a trial's values are not those of the space that the study was made with, which is
        this one.
        """
        with self._storage_errors():
            if self._study.user_attrs.get(_SPACE) != _text_of(self._values):
                return False
            return any(
                not isinstance(found, CategoricalDistribution)
                or list(found.choices) != self._values.get(name)
                for each in self._study.get_trials(deepcopy=False)
                for name, found in each.distributions.items()
            )

    def close(self) -> None:
        """Release the file."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    def _next_number(self) -> int:
        return max(self._optuna, default=-1) + 1

    def _trial_id(self, number: int) -> int:
        return self._study._storage.get_trial_id_from_study_id_trial_number(
            self._study._study_id, self._optuna[number]
        )

    def _note(self, trial_id: int, **attributes: Any) -> None:
        for key, value in _noted(attributes).items():
            self._study._storage.set_trial_user_attr(trial_id, key, value)

    def _parameters(self, choice: Choice) -> dict[str, Any]:
        """Return `choice` as Optuna parameters.

        Empty if it lies outside the space (a baseline of an axis not searched).
        """
        if choice.execution not in self._space.executions:
            return {}
        if any(choice.technique(slot) not in techniques for slot, techniques in self._space.slots.items()):
            return {}
        return {name: _plain(value) for name, value in self._space.parameters(choice).items()}

    def _suggest(self, pick: Callable[[str, Sequence[Any]], Any]) -> Choice | None:
        """Return the choice of what `pick` returns among the values of each parameter, by its name."""
        sizes = [each.micro_batch for each in self._space.executions]
        size = pick("micro_batch", sizes)
        techniques: dict[str, Technique] = {}
        for slot, among in self._space.slots.items():
            kind = str(pick(slot, list(dict.fromkeys(each.kind for each in among))))
            values = []
            for knob, choices in knob_values(among, kind).items():
                plain = [_plain(value) for value in choices]
                chosen = pick(f"{slot}.{kind}.{knob}", plain) if len(plain) > 1 else plain[0]
                values.append(choices[plain.index(chosen)])
            found = self._by_value[slot].get((kind, *values))
            if found is None:
                return None
            techniques[slot] = found
        return Choice.of(self._space.executions[sizes.index(size)], techniques)

    def _storage_errors(self) -> _StorageErrors:
        return _StorageErrors(self._path)


def _values_of(space: Space) -> dict[str, list[Any]]:
    """Return the values of each parameter of `space`."""
    found: dict[str, list[Any]] = {"micro_batch": [each.micro_batch for each in space.executions]}
    for slot, among in space.slots.items():
        found[slot] = list(dict.fromkeys(each.kind for each in among))
        for kind in found[slot]:
            for knob, choices in knob_values(among, kind).items():
                found[f"{slot}.{kind}.{knob}"] = [_plain(value) for value in choices]
    return found


def _text_of(values: Mapping[str, Sequence[Any]]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _create(path: Path) -> None:
    """Make an empty study at `path`, whole or not at all.

    Optuna makes its tables and their indexes one by one. A process that died between them would leave a table
    whose names need not be unique, and which later ones take for complete.
    """
    partial = path.with_name(f".{path.name}.tmp")
    with contextlib.suppress(OSError):  # SQLite reports it
        for rest in path.parent.glob(
            f"{partial.name}*"
        ):  # SQLite would play a journal back into the new file
            rest.unlink()
        os.close(
            os.open(partial, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        )  # it would be readable by all
    _storage(partial).engine.dispose()
    partial.rename(path)


def _storage(path: Path) -> optuna.storages.RDBStorage:
    storage = optuna.storages.RDBStorage(
        f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": _LOCKED_S}}
    )
    event.listen(storage.engine, "connect", _without_fsync)
    storage.engine.dispose()  # the connection that made the tables
    return storage


def _without_fsync(connection: sqlite3.Connection, _: object) -> None:
    """Commit without waiting for the disk."""
    # Commits survive the death of this process; after a power cut the event log restores the study. Optuna
    # commits every parameter of every trial, so waiting took most of a search's own time.
    connection.execute("PRAGMA synchronous = OFF")


def _noted(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return attributes of a trial as they are stored: documents as JSON text."""
    return {key: json.dumps(value) if isinstance(value, dict) else value for key, value in attributes.items()}


def _plain(value: Any) -> Any:
    """Return a scalar for Optuna's categories; other values become JSON text."""
    return value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value)


def _text(settings: dict[str, Any] | None, result: TrialResult | None) -> str:
    """Return settings and result as they are stored."""
    return json.dumps([settings, result and result.model_dump(mode="json")], sort_keys=True)


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


def is_unreached(error: BaseException | None) -> bool:
    """Return whether SQLite failed before the content: locked, no space, no permission."""
    while error is not None:
        # SQLAlchemy's errors hold SQLite's.
        if getattr(getattr(error, "orig", error), "sqlite_errorname", "").startswith(_UNREACHED):
            return True
        error = error.__cause__
    return False


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
            kind = EnvironmentFault if is_unreached(error) else DamagedStudy
            raise kind(
                f"The study {self._path} cannot be read or written.",
                evidence=str(cause).strip().split("\n")[0],
                fix="free space in that folder and continue with --resume, or start a new study with --study",
                code="MT402",
            ) from error
