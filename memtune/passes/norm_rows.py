"""Which ops are a norm over the last dim that makes whole tensors inside, and over how many rows.

A norm in plain ops (`x.pow(2).mean(-1)`, `rsqrt`, two products), or one that works in another dtype than its input's (float32 in
a bfloat16 model or under autocast), saves one to three tensors as large as its input. A fused one in the input's own dtype saves
a number or two per row: there is nothing to gain.
"""

from __future__ import annotations

import numpy as np

from memtune.program import WRITES, Phase, Step

_CAST = "aten._to_copy.default"
_FUSED = ("aten.native_layer_norm.default", "aten._fused_rms_norm.default")
_MEAN = "aten.mean.dim"
_ALIKE = (
    *_FUSED, _CAST, _MEAN, "aten.rsqrt.default", "aten.sqrt.default", "aten.pow.Tensor_Scalar", "aten.square.default",
    "aten.mul.Tensor", "aten.add.Tensor", "aten.add_.Scalar", "aten.add_.Tensor", "aten.add.Scalar", "aten.sub.Tensor",
    "aten.div.Tensor", "aten.reciprocal.default",
)  # fmt: skip


class NotAlike(Exception):
    """It is not a module that treats every token alike."""


def has_norms(step: Step) -> bool:
    """Whether any op of the blocks' forward can be part of a norm that makes whole tensors inside; cheap."""
    wanted = [i for i, name in enumerate(step.names) if name in (_CAST, _MEAN)]
    return bool(wanted) and bool(np.isin(step.op_name[(step.op_phase == Phase.FORWARD) & (step.op_block >= 0)], wanted).any())


def norm_rows(step: Step, ops: tuple[int, ...], made: set[int]) -> tuple[int, int]:
    """The tensor that `ops`, a norm over its last dim, read besides weights of that length, and its rows.

    Args:
        step: Whose ops they are.
        ops: All of a module's forward.
        made: Storages that they make.

    Raises:
        NotAlike: They are something else. That the mean is over the last dim is read off sizes; `runtime.tiled_region` sees to it
            on the first tokens that it gets.
    """
    inputs: set[int] = set()
    weights = []
    for op in ops:
        if step.names[step.op_name[op]] not in _ALIKE:
            raise NotAlike
        used = uses_of(step, op, op)
        reads = set(step.use_storage[used].tolist())
        written = set(step.use_storage[used][step.use_mutates[used] == WRITES].tolist())
        weights += [step.parameters[step.parameter_of[s]] for s in reads if step.parameter_of[s] >= 0]
        if written - made or any(len(each.shape) != 1 for each in weights):
            raise NotAlike
        inputs |= {s for s in reads - made if step.parameter_of[s] < 0}
    if len(inputs) != 1 or len({each.shape for each in weights}) > 1:
        raise NotAlike
    x = inputs.pop()
    names = {step.names[step.op_name[op]] for op in ops}
    if _MEAN not in names and not (_CAST in names and names.intersection(_FUSED)):
        raise NotAlike
    itemsize = _itemsize(step, ops, x, {int(step.bytes[each.storage]) // each.shape[0] for each in weights})
    width = weights[0].shape[0] if weights else 0
    return x, _rows(step, ops, x, itemsize, width)


def _itemsize(step: Step, ops: tuple[int, ...], x: int, of_weights: set[int]) -> int:
    """Bytes per number of `x`: two where it is cast to twice its size, the weights' where nothing is cast."""
    for op in ops:
        if step.names[step.op_name[op]] == _CAST and x in step.use_storage[uses_of(step, op, op)]:
            if int(step.bytes[step.producer == op].sum()) != 2 * int(step.bytes[x]):
                raise NotAlike
            return 2
    if len(of_weights) != 1:
        raise NotAlike
    return of_weights.pop()


def _rows(step: Step, ops: tuple[int, ...], x: int, itemsize: int, width: int) -> int:
    """Rows of `x`; its mean, one number per row, must agree with the weights' length."""
    for op in ops:
        if step.names[step.op_name[op]] == _MEAN:
            of = max(int(step.bytes[s]) for s in step.use_storage[uses_of(step, op, op)].tolist())
            ratio = of // max(int(step.bytes[step.producer == op].sum()), 1)
            if width not in (0, ratio):
                raise NotAlike
            width = ratio
        elif step.names[step.op_name[op]] in _FUSED and not width:
            raise NotAlike
    if width < 2 or int(step.bytes[x]) % (width * itemsize):
        raise NotAlike
    return int(step.bytes[x]) // (width * itemsize)


def uses_of(step: Step, first: int, last: int) -> slice:
    """Rows of the uses of ops `first` to `last`."""
    start, stop = np.searchsorted(step.use_op, (first, last + 1)).tolist()
    return slice(start, stop)
