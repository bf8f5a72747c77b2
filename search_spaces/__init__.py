"""The catalogue: one technique, one file. The folder is the registry: `recompute: {kind: full}` is
`recompute/full.py`.

A slot is a folder (`sharding.states` is `sharding/states/`), a kind is the stem of a file in it that does not
start with an underscore. Nothing else has to be told about a new technique.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from functools import cache

from memtune.errors import ConfigError
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
"""The slots in the order of the passes, from the inside out; execution comes before them all.

A sharding pass must see every use of a weight, the recomputed ones too, and offloading moves what sharding
left.
"""

NULL_KINDS = {slot: {"allocator": "native", "execution.order": "program"}.get(slot, "none") for slot in SLOTS}
"""The technique that stands for "nothing" in each slot."""


@cache
def kinds(slot: str) -> tuple[str, ...]:
    """Names of the techniques of `slot`, the null one first; reads the folder, imports none of them.

    Raises:
        ConfigError: There is no such slot.
    """
    if slot not in SLOTS:
        raise ConfigError(
            f"There is no axis '{slot}'.{did_you_mean(slot, SLOTS)}",
            evidence=f"Known: {', '.join(SLOTS)}.",
            code="MT201",
        )
    package = importlib.import_module(f"memtune.search_spaces.{slot}")
    found = {
        each.name for each in pkgutil.iter_modules(package.__path__) if not each.ispkg and each.name[0] != "_"
    }
    return tuple(sorted(found, key=lambda kind: (kind != NULL_KINDS[slot], kind)))


@cache
def find(slot: str, kind: str) -> type[Technique]:
    """The technique class in `search_spaces/<slot>/<kind>.py`; imports that file alone.

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
    """The technique that does nothing in `slot`: what a config means by leaving the slot out."""
    kind = NULL_KINDS.get(slot) or kinds(slot)[0]
    return find(slot, kind)(kind=kind)


def all_techniques() -> tuple[type[Technique], ...]:
    """Every technique there is, slot by slot, the null one first; imports them all."""
    return tuple(find(slot, kind) for slot in SLOTS for kind in kinds(slot))


def did_you_mean(word: str, known: tuple[str, ...] | list[str]) -> str:
    """` Did you mean 'full'?` when something known is close to `word`, else nothing."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" Did you mean '{near[0]}'?" if near else ""


def _is_technique(value: object) -> bool:
    return (
        isinstance(value, type)
        and issubclass(value, Technique)
        and value is not Technique
        and value.__name__[0] != "_"
    )
