"""Norms in the translation to CUDA: precision of their statistics, and batch norms on cuDNN.

A batch norm on cuDNN returns a reserve in addition to its statistics, which autograd packs last and its
backward reads. Torch's own kernel is preceded by an empty tensor instead.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from memtune.autotune.translate import translation_table as table
from memtune.autotune.translate.kernel_fusion import UNPACK_ROOM, KernelFusion
from memtune.program import I32, Edit, Hints, Step


def widen_statistics(fusion: KernelFusion, hints: Hints) -> None:
    """Keep means and deviations of 16-bit inputs in fp32, where CPU keeps them in 16 bits."""
    step = fusion.step
    for name in table.NORM_STATISTICS.keys() & set(step.names):
        for op in _rows(step, name):
            if (given := _arguments(hints, op)) is None:
                continue
            (dtype, shape, _), axes = given[0]["t"], given[1]
            by_row = name == "aten.native_layer_norm.default"
            rows = int(np.prod(shape[: len(shape) - len(axes)])) if by_row else shape[1]
            made = np.flatnonzero(step.storages.producer == op)[1:]
            if dtype in ("float16", "bfloat16"):
                fusion.bytes[made[step.storages.bytes[made] == 2 * rows]] = 4 * rows


def use_cudnn(fusion: KernelFusion, hints: Hints) -> int:
    """Turn batch norms that cuDNN supports into its op; return how many there are.

    `hints` give the arguments of each op.
    """
    step = fusion.step
    forward, backward = table.BATCH_NORM
    if forward not in step.names:
        return 0
    reader = _readers(step, backward)
    found: list[tuple[int, int, int]] = []  # the op, its backward or -1, the last of its statistics
    for op in _rows(step, forward):
        given = _arguments(hints, op)
        made = np.flatnonzero(step.storages.producer == op)
        back = reader.get(int(made[-1]), -1) if len(made) == 3 else -1
        if (
            given is not None
            and len(made) == 3
            and _is_cudnns(given, None if back < 0 else _arguments(hints, back))
        ):
            training = given[5]  # of aten::native_batch_norm
            found.append((int(op), back if training else -1, int(made[-1])))
    if found:
        ops, backs, last = (np.asarray(column, np.int32) for column in zip(*found, strict=True))
        fusion.rename(ops, table.CUDNN_BATCH_NORM[0])
        fusion.rename(backs[backs >= 0], table.CUDNN_BATCH_NORM[1])
        _drop_reserves(fusion, ops)
        fusion.later.append(lambda edit: _add_reserves(edit, step, ops, backs, last))
    return len(found)


def _rows(step: Step, name: str) -> I32:
    rows: I32 = np.flatnonzero(step.ops.name == step.names.index(name)).astype(np.int32)
    return rows


def _arguments(hints: Hints, op: int) -> list[Any] | None:
    if op >= len(hints.signatures) or not hints.signatures[op]:
        return None
    given: list[Any] = json.loads(hints.signatures[op])[1]
    return given


def _is_cudnns(given: list[Any], backward: list[Any] | None) -> bool:
    """Return whether it runs on cuDNN in both directions: cuDNN makes all three gradients, needed or not."""
    x, weight, bias, mean, _, training = given[:6]
    if backward is not None and training and not all(backward[-1]):
        return False
    others = (None if each is None else tuple(each["t"]) for each in (weight, bias, mean))
    return table.runs_on_cudnn(tuple(x["t"]), *others, training=bool(training))


def _readers(step: Step, name: str) -> dict[int, int]:
    """Return the op called `name` that reads each storage."""
    if name not in step.names:
        return {}
    uses = np.flatnonzero(step.ops.name[step.uses.op] == step.names.index(name))
    return dict(zip(step.uses.storage[uses].tolist(), step.uses.op[uses].tolist(), strict=True))


def _drop_reserves(fusion: KernelFusion, ops: I32) -> None:
    """Remove the tensors made just before each of `ops` instead of a reserve, which are never used."""
    step = fusion.step
    if table.BATCH_NORM_RESERVE not in step.names:
        return
    before = ops[ops > 0] - 1
    before = before[step.ops.name[before] == step.names.index(table.BATCH_NORM_RESERVE)]
    made = np.flatnonzero(np.isin(step.storages.producer, before) & (step.storages.bytes == 0))
    fusion.dropped_ops[step.storages.producer[made]] = True
    fusion.gone[made] = True


def _add_reserves(edit: Edit, step: Step, ops: I32, backs: I32, last: I32) -> None:
    """Add a reserve to each of `ops`, packed after the `last` of its statistics, read by backward."""
    reserves = edit.add_storages(np.zeros(len(ops), np.int64), producer=ops)
    has = backs >= 0
    edit.add_uses(backs[has], reserves[has])
    save_of = dict(zip(step.saves.storage.tolist(), range(step.saves.n), strict=True))
    packed = np.asarray([each in save_of for each in last.tolist()], bool)
    rows = np.asarray([save_of[each] for each in last[packed].tolist()], np.int32)
    like = step.saves.rows(rows)
    edit.add_saves(
        reserves[packed],
        packed_before=like.packed_before,
        held_until=like.held_until,
        call=like.call,
        unpacked_before=like.unpacked_before,
        unpack_order=like.unpack_order * UNPACK_ROOM + 1,
        is_output=1,
        used_until=like.used_until,
    )
