"""Pattern that `tiled_loss` tiles: a linear head, elementwise ops and one cross-entropy in a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from memtune.program import Kind, Phase, Step

_PRODUCTS = ("aten.mm.default", "aten.addmm.default")
CAST = "aten._to_copy.default"
_STEPS = (
    CAST,
    "aten.tanh.default",
    "aten.mul.Tensor",
    "aten.div.Tensor",
    "aten.add.Tensor",
    "aten.sub.Tensor",
    "aten.neg.default",
    "aten.sigmoid.default",
    "aten.tanh_backward.default",
    "aten.sigmoid_backward.default",
)
"""Elementwise ops that may run between head and loss."""


@dataclass(frozen=True)
class Operand:
    """Operand of the head's product."""

    plain: int
    """Storage as the model holds it …"""
    used: int
    """… and as the product reads it: the same, or the result of autocast's cast."""
    cast: int
    """The cast op, -1 for none."""


@dataclass(frozen=True)
class OperandGradient:
    """Gradient of an operand."""

    op: int
    """Op that computes it from the gradient of the logits."""
    cast: int
    """Op that casts it to the operand's own dtype, -1 for none."""
    storage: int
    """Storage of the final gradient."""


@dataclass(frozen=True, eq=False)
class LossPattern:
    """A linear head, elementwise ops and one cross-entropy; no other op reads the logits."""

    head: str
    """Module of the head."""
    module: int
    x: Operand
    weight: Operand
    bias: Operand | None
    rows: int
    """Number of tokens, N."""
    forward: tuple[int, ...]
    """Ops: the product, the elementwise ops, log-softmax, the loss."""
    made: tuple[int, ...]
    """Output storage of each of them: one row per token, except for the loss, which is last."""
    weight_sum: int
    """Storage of the sum of weights, the loss's second output."""
    target: int
    backward: tuple[int, ...]
    """Ops: gradient of the loss, of log-softmax, of the elementwise ops."""
    gradients: tuple[int, ...]
    """Output storage of each of them; the last is the gradient of the logits."""
    given: tuple[int, ...]
    """Storages that the first op of backward reads besides forward's outputs: the loss's gradient."""
    dx: OperandGradient | None
    dweight: OperandGradient | None
    dbias: OperandGradient | None
    half: bool
    """The loss is computed in half precision."""
    step: Step
    """The step; if the logits are sliced, with the slice moved in front of the head."""
    uncut: int
    """Storage of the hidden states before the slice, -1 without one."""

    @property
    def ops(self) -> list[int]:
        """All ops that the tiled loss replaces."""
        operands = [each.cast for each in (self.x, self.weight, self.bias) if each is not None]
        wanted = [
            op
            for each in (self.dx, self.dweight, self.dbias)
            if each is not None
            for op in (each.op, each.cast)
        ]
        return [op for op in (*self.forward, *self.backward, *operands, *wanted) if op >= 0]


