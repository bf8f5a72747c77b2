"""Random cases: a workload, settings over all axes, and the user's behaviour in the training loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from fuzz.models import ModelSpec, draw_model
from memtune.search_spaces import find, kinds
from memtune.technique import Exactness

SLOTS = {
    "execution.order": 0.1,
    "recompute": 0.5,
    "split": 0.1,
    "sharding.states": 0.0,
    "sharding.communication": 0.0,
    "sharding.parallel": 0.0,
    "offload.states": 0.45,
    "offload.activations": 0.3,
}
"""Slot → probability that a technique other than the null one is drawn on one rank."""
BY_RANKS = ("sharding.states", "sharding.parallel")
ON_RANKS = {"sharding.communication": 0.05, "execution.order": 0.0, "offload.states": 0.25}
"""The same for some slots on several ranks."""
SKIPPED = ("memory_budget",)
"""Kinds that need torch.compile, whose compilation takes longer than a case may."""
BEHAVIOURS = (
    "clip",
    "clip_value",
    "scheduler",
    "ema",
    "load",
    "copy",
    "raise",
    "evaluate",
    "larger",
    "closure",
)


@dataclass(frozen=True)
class Case:
    """One case; `str` is enough to run it again."""

    model: ModelSpec
    settings: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]
    """Slot → the technique's kind and knobs."""
    behaviours: tuple[str, ...]
    accumulate: int
    own_loop: bool
    """The user's loop with `Tuned.micro_batch`, not `Tuned.step`."""
    ranks: int

    @property
    def document(self) -> dict[str, Any]:
        """Return the settings as in a config."""
        found: dict[str, Any] = {"execution": {"micro_batch": 2, "accumulate": self.accumulate}}
        for slot, fields in self.settings:
            axis, _, name = slot.partition(".")
            if name:
                found.setdefault(axis, {})[name] = dict(fields)
            else:
                found[axis] = dict(fields)
        return found

    @property
    def exactness(self) -> set[Exactness]:
        """Return the classes of exactness of the techniques."""
        found = set()
        for slot, fields in self.settings:
            knobs = dict(fields)
            found.add(find(slot, knobs["kind"])(**knobs).exactly())
        return found

    def smaller(self) -> Iterator[Case]:
        """Yield cases with one thing less."""
        for index in range(len(self.settings)):
            yield replace(self, settings=self.settings[:index] + self.settings[index + 1 :])
        for index in range(len(self.behaviours)):
            yield replace(self, behaviours=self.behaviours[:index] + self.behaviours[index + 1 :])
        pieces = self.model.pieces
        if len(pieces) > 1:
            for index in range(len(pieces)):
                yield replace(self, model=replace(self.model, pieces=pieces[:index] + pieces[index + 1 :]))
        for simpler in (
            {"loss": "mean"},
            {"tied": False},
            {"nested": False},
            {"batch": "fixed"},
            {"adam": False},
        ):
            model = replace(self.model, **simpler)
            if model != self.model:
                yield replace(self, model=model)
        if self.model.blocks > 1:
            yield replace(self, model=replace(self.model, blocks=self.model.blocks - 1))
        if self.accumulate > 1:
            yield replace(self, accumulate=1)
        if self.own_loop and not self.behaviours:
            yield replace(self, own_loop=False)
        for index, (slot, fields) in enumerate(self.settings):
            if len(fields) > 1:
                plain = (slot, fields[:1])
                yield replace(self, settings=(*self.settings[:index], plain, *self.settings[index + 1 :]))


def draw_case(seed: int, ranks: int) -> Case:
    """Return the case of `seed` on `ranks` ranks."""
    return next(draw_cases(seed, ranks))


def draw_cases(seed: int, ranks: int) -> Iterator[Case]:
    """Yield the case of `seed`, then cases of other settings for its model and loop, for a caller that needs
    settings that fit.
    """
    random = Random(f"{seed} {ranks}")
    case = _drawn_case(random, ranks)
    while True:
        yield case
        other = _drawn_case(random, ranks)
        model = replace(case.model, adam=other.model.adam)
        case = replace(case, model=model, settings=other.settings)


def _drawn_case(random: Random, ranks: int) -> Case:
    settings = []
    shared = random.choice(["sharding.states"] * 4 + ["sharding.parallel"]) if ranks > 1 else ""
    for slot, alone in SLOTS.items():
        # Ranks train one model in one of two ways; of both together, few combinations fit on few ranks.
        share = float(slot == shared) if slot in BY_RANKS else ON_RANKS.get(slot, alone) if shared else alone
        if random.random() < share:
            kind = random.choice([each for each in kinds(slot) if each not in ("none", *SKIPPED)])
            settings.append((slot, _drawn(random, slot, kind)))
    classes = {find(slot, dict(fields)["kind"])(**dict(fields)).exactly() for slot, fields in settings}
    exact = classes <= {Exactness.BITWISE} and ranks == 1
    return Case(
        model=draw_model(random, ranks=ranks, adam=exact and random.random() < 0.5),
        settings=tuple(settings),
        behaviours=tuple(sorted(random.sample(BEHAVIOURS, random.choice([0, 0, 1, 1, 2])))),
        accumulate=random.choice([1, 1, 2, 3]),
        own_loop=random.random() < 0.5,
        ranks=ranks,
    )


def _drawn(random: Random, slot: str, kind: str) -> tuple[tuple[str, Any], ...]:
    """Return `kind` and some knobs with values that a search would try."""
    fields: list[tuple[str, Any]] = [("kind", kind)]
    if kind == "copy_out":
        fields.append(("min_bytes", 0))  # tensors of these models are small
    technique = find(slot, kind)
    for knob, values in technique(kind=kind).choices().items():
        if random.random() < 0.4 and "dtype" not in knob:  # another recording
            fields.append((knob, random.choice(values)))
    try:
        technique(**dict(fields))
    except ValueError:  # knobs that exclude each other
        return tuple(fields[:1])
    return tuple(fields)
