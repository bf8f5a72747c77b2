"""What the answer has to beat: the user's own setting, full recompute, and plain FSDP. They are always measured."""

from __future__ import annotations

from typing import NamedTuple

from memtune.autotune.candidates import Choice
from memtune.search_spaces import find, kinds
from memtune.search_spaces.execution import Execution
from memtune.technique import Technique


class Guard(NamedTuple):
    """A setting that needs no search, and its name."""

    name: str
    choice: Choice


def plain_choice(global_batch: int, ranks: int) -> Choice:
    """The user's own setting: all samples of a rank in one micro-batch; several ranks average their gradients."""
    return _choice(global_batch, ranks, {})


def guards(global_batch: int, ranks: int) -> tuple[Guard, ...]:
    """The guards, the user's own setting first."""
    found = [Guard("plain", plain_choice(global_batch, ranks))]
    if "full" in kinds("recompute"):
        found.append(Guard("full recompute", _choice(global_batch, ranks, {"recompute": "full"})))
    if ranks > 1 and "fsdp" in kinds("sharding.states"):
        found.append(Guard("plain fsdp", _choice(global_batch, ranks, {"sharding.states": "fsdp"})))
    return tuple(found)


def _choice(global_batch: int, ranks: int, wanted: dict[str, str]) -> Choice:
    kind_by_slot = ({"sharding.states": "ddp"} if ranks > 1 else {}) | wanted
    techniques: dict[str, Technique] = {slot: find(slot, kind)(kind=kind) for slot, kind in kind_by_slot.items()}
    return Choice.of(Execution(micro_batch=max(1, global_batch // ranks)), techniques)
