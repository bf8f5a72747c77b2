"""The pass of `runtime.tiled_loss`: head and cross-entropy over parts of the rows, with their gradients made in forward."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from memtune.edit import Edit
from memtune.passes.cut_first import cut_first
from memtune.program import Kind, Phase, Step

_PRODUCTS = ("aten.mm.default", "aten.addmm.default")
_CAST = "aten._to_copy.default"
_STEPS = (
    _CAST, "aten.tanh.default", "aten.mul.Tensor", "aten.div.Tensor", "aten.add.Tensor", "aten.sub.Tensor", "aten.neg.default",
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
        if op >= 0 and self.name(op) == _CAST:
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
    if len(losses) != 1:
        raise _NoPattern(f"the step has {len(losses) or 'no'} cross-entropies over class indices, not one")
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
    if operand.cast >= 0 and len(readers) == 1 and graph.name(readers[0]) == _CAST:
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
        if scale != 1 and graph.name(op) not in (_CAST, "aten._log_softmax.default"):
            raise _NoPattern("part of the logits is left out of the loss")
        itemsize = int(itemsize * scale)
    if rows < 2 or rows * classes * itemsize != step.bytes[made[-2]]:
        raise _NoPattern("the logits are no product with a weight")
    return rows, itemsize


# -- the pass ---------------------------------------------------------------------------------------------------------------


@dataclass
class _Ops:
    """New ops in their order, with what they read and make."""

    edit: Edit
    first: int
    names: list[int] = field(default_factory=list)
    flops: list[float] = field(default_factory=list)
    traffic: list[int] = field(default_factory=list)
    uses: list[tuple[int, int, bool]] = field(default_factory=list)
    made: list[tuple[int, int]] = field(default_factory=list)  # bytes, producer
    held: list[tuple[int, int]] = field(default_factory=list)
    _first_storage: int = 0

    def __post_init__(self) -> None:
        self._first_storage = self.edit.n_storages

    @property
    def last(self) -> int:
        return self.first + len(self.names) - 1

    def run(self, name: str, *reads: int, writes: int = -1, like: int = -1, share: float = 1.0) -> int:
        """Append an op; `like` an op of the step whose cost it shares. Returns its row."""
        step = self.edit._step
        self.names.append(self.edit.name_id(name))
        self.flops.append(float(step.op_flops[like]) * share if like >= 0 else 0.0)
        self.traffic.append(int(step.op_traffic_bytes[like] * share) if like >= 0 else 0)
        self.uses += [(self.last, each, False) for each in dict.fromkeys(reads)]
        if writes >= 0:
            self.uses += [(self.last, writes, True)]
        return self.last

    def makes(self, n_bytes: int) -> int:
        """The last op makes a storage; returns its row."""
        self.made.append((n_bytes, self.last))
        return self._first_storage + len(self.made) - 1

    def hold(self, storage: int, op: int) -> None:
        self.held.append((storage, op))

    def insert(self, *, after: int | None = None, before: int | None = None, phase: Phase, module: int) -> None:
        """Put all of it into the edit."""
        anchor = np.full(len(self.names), before if after is None else after, np.int32)
        self.edit.add_ops(
            np.asarray(self.names, np.int32),
            after=None if after is None else anchor,
            before=anchor if after is None else None,
            phase=phase,
            flops=np.asarray(self.flops),
            traffic_bytes=np.asarray(self.traffic, np.int64),
            module=module,
        )
        if self.made:
            n_bytes, producer = (np.asarray(column) for column in zip(*self.made, strict=True))
            self.edit.add_storages(n_bytes.astype(np.int64), producer=producer.astype(np.int32))
        for mutates in (False, True):
            pairs = [(op, storage) for op, storage, writes in self.uses if writes == mutates]
            if pairs:
                ops, storages = (np.asarray(column, np.int32) for column in zip(*pairs, strict=True))
                self.edit.add_uses(ops, storages, mutates=mutates)
        if self.held:
            storages, ops = (np.asarray(column, np.int32) for column in zip(*self.held, strict=True))
            self.edit.hold_through(storages, ops)


def tile_loss(pattern: LossPattern, chunks: int) -> Step:
    """The step of `pattern` with its loss computed over `chunks` parts of the rows."""
    step = pattern.step
    edit = Edit(step)
    gone = np.zeros(step.n_ops, bool)
    gone[pattern.ops] = True
    edit.drop_ops(gone)
    edit.drop_saves(gone[step.save_used_until] & np.isin(step.save_storage, _saved_by(pattern)))
    chunked = _Chunks(step, pattern, _Ops(edit, edit.n_ops))
    total, sums = chunked.run(chunks)
    end = chunked.ops.last
    # What the user's code holds of the logits holds the hidden states now.
    held = [int(step.held_until[each]) for each in pattern.made[:-1]]
    for storage in {
        pattern.x.plain,
        pattern.target,
        *(s for s in _saved_by(pattern) if step.held_until[s] >= pattern.forward[-1]),
    }:
        if step.producer[storage] >= 0 and storage not in _dropped(pattern):
            chunked.ops.hold(storage, end)
    if pattern.uncut >= 0:
        chunked.ops.hold(pattern.uncut, end)
    chunked.ops.insert(after=pattern.forward[-1], phase=Phase.FORWARD, module=0)
    if max(held) > pattern.forward[-1]:
        edit.hold_through(np.asarray([pattern.x.plain], np.int32), np.asarray([max(held)], np.int32))
    edit.producer[pattern.made[-1]] = total
    _backward_ops(edit, pattern, chunked, sums)
    return edit.done()


def _saved_by(pattern: LossPattern) -> list[int]:
    """What the ops that are gone saved for backward."""
    return [pattern.x.used, pattern.weight.used, *pattern.made, pattern.weight_sum, pattern.target]


def _dropped(pattern: LossPattern) -> set[int]:
    casts = [each.used for each in (pattern.x, pattern.weight, pattern.bias) if each is not None and each.cast >= 0]
    return {*casts, *pattern.made, pattern.weight_sum}


class _Chunks:
    """The ops of `runtime.tiled_loss._Loss.forward`, in its order."""

    def __init__(self, step: Step, pattern: LossPattern, ops: _Ops) -> None:
        self.step, self.pattern, self.ops = step, pattern, ops
        self.dx = -1
        """The gradient of the hidden states, as the step knows it; -1 where it is not wanted. `dweight`, `dbias` likewise."""
        self.dweight = self.dbias = -1

    def run(self, chunks: int) -> tuple[int, int]:
        """All of it; returns the op that makes the loss, and the storage of the denominator."""
        pattern, ops, edit = self.pattern, self.ops, self.ops.edit
        if pattern.dx is not None:
            self.dx = pattern.dx.storage
            edit.producer[self.dx] = ops.run("aten.empty_like.default", pattern.x.plain)
        used = [self._cast(each) for each in (pattern.x, pattern.weight, pattern.bias) if each is not None]
        size = -(-pattern.rows // chunks)
        total = -1
        for start in range(0, pattern.rows, size):
            total = self._chunk(used, min(size, pattern.rows - start), total)
        ops.run("aten.ne.Scalar", pattern.target)
        valid = ops.makes(pattern.rows)
        ops.run("aten.sum.default", valid)
        sums = ops.makes(8)
        loss = ops.run("aten.div.Tensor", total, sums)
        if pattern.half:
            mean = ops.makes(4)
            loss = ops.run(_CAST, mean)
        for storage, operand in zip(used, (pattern.x, pattern.weight, pattern.bias), strict=False):
            if operand is not None and operand.cast >= 0:
                ops.hold(storage, ops.last)
        return loss, sums

    def _cast(self, operand: Operand) -> int:
        if operand.cast < 0:
            return operand.used
        self.ops.run(_CAST, operand.plain, like=operand.cast)
        return self.ops.makes(int(self.step.bytes[operand.used]))

    def _chunk(self, used: list[int], rows: int, total: int) -> int:
        step, pattern, ops = self.step, self.pattern, self.ops
        share = rows / pattern.rows

        def part(storage: int) -> int:
            return ops.makes(int(step.bytes[storage]) * rows // pattern.rows)

        inputs = tuple(used[2:] + used[:2])
        chain: list[int] = []
        for op, storage in zip(pattern.forward[:-1], pattern.made[:-1], strict=True):
            ops.run(step.names[step.op_name[op]], *(inputs if not chain else (chain[-1],)), like=op, share=share)
            chain.append(part(storage))
        ops.run(step.names[step.op_name[pattern.forward[-1]]], chain[-1], pattern.target, like=pattern.forward[-1], share=share)
        loss = ops.makes(int(step.bytes[pattern.made[-1]]))
        weight_sum = ops.makes(int(step.bytes[pattern.weight_sum]))
        ops.hold(chain[-2], ops.last)  # what the loss was called with
        addend = loss
        if pattern.half:
            ops.run(_CAST, loss)
            addend = ops.makes(4)
        if total >= 0:
            ops.run("aten.add_.Tensor", total, addend, writes=total)
        if pattern.half:
            ops.hold(addend, ops.last)
        ops.run("aten.ones_like.default", loss)
        gradient = ops.makes(int(step.bytes[loss]) if loss < step.n_storages else int(step.bytes[pattern.made[-1]]))
        one, probabilities = gradient, chain[-1]
        for i, (op, storage) in enumerate(zip(pattern.backward, pattern.gradients, strict=True)):
            reads = (one, probabilities, pattern.target, weight_sum) if i == 0 else (gradient, *self._reread(i, chain))
            ops.run(step.names[step.op_name[op]], *reads, like=op, share=share)
            gradient = part(storage)
        for storage in (chain[0], loss, one, addend):
            ops.hold(storage, ops.last)
        self._add(gradient, used, share)
        ops.hold(gradient, ops.last)
        return total if total >= 0 else addend

    def _reread(self, i: int, chain: list[int]) -> list[int]:
        """Of what forward made, the storages that the i-th op of backward reads."""
        reads = self.step.use_storage[self.step.use_op == self.pattern.backward[i]].tolist()
        return [made for made, plain in zip(chain, self.pattern.made, strict=False) if plain in reads]

    def _add(self, gradient: int, used: list[int], share: float) -> None:
        """`_Gradients.add`."""
        step, pattern, ops = self.step, self.pattern, self.ops
        x, weight = used[:2]
        if pattern.dx is not None:
            if pattern.dx.cast < 0:
                ops.run("aten.mm.out", gradient, weight, self.dx, writes=self.dx, like=pattern.dx.op, share=share)
            else:
                ops.run("aten.mm.default", gradient, weight, like=pattern.dx.op, share=share)
                made = ops.makes(round(int(step.bytes[pattern.x.used]) * share))
                ops.run("aten.copy_.default", self.dx, made, writes=self.dx, like=pattern.dx.cast, share=share)
        if pattern.dweight is not None:
            self.dweight = self._sum("aten.mm.default", (gradient, x), pattern.dweight, pattern.weight, self.dweight, share)
        if pattern.dbias is not None:
            assert pattern.bias is not None
            self.dbias = self._sum("aten.sum.dim_IntList", (gradient,), pattern.dbias, pattern.bias, self.dbias, share)

    def _sum(self, name: str, reads: tuple[int, ...], wanted: Wanted, operand: Operand, so_far: int, share: float) -> int:
        """Add one part to a gradient; the first makes it."""
        step, ops = self.step, self.ops
        if so_far >= 0 and wanted.cast < 0 and name == "aten.mm.default":
            ops.run("aten.addmm_.default", so_far, *reads, writes=so_far, like=wanted.op, share=share)
            return so_far
        made_by = ops.run(name, *reads, like=wanted.op, share=share)
        if wanted.cast < 0 and so_far < 0:
            ops.edit.producer[wanted.storage] = made_by
            return wanted.storage
        part = ops.makes(int(step.bytes[operand.used]))
        if so_far < 0:
            ops.edit.producer[wanted.storage] = ops.run(_CAST, part, like=wanted.cast)
            so_far = wanted.storage
        else:
            ops.run("aten.add_.Tensor", so_far, part, writes=so_far, like=wanted.cast)
        if name != "aten.mm.default":
            ops.hold(part, ops.last)
        return so_far


def _backward_ops(edit: Edit, pattern: LossPattern, chunked: _Chunks, sums: int) -> None:
    """The ops of `runtime.tiled_loss._Loss.backward`."""
    step = chunked.step
    ops = _Ops(edit, edit.n_ops)
    given = pattern.given
    if pattern.half:
        ops.run(_CAST, *given)
        given = (ops.makes(4),)
    ops.run("aten.div.Tensor", *given, sums)
    scale = ops.makes(4)
    wanted = [each for each in (pattern.dx, pattern.dweight, pattern.dbias) if each is not None]
    for each in wanted:
        ops.run("aten.mul_.Tensor", each.storage, scale, writes=each.storage)
        ops.traffic[-1] = 2 * int(step.bytes[each.storage])
    ops.insert(before=pattern.backward[0], phase=Phase.BACKWARD, module=pattern.module)
    for each in wanted:
        if step.ready_after[each.storage] >= 0:
            edit.ready_after[each.storage] = ops.last
        if step.held_until[each.storage] <= step.use_op[step.use_storage == each.storage].max(initial=-1):
            edit.held_until[each.storage] = -1  # its uses say so: what forward makes and Python holds is the loss, or alike