class _Graph:
    """Producers and readers of a Step's storages."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.reads: dict[int, list[int]] = {}
        self.readers: dict[int, list[int]] = {}
        for op, storage in zip(step.uses.op.tolist(), step.uses.storage.tolist(), strict=True):
            self.reads.setdefault(op, []).append(storage)
            self.readers.setdefault(storage, []).append(op)

    def name(self, op: int) -> str:
        return str(self.step.names[self.step.ops.name[op]])

    def outputs_of(self, op: int) -> list[int]:
        step = self.step
        return np.flatnonzero(
            (step.storages.producer == op) & (step.storages.kind != Kind.WORKSPACE)
        ).tolist()

    def is_parameter(self, storage: int) -> bool:
        return bool(self.step.parameter_of[storage] >= 0)

    def operand(self, storage: int) -> Operand:
        """Return `storage` as a product reads it, with its cast in the same module if there is one."""
        op = int(self.step.storages.producer[storage])
        # Autocast casts weight, bias and input just before the product.
        if op >= 0 and self.name(op) == CAST:
            return Operand(self.reads[op][0], storage, op)
        return Operand(storage, storage, -1)


class _NoPattern(Exception):
    """The step has no such pattern, with the reason."""


@lru_cache(maxsize=8)
def loss_pattern(step: Step) -> LossPattern | str:
    """Return the head and its cross-entropy, or why they cannot run over parts of the rows."""
    cut = cut_first(step)
    try:
        return _match(_Graph(step)) if cut is None else replace(_match(_Graph(cut.step)), uncut=cut.hidden)
    except _NoPattern as reason:
        return str(reason)


def _match(graph: _Graph) -> LossPattern:
    """Return the product, the loss and their backward; raise `_NoPattern` with the first difference."""
    step = graph.step
    losses = [
        op
        for op in np.flatnonzero(step.ops.phase == Phase.FORWARD).tolist()
        if graph.name(op) == "aten.nll_loss_forward.default"
    ]
    if not losses:
        raise _NoPattern("the step has no cross-entropy of rows of logits against class indices")
    if len(losses) > 1:
        raise _NoPattern(f"the step has {len(losses)} cross-entropies, not one")
    forward: list[int] = [losses[0]]
    made: list[int] = []
    loss, weight_sum = _exactly_two(graph.outputs_of(losses[0]))
    logits, target = _exactly_two(graph.reads[losses[0]], "the loss has weights for its classes")
    # From the loss backwards: each op between must read one tensor and be elementwise.
    while graph.name(forward[0]) not in _PRODUCTS:
        made.insert(0, logits)
        forward.insert(0, int(step.storages.producer[logits]))
        logits = _source(graph, forward[0], softmax=len(forward) == 2)
    made.append(loss)
    product = forward[0]
    operands = graph.reads[product]
    bias = graph.operand(operands[0]) if len(operands) == 3 else None
    # `addmm` reads the bias first.
    x, weight = (graph.operand(each) for each in operands[-2:])
    if not graph.is_parameter(weight.plain) or (bias is not None and not graph.is_parameter(bias.plain)):
        raise _NoPattern("the logits are no product with a weight")
    backward, gradients, given = _backward(graph, forward, made, weight_sum, target)
    mine = {*forward, *backward}
    dx, dweight, dbias = _wanted(graph, gradients[-1], x, weight, mine)
    _require_no_other_reader(
        graph,
        # The loss itself, last in `made`, is the result and may be read by anyone.
        {*made[:-1], weight_sum, *gradients},
        {*mine, *(each.op for each in (dx, dweight, dbias) if each)},
    )
    rows, itemsize = _rows(graph, forward, made, weight)
    module = int(step.ops.module[product])
    return LossPattern(
        head=step.modules[module],
        module=module,
        x=x,
        weight=weight,
        bias=bias,
        rows=rows,
        forward=tuple(forward),
        made=tuple(made),
        weight_sum=weight_sum,
        target=target,
        backward=tuple(backward),
        gradients=tuple(gradients),
        given=given,
        dx=dx,
        dweight=dweight,
        dbias=dbias,
        half=itemsize == 2,
        step=step,
        uncut=-1,
    )


def _exactly_two(storages: list[int], otherwise: str = "the loss has an unknown form") -> tuple[int, int]:
    if len(storages) != 2:
        raise _NoPattern(otherwise)
    return storages[0], storages[1]


def _source(graph: _Graph, op: int, *, softmax: bool) -> int:
    """Return the storage that `op`, between head and loss, reads."""
    if op < 0 or graph.step.ops.block[op] >= 0:
        raise _NoPattern(
            "the logits are computed inside a block" if op >= 0 else "the logits are no product with a weight"
        )
    name = graph.name(op)
    if name in _PRODUCTS:
        return -1
    known = name == "aten._log_softmax.default" if softmax else name in _STEPS
    if not known or len(graph.reads[op]) != 1:
        raise _NoPattern(f"{name.split('.')[1]} runs between the head and the loss")
    return graph.reads[op][0]


def _backward(
    graph: _Graph, forward: list[int], made: list[int], weight_sum: int, target: int
) -> tuple[list[int], list[int], tuple[int, ...]]:
    """Return the ops from the loss's gradient to the logits', their outputs, the first one's inputs."""
    # Users never see the sum of weights, so that its reader is the loss's own backward.
    first = [
        op for op in graph.readers.get(weight_sum, ()) if graph.name(op) == "aten.nll_loss_backward.default"
    ]
    if len(first) != 1:
        raise _NoPattern("backward of the loss has an unknown form")
    given = tuple(each for each in graph.reads[first[0]] if each not in (made[-2], weight_sum, target))
    backward, gradients = [first[0]], graph.outputs_of(first[0])
    # Backward mirrors forward op by op, except for the product, whose gradients are looked up below.
    for _ in range(len(forward) - 2):
        readers = sorted(set(graph.readers.get(gradients[-1], ())))
        if len(readers) != 1 or (len(backward) > 1 and graph.name(readers[0]) not in _STEPS):
            raise _NoPattern("another op reads the gradient of the logits")
        backward.append(readers[0])
        gradients += graph.outputs_of(readers[0])
    if len(gradients) != len(backward):
        raise _NoPattern("backward of the loss has an unknown form")
    return backward, gradients, given


