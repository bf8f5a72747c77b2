"""Random cases: a workload, settings over all axes, and the user's behaviour in the training loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from fuzz.models import ModelSpec, draw_model
from memtune.search_spaces import find, kinds
from memtune.technique import Exactness

SLOTS = {
    "execution.order": 0.12,
    "recompute": 0.5,
    "split": 0.12,
    "sharding.states": 0.0,
    "sharding.communication": 0.1,
    "sharding.parallel": 0.0,
    "offload.states": 0.45,
    "offload.activations": 0.3,
}
"""Slot → probability that a technique other than the null one is drawn, if any fits."""
BY_RANKS = ("sharding.states", "sharding.parallel")
MODELS_SETTINGS, SETTINGS_LOOPS, DRAWS = 6, 6, 6
"""Settings drawn for a model, loops for each of them, and draws for a slot before it stays empty."""
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
    "halve_grads",
    "decay_weights",
    "save",
    "replace_grads",
    "clamp_data",
    "clear_moments",
    "raise_in_block",
    "raise_in_backward",
    "evaluate_before_backward",
    "freeze",
    "keep_grads",
    "drop_grads",
    "backward_twice",
    "grad_hooks",
    "module_hooks",
    "averaged_model",
    "scaler",
    "state_dict_before_step",
    "inference_mode",
    "zero_in_place",
    "log_norms",
    "autograd_grad",
    "sam",
)
OF_OWN_LOOP = {
    "clip",
    "clip_value",
    "closure",
    "halve_grads",
    "replace_grads",
    "clamp_data",
    "keep_grads",
    "drop_grads",
    "evaluate_before_backward",
    "backward_twice",
    "scaler",
    "state_dict_before_step",
    "zero_in_place",
    "autograd_grad",
    "sam",
}
"""Behaviours between backward and the optimizer's step."""

NOT_UNDER = {
    # Its shards have the gradients after a step, and the model's own parameters none to be kept. Gradients
    # are shards and weights whole: torch refuses to add one to the other.
    **dict.fromkeys(("zero1", "zero2"), ("keep_grads", "sam")),
    # FSDP2 computes with other parameters than those that have the hooks.
    **dict.fromkeys(("fsdp", "zero3", "mics", "paro", "amsp"), ("grad_hooks",)),
    # torch's DistributedDataParallel cannot go on after these.
    "ddp": ("raise_in_block", "raise_in_backward", "freeze"),
}
"""Kind → behaviours that are no cases under it."""

Settings = tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]
"""(slot, (field, value) pairs, the kind first) pairs."""


@dataclass(frozen=True)
class Case:
    """One case; `str` is enough to run it again."""

    model: ModelSpec
    settings: Settings
    """Slot → the technique's kind and knobs."""
    behaviours: tuple[str, ...]
    accumulate: int
    own_loop: bool
    """The user's loop with `Tuned.micro_batch`, not `Tuned.step`."""
    ranks: int
    start: str = "device"
    """Place of the model before `apply`: its device, the host, or none (`deferred`)."""
    device: str = "cpu"
    """Device type: `cpu` or `sim`."""

    @property
    def loops(self) -> bool:
        """True if the user calls backward and the optimizer."""
        return self.own_loop or not OF_OWN_LOOP.isdisjoint(self.behaviours)

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
            {"buckets": False},
            {"groups": False},
        ):
            model = replace(self.model, **simpler)
            if model != self.model:
                yield replace(self, model=model)
        if self.model.blocks > 1:
            yield replace(self, model=replace(self.model, blocks=self.model.blocks - 1))
        if self.accumulate > 1:
            yield replace(self, accumulate=1)
        if self.start != "device":
            yield replace(self, start="device")
        if self.own_loop and not self.behaviours:
            yield replace(self, own_loop=False)
        for index, (slot, fields) in enumerate(self.settings):
            if len(fields) > 1:
                plain = (slot, fields[:1])
                yield replace(self, settings=(*self.settings[:index], plain, *self.settings[index + 1 :]))


def draw_spec(seed: int, ranks: int) -> ModelSpec:
    """Return the model of `seed`."""
    random = Random(f"{seed} {ranks}")
    return draw_model(random, ranks=ranks, adam=ranks == 1 and random.random() < 0.4)


def draw_cases(
    seed: int, ranks: int, fits: Callable[[Case], bool], draws: Counter[str], device: str = "cpu"
) -> Iterator[Case]:
    """Yield cases of the model of `seed`: `MODELS_SETTINGS` settings under `SETTINGS_LOOPS` loops each.

    Settings are drawn slot by slot among those that `fits` accepts with the slots before; `draws` counts
    what it accepts and refuses.
    """
    random, model = Random(f"settings {seed} {ranks}"), draw_spec(seed, ranks)
    starts = Random(f"starts {seed} {ranks}")
    bare = Case(model, settings=(), behaviours=(), accumulate=1, own_loop=False, ranks=ranks, device=device)
    for _ in range(MODELS_SETTINGS):
        case = _fitting(random, replace(bare, accumulate=random.choice([1, 1, 2, 3])), fits, draws)
        if case is None:
            continue
        loops = {_loop(random) for _ in range(SETTINGS_LOOPS)}
        chosen = {dict(fields)["kind"] for _, fields in case.settings}
        never = {each for kind, those in NOT_UNDER.items() if kind in chosen for each in those}
        for behaviours, own_loop in sorted(loops):
            start = starts.choice(("device", "host", "deferred"))
            behaviours = tuple(each for each in behaviours if each not in never)
            yield replace(case, behaviours=behaviours, own_loop=own_loop, start=start)


def _loop(random: Random) -> tuple[tuple[str, ...], bool]:
    count = random.choice([0, 1, 1, 1, 2, 2, 3])
    return tuple(sorted(random.sample(BEHAVIOURS, count))), random.random() < 0.5


def _fitting(random: Random, case: Case, fits: Callable[[Case], bool], draws: Counter[str]) -> Case | None:
    """Return `case` with settings that fit; None if no draw does."""
    shared = random.choice(["sharding.states"] * 4 + ["sharding.parallel"]) if case.ranks > 1 else ""
    only_on_ranks = () if shared else ("sharding.communication",)
    slots = [slot for slot, share in SLOTS.items() if slot not in only_on_ranks and random.random() < share]
    if not slots and not shared:
        slots = ["recompute"]
    # Ranks train one model in one of two ways; of both together, few combinations fit on few ranks.
    for slot in [shared, *slots] if shared else slots:
        for _ in range(DRAWS):
            kind = random.choice([each for each in kinds(slot) if each not in ("none", *SKIPPED)])
            drawn = replace(case, settings=(*case.settings, (slot, _drawn(random, slot, kind))))
            # An update of Adam divides by the gradient's own size, which makes rounding as large as it.
            if case.model.adam and not drawn.exactness <= {Exactness.BITWISE}:
                continue
            is_fit = fits(drawn)
            draws["fit" if is_fit else "refused"] += 1
            if is_fit:
                case = drawn
                break
    return case if case.settings and (not shared or case.settings[0][0] == shared) else None


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
