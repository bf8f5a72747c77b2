"""JSON Schema of a config, for editors and other programs; `load_config` checks the same, with better
messages.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from memtune.config.tuned_config import SCHEMA, MadeFor
from memtune.search_spaces import SLOTS, find, kinds, knob_texts
from memtune.search_spaces.execution import Execution

_REF = "#/$defs/{model}"
_SECTIONS = {
    "memtune": "Version of this schema.",
    "settings": "The micro-batches and one technique per slot: all that a config needs.",
    "measured": "Samples per second, step time and peak in trials, and those of the baselines.",
    "predicted": "The same figures as simulated.",
    "certificate": "Peaks of the chosen setting when it was confirmed, and the check of its losses.",
    "made_for": "Model, device, ranks, batch and versions of the search; `apply` compares them with its own.",
    "plan": "Decisions of the techniques that plan, by slot; solved in the search, checked when loaded.",
    "buckets": "Shapes of shorter batches, with techniques and plans of their own, smallest first.",
    "study": "The search: its name, the trial, seed and time.",
    "evidence": "The file with plan, certificate and measurements in full, and its hash.",
}
"""Texts of the sections of a config."""


def schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a whole config: every slot with every technique it accepts."""
    by_slot = {slot: [find(slot, kind) for kind in kinds(slot)] for slot in SLOTS}
    models: list[type[BaseModel]] = [
        Execution,
        MadeFor,
        *(each for found in by_slot.values() for each in found),
    ]
    refs, shared = models_json_schema([(model, "validation") for model in models], ref_template=_REF)
    for slot, found in by_slot.items():
        for model in found:
            properties = shared["$defs"][refs[(model, "validation")]["$ref"].rpartition("/")[2]]["properties"]
            for knob, text in knob_texts(slot, model.model_fields["kind"].default).items():
                properties[knob]["description"] = text
    settings: dict[str, Any] = {"execution": refs[(Execution, "validation")]}
    for slot, found in by_slot.items():
        techniques = {
            "oneOf": [
                refs[(model, "validation")] | _kind(model.model_fields["kind"].default) for model in found
            ]
        }
        group, _, name = slot.partition(".")
        if group == "execution":
            shared["$defs"][Execution.__name__]["properties"][name] = techniques
        elif name:
            settings.setdefault(group, _mapping({}))["properties"][name] = techniques
        else:
            settings[group] = techniques
    anything = {"type": "object"}
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "memtune config",
        **_mapping(
            {
                "memtune": {"type": "integer", "minimum": 1, "maximum": SCHEMA},
                "settings": _mapping(settings),
                "measured": anything,
                "predicted": anything,
                "certificate": anything,
                "made_for": refs[(MadeFor, "validation")],
                "plan": _mapping(dict.fromkeys(SLOTS, anything)),
                "buckets": {"type": "array", "items": anything},
                "study": anything,
                "evidence": _mapping({"file": {"type": "string"}, "sha256": {"type": "string"}}),
            }
        ),
        "$defs": shared["$defs"],
    }
    for name, text in _SECTIONS.items():
        document["properties"][name] = {**document["properties"][name], "description": text}
    return document


def _kind(kind: str) -> dict[str, Any]:
    # `kind` has a default in the technique's class, but a config must name it.
    return {"required": ["kind"], "properties": {"kind": {"const": kind}}}


def _mapping(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}
