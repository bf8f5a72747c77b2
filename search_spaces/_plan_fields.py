"""Types of plan fields: calls of ops and schedules, parsed from and serialized to the plain data of
a config.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import Field, PlainSerializer, PlainValidator

from memtune.program import OpAddress, OpAddresses, Schedule, by_name, from_names


def _read(kind: type[Any], parse: Callable[[Any], Any]) -> PlainValidator:
    def read(value: Any) -> Any:
        if isinstance(value, kind):
            return value
        try:
            return parse(value)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"malformed: {type(error).__name__}: {error}") from error

    return PlainValidator(read)


CallsField = Annotated[
    OpAddresses, _read(OpAddresses, OpAddresses.from_plain), PlainSerializer(OpAddresses.to_plain)
]
"""Calls of a region that do not run again: `{kept: {<op>: [<which>, …]}, skipped: {…}}`."""

CallSetField = Annotated[frozenset[OpAddress], _read(frozenset, from_names), PlainSerializer(by_name)]
"""Calls of ops: `{<op>: [<which>, …]}`."""

ScheduleField = Annotated[Schedule, _read(Schedule, Schedule.from_plain), PlainSerializer(Schedule.to_plain)]
"""A schedule, as `Schedule.to_plain` writes it."""

Index = Annotated[int, Field(ge=0)]
"""Index of a block, a rank or an entry of another field."""

Bytes = Annotated[int, Field(ge=0)]
"""A number of bytes."""


def require_entries(name: str, entries: Sequence[object], blocks: Sequence[int]) -> None:
    """Raise ValueError if `blocks` names entries that the field `name` does not have."""
    if max(blocks, default=-1) >= len(entries):
        raise ValueError(f"blocks names entry {max(blocks)} of {name}, which has {len(entries)}")
