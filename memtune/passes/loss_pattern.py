"""Where a recorded step has a linear head, element-wise ops and one cross-entropy: what `tiled_loss` can take apart."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from memtune.passes.cut_first import cut_first
from memtune.program import Kind, Phase, Step

_PRODUCTS = ("aten.mm.default", "aten.addmm.default")
CAST = "aten._to_copy.default"
_STEPS = (
    CAST, "aten.tanh.default", "aten.mul.Tensor", "aten.div.Tensor", "aten.add.Tensor", "aten.sub.Tensor", "aten.neg.default",
    "aten.sigmoid.default", "aten.tanh_backward.default", "aten.sigmoid_backward.default",
)  # fmt: skip
"""Element-wise ops that may stand between head and loss."""


@dataclass(frozen=True)
class Operand:
    """What goes into the head's product."""

    plain: int
    """Storage as the model holds it …"""
    used: int
    """… and as the product reads it: the same, or what autocast cast it to."""
    cast: int
    """Op that cast it, -1 for none."""


@dataclass(frozen=True)
class Wanted:
    """The gradient of an operand."""

    op: int
    """Makes it from the gradient of the logits."""
    cast: int
    """Casts it to the operand's own dtype, -1 for none."""
    storage: int
    """Where it ends up."""


@dataclass(frozen=True, eq=False)
class LossPattern:
    """Where a Step has a linear head, element-wise ops and one cross-entropy, with nobody else who reads the logits."""

    head: str
    """Module of the head."""
    module: int
    x: Operand
    weight: Operand
    bias: Operand | None
    rows: int
    """Tokens, N."""
    forward: tuple[int, ...]
    """Ops: the product, the steps, log-softmax, the loss."""
    made: tuple[int, ...]
    """Storage that each of them makes: as many rows as there are tokens, but for the last, the loss."""
    weight_sum: int
    """Storage of the sum of weights that the loss makes beside it."""
    target: int
    backward: tuple[int, ...]
    """Ops: gradient of the loss, of log-softmax, of the steps."""
    gradients: tuple[int, ...]
    """Storage that each of them makes; the last is the gradient of the logits."""
    given: tuple[int, ...]
    """Storages that the first op of backward is given beside what forward made: the gradient of the loss."""
    dx: Wanted | None
    dweight: Wanted | None
    dbias: Wanted | None
    half: bool
    """The loss is computed in half precision."""
    step: Step
    """The step, with the logits' cut in front of the head if they are cut."""
    uncut: int
    """Storage of the hidden states before the cut, -1 where there is none."""

    @property
    def ops(self) -> list[int]:
        """All ops that run no longer as they did."""
        operands = [each.cast for each in (self.x, self.weight, self.bias) if each is not None]
        wanted = [op for each in (self.dx, self.dweight, self.dbias) if each is not None for op in (each.op, each.cast)]
        return [op for op in (*self.forward, *self.backward, *operands, *wanted) if op >= 0]


