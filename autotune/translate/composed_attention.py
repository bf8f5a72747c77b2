"""Attention that a model computes from its parts (product, softmax, product), where a fused kernel would
do.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from memtune.program import Hints, Phase, Step

_PRODUCTS = ("aten.bmm.", "aten.baddbmm.")
_OTHER_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.convolution.")
_LONGEST_CHAIN = 8
"""Ops between a product and the softmax: scaling, masks, casts, dropout."""


def composed_attention(step: Step, hints: Hints) -> int:
    """Return how many times the forward computes attention from its parts.

    That is a softmax with a batched product before it and one after it. Calls of
    `scaled_dot_product_attention` that run as small ops are not counted: no kernel supports them.
    """
    softmax = {i for i, name in enumerate(step.names) if name.startswith("aten._softmax.")}
    forward = step.ops.phase == Phase.FORWARD
    rows = [int(op) for op in np.flatnonzero(forward) if step.ops.name[op] in softmax]
    called = [range(*call.ops) for call in hints.calls if call.kind == "attention"]
    rows = [op for op in rows if not any(op in each for each in called)]
    if not rows:
        return 0
    reads: dict[int, list[int]] = {}
    readers: dict[int, list[int]] = {}
    producers = step.storages.producer[step.uses.storage].tolist()
    for op, producer in zip(step.uses.op.tolist(), producers, strict=True):
        if producer >= 0 and producer != op and forward[op]:
            reads.setdefault(op, []).append(producer)
            readers.setdefault(producer, []).append(op)
    return sum(_reaches(step, op, reads) and _reaches(step, op, readers) for op in rows)


def _reaches(step: Step, start: int, onward: dict[int, list[int]]) -> bool:
    """Return whether a batched product is reached from `start` before any other product."""
    seen: set[int] = {start}
    front: Collection[int] = [start]
    for _ in range(_LONGEST_CHAIN):
        front = {op for each in front for op in onward.get(each, ())} - seen
        seen |= set(front)
        names = {op: step.names[step.ops.name[op]] for op in front}
        if any(name.startswith(_PRODUCTS) for name in names.values()):
            return True
        front = [op for op, name in names.items() if not name.startswith(_OTHER_PRODUCTS)]
    return False
