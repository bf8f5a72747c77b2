"""Recordings of a model under FSDP2's mixed precision: units compute in a narrower type than their shards
have.

FSDP2 gathers parameters in `param_dtype`, casts floating-point inputs of every unit, and frees the gathered
copies: no op casts a weight, as under autocast. The model is recorded with its parameters in that type and
with the casts of inputs and outputs; the state that a rank keeps (weights, optimizer state, the optimizer's
temporaries) is then given its own type again, parameter by parameter: LoRA's frozen weights may be narrow.
Gradients stay narrow until they are reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from memtune.autotune.record.compiled import CompiledRecordings
from memtune.autotune.record.recording_session import Session
from memtune.compile import Compiling
from memtune.program import Kind, Phase, Recording, Step, columns_of
from memtune.technique import ComputePrecision, Reason

_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class PrecisionRecordings:
    """Recordings of a workload by precision and compile setting, each made when first needed.

    Args:
        of_model: Makes recordings of the eager or compiled model, translated to the target.
    """

    def __init__(self, of_model: CompiledRecordings) -> None:
        self._of_model = of_model
        self._known: dict[tuple[ComputePrecision, Compiling | None], Recording | Reason] = {}

    def __call__(self, precision: ComputePrecision, compiling: Compiling | None) -> Recording | Reason:
        """Return the recording under `precision`, or why the model cannot run so."""
        key = precision, compiling
        if key not in self._known:
            own: dict[str, int] = {}
            found = self._of_model.attempt(compiling, _narrowed_by(precision, own))
            self._known[key] = found if isinstance(found, Reason) else _widened(found, own)
        return self._known[key]


def _narrowed_by(precision: ComputePrecision, own: dict[str, int]) -> Callable[[Session], None]:
    """Return a change of a session to `precision`; it writes bytes per element of the parameters to `own`."""
    narrow = _TYPES[precision.param_dtype]
    output = _TYPES[precision.output_dtype] if precision.output_dtype else None

    def change(session: Session) -> None:
        model = session.model
        with session.mode:
            for name, parameter in model.named_parameters():
                own[name] = parameter.element_size()
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(narrow)
        if precision.cast_forward_inputs:
            for unit in (model, *(model.get_submodule(name) for name in session.blocks)):
                unit.register_forward_pre_hook(
                    lambda _, args, kwargs: _cast((args, kwargs), narrow), with_kwargs=True
                )
        if output is not None:
            model.register_forward_hook(lambda _, args, found: _cast(found, output))

    return change


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map(
        lambda each: each.to(dtype) if isinstance(each, Tensor) and each.is_floating_point() else each, values
    )


def _widened(recording: Recording, own: Mapping[str, int]) -> Recording:
    small = _wide(recording.step, own)
    ratio = small.storages.bytes // np.maximum(recording.step.storages.bytes, 1)
    traffic = small.ops.traffic_bytes // np.maximum(recording.step.ops.traffic_bytes, 1)
    return replace(
        recording,
        step=small,
        bytes_slope=recording.bytes_slope * np.maximum(ratio, 1),
        traffic_slope=recording.traffic_slope * np.maximum(traffic, 1),
        exact={size: _wide(step, own) for size, step in recording.exact.items()},
    )


def _wide(step: Step, own: Mapping[str, int]) -> Step:
    """Return `step` with weights, and what the optimizer makes of them, in elements of `own` bytes."""
    columns, storages = columns_of(step.parameters), step.storages
    itemsize = np.array(
        [own.get(name, size) for name, size in zip(columns.names, columns.itemsize.tolist(), strict=True)]
    )
    factor = np.maximum(itemsize // np.maximum(columns.itemsize, 1), 1)
    mine = np.flatnonzero(storages.owner >= 0)
    owner = storages.owner[mine]
    made_by = np.where(storages.producer[mine] >= 0, step.ops.phase[storages.producer[mine]], Phase.OPTIMIZER)
    # State and the optimizer's temporaries have a weight's size; gradients keep the type of backward.
    wide = (made_by >= Phase.BOUNDARY) & (storages.bytes[mine] == columns.n_bytes[owner])
    wide &= storages.kind[mine] != Kind.GRADIENT
    n_bytes = storages.bytes.copy()
    n_bytes[mine[wide]] *= factor[owner[wide]]
    weights, first = np.unique(columns.storage, return_index=True)
    n_bytes[weights] = storages.bytes[weights] * factor[first]
    updates = step.ops.phase >= Phase.BOUNDARY
    trained = factor[columns.trainable]
    traffic = np.where(updates, step.ops.traffic_bytes * int(trained.max(initial=1)), step.ops.traffic_bytes)
    return replace(
        step.with_storages(bytes=n_bytes).with_ops(traffic_bytes=traffic),
        parameters=replace(columns, itemsize=(columns.itemsize * factor).astype(columns.itemsize.dtype)),
    )


def most_casts_of_a_parameter(step: Step) -> int:
    """Return how often forward casts the parameter that it casts most often; 0 if it casts none."""
    is_cast = np.asarray([name == "aten._to_copy.default" for name in step.names], bool)
    rows = is_cast[step.ops.name] & (step.ops.phase == Phase.FORWARD)
    read = step.uses.storage[rows[step.uses.op]]
    parameters = read[step.storages.kind[read] == Kind.PARAMETER]
    return int(np.bincount(parameters).max(initial=0))