class _Graph:
    """Who makes and reads what in a Step, by name."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.reads: dict[int, list[int]] = {}
        self.readers: dict[int, list[int]] = {}
        for op, storage in zip(step.use_op.tolist(), step.use_storage.tolist(), strict=True):
            self.reads.setdefault(op, []).append(storage)
            self.readers.setdefault(storage, []).append(op)

    def name(self, op: int) -> str:
        return str(self.step.names[self.step.op_name[op]])

    def made(self, op: int) -> list[int]:
        step = self.step
        return np.flatnonzero((step.producer == op) & (step.kind != Kind.WORKSPACE)).tolist()

    def is_parameter(self, storage: int) -> bool:
        return bool(self.step.parameter_of[storage] >= 0)

    def operand(self, storage: int) -> Operand:
        """`storage` as a product reads it, with the cast before it in the same module if there is one."""
        op = int(self.step.producer[storage])
        if op >= 0 and self.name(op) == CAST:
            return Operand(self.reads[op][0], storage, op)
        return Operand(storage, storage, -1)


class _NoPattern(Exception):
    """Why there is none."""


@lru_cache(maxsize=8)
def loss_pattern(step: Step) -> LossPattern | str:
    """The head and its cross-entropy, or why they cannot be computed over parts of the rows."""
    cut = cut_first(step)
    try:
        return _found(_Graph(step)) if cut is None else replace(_found(_Graph(cut.step)), uncut=cut.hidden)
    except _NoPattern as reason:
        return str(reason)


def _found(graph: _Graph) -> LossPattern:
    step = graph.step
    losses = [
        op for op in np.flatnonzero(step.op_phase == Phase.FORWARD).tolist() if graph.name(op) == "aten.nll_loss_forward.default"
    ]
    if not losses:
        raise _NoPattern("the step has no cross-entropy of rows of logits against class indices")
    if len(losses) > 1:
        raise _NoPattern(f"the step has {len(losses)} cross-entropies, not one")
    forward: list[int] = [losses[0]]
    made: list[int] = []
    loss, weight_sum = _two(graph.made(losses[0]))
    logits, target = _two(graph.reads[losses[0]], "the loss has weights for its classes")
    while graph.name(forward[0]) not in _PRODUCTS:
        made.insert(0, logits)
        forward.insert(0, int(step.producer[logits]))
        logits = _source(graph, forward[0], softmax=len(forward) == 2)
    made.append(loss)
    product = forward[0]
    operands = graph.reads[product]
    bias = graph.operand(operands[0]) if len(operands) == 3 else None
    x, weight = (graph.operand(each) for each in operands[-2:])
    if not graph.is_parameter(weight.plain) or (bias is not None and not graph.is_parameter(bias.plain)):
        raise _NoPattern("the logits are no product with a weight")
    backward, gradients, given = _backward(graph, forward, made, weight_sum, target)
    mine = {*forward, *backward}
    dx, dweight, dbias = _wanted(graph, gradients[-1], x, weight, mine)
    _nobody_else_reads(graph, {*made[:-1], weight_sum, *gradients}, {*mine, *(each.op for each in (dx, dweight, dbias) if each)})
    rows, itemsize = _rows(graph, forward, made, weight)
    module = int(step.op_module[product])
    return LossPattern(
        step.modules[module], module, x, weight, bias, rows, tuple(forward), tuple(made), weight_sum, target, tuple(backward),
        tuple(gradients), given, dx, dweight, dbias, half=itemsize == 2, step=step, uncut=-1,
    )  # fmt: skip


def _two(storages: list[int], otherwise: str = "the loss is none that is known") -> tuple[int, int]:
    if len(storages) != 2:
        raise _NoPattern(otherwise)
    return storages[0], storages[1]


def _source(graph: _Graph, op: int, *, softmax: bool) -> int:
    """What `op`, on the way from the head to the loss, reads."""
    if op < 0 or graph.step.op_block[op] >= 0:
        raise _NoPattern("the logits are made inside a block" if op >= 0 else "the logits are no product with a weight")
    name = graph.name(op)
    if name in _PRODUCTS:
        return -1
    known = name == "aten._log_softmax.default" if softmax else name in _STEPS
    if not known or len(graph.reads[op]) != 1:
        raise _NoPattern(f"{name.split('.')[1]} comes between the head and the loss")
    return graph.reads[op][0]


def _backward(
    graph: _Graph, forward: list[int], made: list[int], weight_sum: int, target: int
) -> tuple[list[int], list[int], tuple[int, ...]]:
    """Ops from the gradient of the loss to that of the logits, what each makes, and what the first is given."""
    first = [op for op in graph.readers.get(weight_sum, ()) if graph.name(op) == "aten.nll_loss_backward.default"]
    if len(first) != 1:
        raise _NoPattern("backward of the loss is none that is known")
    given = tuple(each for each in graph.reads[first[0]] if each not in (made[-2], weight_sum, target))
    backward, gradients = [first[0]], graph.made(first[0])
    for _ in range(len(forward) - 2):
        readers = sorted(set(graph.readers.get(gradients[-1], ())))
        if len(readers) != 1 or (len(backward) > 1 and graph.name(readers[0]) not in _STEPS):
            raise _NoPattern("something else uses the gradient of the logits")
        backward.append(readers[0])
        gradients += graph.made(readers[0])
    if len(gradients) != len(backward):
        raise _NoPattern("backward of the loss is none that is known")
    return backward, gradients, given


def _wanted(
    graph: _Graph, gradient: int, x: Operand, weight: Operand, mine: set[int]
) -> tuple[Wanted | None, Wanted | None, Wanted | None]:
    """Gradients of hidden states, weight and bias; `gradient` is that of the logits."""
    dx = dweight = dbias = None
    for op in sorted(set(graph.readers.get(gradient, ())) - mine):
        name, reads = graph.name(op), graph.reads[op]
        if name == "aten.mm.default" and weight.used in reads and dx is None:
            dx = _ending(graph, op, x)
        elif name == "aten.mm.default" and x.used in reads and dweight is None:
            dweight = _ending(graph, op, weight)
        elif name == "aten.sum.dim_IntList" and dbias is None:
            dbias = _ending(graph, op, weight)
        else:
            raise _NoPattern("something else uses the gradient of the logits")
    return dx, dweight, dbias


def _ending(graph: _Graph, op: int, operand: Operand) -> Wanted:
    (made,) = graph.made(op)
    readers = sorted(set(graph.readers.get(made, ())))
    if operand.cast >= 0 and len(readers) == 1 and graph.name(readers[0]) == CAST:
        return Wanted(op, readers[0], graph.made(readers[0])[0])
    return Wanted(op, -1, made)


def _nobody_else_reads(graph: _Graph, storages: set[int], mine: set[int]) -> None:
    for storage in storages:
        for op in graph.readers.get(storage, ()):
            if op not in mine:
                raise _NoPattern(f"{graph.name(op).split('.')[1]} reads the logits beside the loss")


def _rows(graph: _Graph, forward: list[int], made: list[int], weight: Operand) -> tuple[int, int]:
    """Tokens, and bytes of one number of the log-probabilities."""
    step = graph.step
    classes, *_ = step.parameters[step.parameter_of[weight.plain]].shape
    elements = int(np.prod(step.parameters[step.parameter_of[weight.plain]].shape))
    itemsize = int(step.bytes[weight.used]) // elements
    rows = int(step.bytes[made[0]]) // (classes * itemsize)
    for op, before, after in zip(forward[1:-1], made[:-2], made[1:-1], strict=True):
        scale = step.bytes[after] / max(step.bytes[before], 1)
        if scale != 1 and graph.name(op) not in (CAST, "aten._log_softmax.default"):
            raise _NoPattern("part of the logits is left out of the loss")
        itemsize = int(itemsize * scale)
    if rows < 2 or rows * classes * itemsize != step.bytes[made[-2]]:
        raise _NoPattern("the logits are no product with a weight")
    return rows, itemsize


# -- the pass ---------------------------------------------------------------------------------------------------------------
