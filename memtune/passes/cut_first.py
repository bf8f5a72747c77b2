"""Logits that are cut before the loss (`logits[..., :-1, :].contiguous()`), seen as a head over hidden states that are cut.

The cut is of rows, so it may as well come before the head's product: that is what `runtime.logits` does. Here the Step is
rewritten alike, as far as finding the pattern of a tiled loss needs it: rows keep their places, so that until the ops of the loss
are replaced what reads may stand before what makes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from memtune.program import Kind, Phase, Step

_PRODUCTS = ("aten.mm.default", "aten.addmm.default")
_CLONE, _CAST, _SLICE = "aten.clone.default", "aten._to_copy.default", "aten.slice_backward.default"


@dataclass(frozen=True, eq=False)
class Cut:
    """A Step whose cut comes before the head."""

    step: Step
    hidden: int
    """Storage of the hidden states before the cut."""


def cut_first(step: Step) -> Cut | None:
    """`step` with the cut of its logits in front of their head; None where they are not cut, or not in one known way."""
    clones = [
        op
        for op in np.flatnonzero((step.op_phase == Phase.FORWARD) & (step.op_block < 0)).tolist()
        if _name(step, op) == _CLONE and len(_reads(step, op)) == 1
    ]
    for clone in clones:
        chain = _up_to_product(step, _reads(step, clone)[0])
        after = _made(step, clone)
        if chain is None or len(after) != 1 or not step.bytes[after[0]] < step.bytes[_reads(step, clone)[0]]:
            continue
        slices = [op for op in range(step.n_ops) if _name(step, op) == _SLICE and step.op_block[op] < 0]
        return _moved(step, clone, chain, slices[0]) if len(slices) == 1 else None
    return None


def _up_to_product(step: Step, storage: int) -> list[int] | None:
    """Ops from a product with a weight to the one that makes `storage`, nothing but casts after the product."""
    chain: list[int] = []
    while True:
        op = int(step.producer[storage])
        if op < 0 or _name(step, op) not in (*_PRODUCTS, _CAST):
            return None
        chain.insert(0, op)
        if _name(step, op) in _PRODUCTS:
            return chain
        (storage,) = _reads(step, op)


def _moved(step: Step, clone: int, chain: list[int], cut_back: int) -> Cut | None:
    product = chain[0]
    before, (after,) = _reads(step, clone)[0], _made(step, clone)
    x, weight = _reads(step, product)[-2:]
    share = step.bytes[after] / step.bytes[before]
    incoming, (whole,) = _reads(step, cut_back)[0], _made(step, cut_back)
    cast = int(step.producer[x]) if step.producer[x] >= 0 and _name(step, int(step.producer[x])) == _CAST else -1
    hidden = _reads(step, cast)[0] if cast >= 0 else x
    back = _to_hidden(step, whole, weight)
    if back is None:
        return None
    gradients, last, final = back
    n_bytes, producer, use_storage = step.bytes.copy(), step.producer.copy(), step.use_storage.copy()
    shrunk = [made for op in (*chain, *gradients) if op in chain or _name(step, op) == _CAST for made in _made(step, op)]
    shrunk += [made for op in gradients if weight in _reads(step, op) for made in _made(step, op)] + ([x] if cast >= 0 else [])
    for storage in set(shrunk) - {final}:
        n_bytes[storage] = round(int(step.bytes[storage]) * share)
    n_bytes[after] = n_bytes[whole] = round(int(step.bytes[hidden]) * share)

    def read(ops: list[int], old: int, new: int) -> None:
        use_storage[np.isin(step.use_op, ops) & (step.use_storage == old)] = new

    read([op for op in step.use_op[step.use_storage == after].tolist() if op != clone], after, before)
    read([clone], before, hidden)
    read([cast if cast >= 0 else product], hidden, after)
    read(step.use_op[step.use_storage == whole].tolist(), whole, incoming)
    read([cut_back], incoming, whole)
    producer[whole], producer[final] = last, cut_back
    saves = step.save_storage.copy()
    if cast < 0:
        saves[(saves == x) & np.isin(step.save_used_until, gradients)] = after
        read(gradients, x, after)
    moved = replace(step, bytes=n_bytes, producer=producer, use_storage=use_storage, save_storage=saves)
    return Cut(moved, hidden)


def _to_hidden(step: Step, gradient: int, weight: int) -> tuple[list[int], int, int] | None:
    """Backward from the whole gradient of the logits: its ops, the one that makes the gradient of hidden states, and that."""
    ops: list[int] = []
    while True:
        readers = sorted(set(step.use_op[step.use_storage == gradient].tolist()))
        if len(readers) == 1 and _name(step, readers[0]) == _CAST:
            ops.append(readers[0])
            (gradient,) = _made(step, readers[0])
            continue
        products = [op for op in readers if _name(step, op) == "aten.mm.default" and weight in _reads(step, op)]
        if len(products) != 1:
            return None
        ops += readers
        (final,) = _made(step, products[0])
        casts = sorted(set(step.use_op[step.use_storage == final].tolist()))
        if len(casts) == 1 and _name(step, casts[0]) == _CAST and step.op_module[casts[0]] == step.op_module[products[0]]:
            return ops, casts[0], _made(step, casts[0])[0]
        return ops, products[0], final


def _name(step: Step, op: int) -> str:
    return str(step.names[step.op_name[op]])


def _reads(step: Step, op: int) -> list[int]:
    return list(dict.fromkeys(step.use_storage[step.use_op == op].tolist()))


def _made(step: Step, op: int) -> list[int]:
    return np.flatnonzero((step.producer == op) & (step.kind != Kind.WORKSPACE)).tolist()
