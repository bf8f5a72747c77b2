"""Capture of the ops of a region of the model, with guards on the data that its Python code read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.activations.capture.capture_lock import CaptureLock
    from memtune.activations.capture.grad_layouts import (
        accumulate_grad,
        guess_layouts,
        is_accumulated,
        is_hooked,
        is_watched,
        match_layouts,
    )
    from memtune.activations.capture.guards import Guards, call_key
    from memtune.activations.capture.region_capture import (
        capture,
        named_state,
        no_autocast,
        shapes_of,
    )
    from memtune.activations.capture.tape import (
        COLLECTIVE_INSIDE,
        Call,
        CaptureError,
        ConstantTensors,
        GradientLike,
        Outside,
        SideEffectError,
        Slot,
        Tape,
        fakes_look_real,
    )
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "COLLECTIVE_INSIDE",
    "Call",
    "CaptureError",
    "CaptureLock",
    "ConstantTensors",
    "GradientLike",
    "Guards",
    "Outside",
    "SideEffectError",
    "Slot",
    "Tape",
    "accumulate_grad",
    "call_key",
    "capture",
    "fakes_look_real",
    "guess_layouts",
    "is_accumulated",
    "is_hooked",
    "is_watched",
    "match_layouts",
    "named_state",
    "no_autocast",
    "shapes_of",
]
