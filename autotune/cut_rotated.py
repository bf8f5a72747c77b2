"""Recordings of a model whose weights go round the ranks: the layers are changed on the fake model, one rank is watched.

What a rank computes is what it computes without; so nothing needs to be compared but that nobody else uses a rotated weight, of
which each rank has another part.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from memtune.autotune.record import Session
from memtune.program import Phase, Recording
from memtune.runtime.ring import Ring
from memtune.runtime.rotate import rotatable, rotate_layers
from memtune.runtime.sharding import meshes
from memtune.technique import Reason

ROTATED = {"rotated": False, "rotated in place": True}
"""What may be asked of `CutRecordings`, and whether shards are written over the own one."""
_FIX = "another degree, or parallel: {kind: none}"


def rotate_session(session: Session, *, degree: int, in_place: bool, layers: list[str], refused: list[str]) -> None:
    """Make the weights of the model of `session` go round; they stay plain tensors, so that all that is recorded is a plain op.

    Args:
        session: Changed in place.
        degree: Ranks of a ring.
        in_place: Whether shards are written over the own one.
        layers: Gets the names of the layers.
        refused: Gets a line on each that stays whole.
    """
    model = session.model
    layers[:], refused[:] = rotatable(model, degree)
    before = dict(model.named_parameters())
    with session.entered():
        rotate_layers(model, layers, Ring(meshes("cpu", degree)[1].get_group().group_name, degree, 0, in_place))
    new_of = {old: model.get_parameter(name) for name, old in before.items()}
    for group in session.optimizer.param_groups:
        group["params"] = [new_of.get(parameter, parameter) for parameter in group["params"]]


def nothing_rotates(refused: Collection[str]) -> Reason:
    """Why no weight goes round."""
    first = min(refused, default="the model has no plain linear layer or embedding")
    return Reason(f"no weight can go round the ranks: {first}", _FIX)


def used_elsewhere(recording: Recording, layers: Collection[str], parameters: Collection[str]) -> Reason | None:
    """Why code outside of `layers` would see a part of one of the weights `parameters`; None where it does not use them."""
    step = recording.step
    weights = {p.storage: p.name for p in step.parameters if p.name in parameters}
    inside = np.array([name in layers for name in step.modules], bool)
    uses = (
        np.isin(step.use_storage, list(weights))
        & (step.op_phase[step.use_op] <= Phase.FORWARD)
        & ~inside[step.op_module[step.use_op]]
    )
    for at in np.flatnonzero(uses).tolist():
        op = step.use_op[at]
        name, module = step.names[step.op_name[op]], step.modules[step.op_module[op]]
        where = {"": "the model", "(outside)": "the loss"}.get(module, module)
        return Reason(f"{name} in {where} uses {weights[int(step.use_storage[at])]}, of which each rank has a part", _FIX)
    return None