def _wanted(
    graph: _Graph, gradient: int, x: Operand, weight: Operand, mine: set[int]
) -> tuple[OperandGradient | None, OperandGradient | None, OperandGradient | None]:
    """Return the gradients of hidden states, weight and bias; `gradient` is that of the logits."""
    dx = dweight = dbias = None
    for op in sorted(set(graph.readers.get(gradient, ())) - mine):
        name, reads = graph.name(op), graph.reads[op]
        if name == "aten.mm.default" and weight.used in reads and dx is None:
            dx = _ending(graph, op, x)
        elif name == "aten.mm.default" and x.used in reads and dweight is None:
            dweight = _ending(graph, op, weight)
        elif name == "aten.sum.dim_IntList" and dbias is None:
            # Autocast casts the bias exactly if it casts the weight.
            dbias = _ending(graph, op, weight)
        else:
            raise _NoPattern("another op reads the gradient of the logits")
    return dx, dweight, dbias


def _ending(graph: _Graph, op: int, operand: Operand) -> OperandGradient:
    (made,) = graph.outputs_of(op)
    readers = sorted(set(graph.readers.get(made, ())))
    if operand.cast >= 0 and len(readers) == 1 and graph.name(readers[0]) == CAST:
        return OperandGradient(op, readers[0], graph.outputs_of(readers[0])[0])
    return OperandGradient(op, -1, made)


def _require_no_other_reader(graph: _Graph, storages: set[int], mine: set[int]) -> None:
    for storage in storages:
        for op in graph.readers.get(storage, ()):
            if op not in mine:
                raise _NoPattern(f"{graph.name(op).split('.')[1]} reads the logits in addition to the loss")


def _rows(graph: _Graph, forward: list[int], made: list[int], weight: Operand) -> tuple[int, int]:
    """Return the number of tokens, and bytes of one element of the log-probabilities."""
    step = graph.step
    classes, *_ = step.parameters[step.parameter_of[weight.plain]].shape
    elements = int(np.prod(step.parameters[step.parameter_of[weight.plain]].shape))
    itemsize = int(step.storages.bytes[weight.used]) // elements
    # Storages have bytes and no shape: the weight, whose shape is known, tells the bytes of an element.
    rows = int(step.storages.bytes[made[0]]) // (classes * itemsize)
    for op, before, after in zip(forward[1:-1], made[:-2], made[1:-1], strict=True):
        scale = step.storages.bytes[after] / max(step.storages.bytes[before], 1)
        # Only a change of dtype may change the size.
        if scale != 1 and graph.name(op) not in (CAST, "aten._log_softmax.default"):
            raise _NoPattern("the loss reads only a part of the logits")
        itemsize = int(itemsize * scale)
    if rows < 2 or rows * classes * itemsize != step.storages.bytes[made[-2]]:
        raise _NoPattern("the logits are no product with a weight")
    return rows, itemsize


# -- the pass ------------------------------------------------------------------------------------------------


# Logits that are sliced before the loss (`logits[..., :-1, :].contiguous()`) are treated as a head over
# sliced hidden states.
_CLONE, _CAST, _SLICE = "aten.clone.default", "aten._to_copy.default", "aten.slice_backward.default"


@dataclass(frozen=True, eq=False)
class Cut:
    """Step whose slice comes before the head."""

    step: Step
    hidden: int
    """Storage of the hidden states before the slice."""


def cut_first(step: Step) -> Cut | None:
    """Return `step` with the slice of its logits in front of their head; None without a known slice."""
    clones = [
        op
        for op in np.flatnonzero((step.ops.phase == Phase.FORWARD) & (step.ops.block < 0)).tolist()
        if _name(step, op) == _CLONE and len(_reads(step, op)) == 1
    ]
    for clone in clones:
        chain = _up_to_product(step, _reads(step, clone)[0])
        after = _outputs_of(step, clone)
        if (
            chain is None
            or len(after) != 1
            # `contiguous()` of a slice copies less than its source holds; other clones copy all.
            or not step.storages.bytes[after[0]] < step.storages.bytes[_reads(step, clone)[0]]
        ):
            continue
        slices = [op for op in range(step.ops.n) if _name(step, op) == _SLICE and step.ops.block[op] < 0]
        return _moved(step, clone, chain, slices[0]) if len(slices) == 1 else None
    return None


