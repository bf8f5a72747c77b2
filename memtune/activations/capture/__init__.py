"""Capture of the ops of a region of the model, with guards on the data that its Python code read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.activations.capture.capture_lock import CaptureLock as CaptureLock
    from memtune.activations.capture.executed_code import ExecutedCode as ExecutedCode
    from memtune.activations.capture.grad_layouts import (
        accumulate_grad as accumulate_grad,
        guess_layouts as guess_layouts,
        is_accumulated as is_accumulated,
        is_hooked as is_hooked,
        is_watched as is_watched,
        match_layouts as match_layouts,
    )
    from memtune.activations.capture.guards import Guards as Guards, call_key as call_key
    from memtune.activations.capture.packed_sequences import (
        packing_by_known_lengths as packing_by_known_lengths,
    )
    from memtune.activations.capture.region_capture import (
        capture as capture,
        named_state as named_state,
        no_autocast as no_autocast,
        shapes_of as shapes_of,
    )
    from memtune.activations.capture.tape import (
        COLLECTIVE_INSIDE as COLLECTIVE_INSIDE,
        MOST_ELEMENTS as MOST_ELEMENTS,
        SIZED_BY_VALUES as SIZED_BY_VALUES,
        Call as Call,
        CaptureError as CaptureError,
        ConstantTensors as ConstantTensors,
        GradientLike as GradientLike,
        Outside as Outside,
        SideEffectError as SideEffectError,
        Slot as Slot,
        Tape as Tape,
        distributions_are_valid as distributions_are_valid,
        fakes_look_real as fakes_look_real,
    )
else:
    __getattr__ = open_door(__name__)
