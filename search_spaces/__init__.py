"""The catalogue: one technique, one file. The folder is the registry: `recompute: {kind: full}` is
`recompute/full.py`.

A slot is a folder (`sharding.states` is `sharding/states/`), a kind is the stem of a file in it that does not
start with an underscore. A new technique needs no registration elsewhere.
"""

from __future__ import annotations

import difflib
import importlib
import os
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Protocol

from memtune.errors import ConfigError, UsageError
from memtune.search_spaces._cards import Card, knob_texts as knob_texts, read_cards

if TYPE_CHECKING:
    from memtune.technique import Technique

SLOTS = (
    "execution.order",
    "recompute",
    "split",
    "sharding.states",
    "sharding.communication",
    "sharding.parallel",
    "offload.states",
    "offload.activations",
    "allocator",
)
"""Every slot, in the order in which a config lists them."""

PASS_ORDER = (
    "sharding.parallel",
    "split",
    "recompute",
    "offload.activations",
    "sharding.states",
    "sharding.communication",
    "offload.states",
    "execution.order",
    "allocator",
)
"""The slots in the order of their passes, from the inside out; execution comes before all of them.

A sharding pass must see every use of a weight, the recomputed ones included, and offload moves the shards.
"""

NULL_KINDS = {slot: {"allocator": "native", "execution.order": "program"}.get(slot, "none") for slot in SLOTS}
"""Kind of the technique that does nothing, by slot."""


@cache
def kinds(slot: str) -> tuple[str, ...]:
    """Return the names of the techniques of `slot`, the null one first; reads the folder without importing
    them.

    Raises:
        ConfigError: There is no such slot.
    """
    if slot not in SLOTS:
        raise ConfigError(
            f"There is no axis '{slot}'.{did_you_mean(slot, SLOTS)}",
            evidence=f"Known: {', '.join(SLOTS)}.",
            code="MT201",
        )
    folder = os.path.join(os.path.dirname(__file__), *slot.split("."))
    found = {each.name for each in pkgutil.iter_modules([folder]) if not each.ispkg and each.name[0] != "_"}
    return tuple(sorted(found, key=lambda kind: (kind != NULL_KINDS[slot], kind)))


def matching(asked: str) -> tuple[tuple[str, str], ...]:
    """Return slot and kind of the techniques that `asked` names: `full`, or `recompute=full`.

    Raises:
        UsageError: There is none.
    """
    axis, _, kind = asked.rpartition("=")
    found = tuple(
        (slot, kind)
        for slot in SLOTS
        if kind in kinds(slot) and (not axis or axis in (slot, slot.split(".")[0]))
    )
    if not found:
        known = tuple(dict.fromkeys(each for slot in SLOTS for each in kinds(slot)))
        raise UsageError(
            f"There is no technique '{asked}'.{did_you_mean(kind, known)}",
            fix="memtune techniques  lists them",
            code="MT100",
        )
    return found


@cache
def find(slot: str, kind: str) -> type[Technique]:
    """Return the technique class in `search_spaces/<slot>/<kind>.py`; imports that file only.

    Raises:
        ConfigError: There is no such slot, or no such technique in it.
    """
    known = kinds(slot)
    if kind not in known:
        raise ConfigError(
            f"There is no technique '{kind}' for {slot}.{did_you_mean(kind, known)}",
            evidence=f"Known: {', '.join(known)}.",
            fix=f"memtune techniques  lists what {slot} can be",
            code="MT201",
        )
    module = importlib.import_module(f"memtune.search_spaces.{slot}.{kind}")
    found = [
        each for each in vars(module).values() if _is_technique(each) and each.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise TypeError(f"{module.__name__} must define one Technique, it defines {len(found)}")
    return found[0]  # type: ignore[no-any-return]  # _is_technique tells


@cache
def null(slot: str) -> Technique:
    """Return the technique of `slot` that does nothing, used by a config that omits the slot."""
    kind = NULL_KINDS.get(slot) or kinds(slot)[0]
    return find(slot, kind)(kind=kind)


class HasChosen(Protocol):
    """A `Target`, a `Facts` or a `Context`."""

    @property
    def chosen(self) -> Mapping[str, Technique]:
        """Techniques by slot."""


def active(config: HasChosen, slot: str) -> Technique | None:
    """Return the technique chosen in `slot`, None for the null technique."""
    found = config.chosen.get(slot)
    return None if found is None or is_null(found) else found


def is_null(technique: Technique) -> bool:
    """Return True for the technique of a slot that does nothing."""
    return technique.kind == NULL_KINDS[technique.slot]


def all_techniques() -> tuple[type[Technique], ...]:
    """Return every technique, slot by slot, the null one first; imports all of them."""
    return tuple(find(slot, kind) for slot in SLOTS for kind in kinds(slot))


def cards() -> tuple[Card, ...]:
    """Return title, source and exactness of every technique, slot by slot, without importing any."""
    return read_cards((slot, kind) for slot in SLOTS for kind in kinds(slot))


def did_you_mean(word: str, known: tuple[str, ...] | list[str]) -> str:
    """Return ` Did you mean 'full'?` if a known word is close to `word`, else an empty string."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" Did you mean '{near[0]}'?" if near else ""


def _is_technique(value: object) -> bool:
    from memtune.technique import Technique

    return (
        isinstance(value, type)
        and issubclass(value, Technique)
        and value is not Technique
        and value.__name__[0] != "_"
    )