def _up_to_product(step: Step, storage: int) -> list[int] | None:
    """Return the ops from a weight's product to the producer of `storage`, if others are casts."""
    chain: list[int] = []
    while True:
        op = int(step.storages.producer[storage])
        if op < 0 or _name(step, op) not in (*_PRODUCTS, _CAST):
            return None
        chain.insert(0, op)
        if _name(step, op) in _PRODUCTS:
            return chain
        (storage,) = _reads(step, op)


def _moved(step: Step, clone: int, chain: list[int], cut_back: int) -> Cut | None:
    """Return `step` with rows dropped before the product instead of after it, None if its backward is
    another.
    """
    product = chain[0]
    before, (after,) = _reads(step, clone)[0], _outputs_of(step, clone)
    x, weight = _reads(step, product)[-2:]
    # The slice drops whole rows, so that the hidden states shrink by the same share as the logits.
    share = step.storages.bytes[after] / step.storages.bytes[before]
    incoming, (whole,) = _reads(step, cut_back)[0], _outputs_of(step, cut_back)
    cast = (
        int(step.storages.producer[x])
        if step.storages.producer[x] >= 0 and _name(step, int(step.storages.producer[x])) == _CAST
        else -1
    )
    hidden = _reads(step, cast)[0] if cast >= 0 else x
    back = _to_hidden(step, whole, weight)
    if back is None:
        return None
    gradients, last, final = back
    n_bytes = step.storages.bytes.copy()
    producer = step.storages.producer.copy()
    use_storage = step.uses.storage.copy()
    shrunk = [
        made
        for op in (*chain, *gradients)
        # The weight's gradient keeps its size, whatever the number of rows.
        if op in chain or _name(step, op) == _CAST
        for made in _outputs_of(step, op)
    ]
    shrunk += [made for op in gradients if weight in _reads(step, op) for made in _outputs_of(step, op)] + (
        [x] if cast >= 0 else []
    )
    for storage in set(shrunk) - {final}:
        n_bytes[storage] = round(int(step.storages.bytes[storage]) * share)
    # Moved in front of the head, the slice makes and reads hidden states instead of logits.
    n_bytes[after] = n_bytes[whole] = round(int(step.storages.bytes[hidden]) * share)

    def read(ops: list[int], old: int, new: int) -> None:
        use_storage[np.isin(step.uses.op, ops) & (step.uses.storage == old)] = new

    read([op for op in step.uses.op[step.uses.storage == after].tolist() if op != clone], after, before)
    read([clone], before, hidden)
    read([cast if cast >= 0 else product], hidden, after)
    read(step.uses.op[step.uses.storage == whole].tolist(), whole, incoming)
    read([cut_back], incoming, whole)
    producer[whole], producer[final] = last, cut_back
    saves = step.saves.storage.copy()
    # Without a cast the product saved its whole input; now it saves the slice.
    if cast < 0:
        saves[(saves == x) & np.isin(step.saves.used_until, gradients)] = after
        read(gradients, x, after)
    moved = (
        step.with_storages(bytes=n_bytes, producer=producer)
        .with_uses(storage=use_storage)
        .with_saves(storage=saves)
    )
    return Cut(moved, hidden)


def _to_hidden(step: Step, gradient: int, weight: int) -> tuple[list[int], int, int] | None:
    """Return the ops from the logits' gradient to the hidden states' gradient, the last, and its output."""
    ops: list[int] = []
    while True:
        readers = sorted(set(step.uses.op[step.uses.storage == gradient].tolist()))
        if len(readers) == 1 and _name(step, readers[0]) == _CAST:
            ops.append(readers[0])
            (gradient,) = _outputs_of(step, readers[0])
            continue
        products = [
            op for op in readers if _name(step, op) == "aten.mm.default" and weight in _reads(step, op)
        ]
        if len(products) != 1:
            return None
        ops += readers
        (final,) = _outputs_of(step, products[0])
        casts = sorted(set(step.uses.op[step.uses.storage == final].tolist()))
        if (
            len(casts) == 1
            and _name(step, casts[0]) == _CAST
            and step.ops.module[casts[0]] == step.ops.module[products[0]]
        ):
            return ops, casts[0], _outputs_of(step, casts[0])[0]
        return ops, products[0], final


def _name(step: Step, op: int) -> str:
    return str(step.names[step.ops.name[op]])


def _reads(step: Step, op: int) -> list[int]:
    return list(dict.fromkeys(step.uses.storage[step.uses.op == op].tolist()))


def _outputs_of(step: Step, op: int) -> list[int]:
    return np.flatnonzero((step.storages.producer == op) & (step.storages.kind != Kind.WORKSPACE)).tolist()
