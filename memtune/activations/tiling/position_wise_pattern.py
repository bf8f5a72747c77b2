"""Pattern of modules in blocks that `activations.tiling.tiled_region_pass` can run in parts of their tokens
(MLPs and norms) or samples.

Such a module reads one tensor, makes one, and is an MLP or a norm whose forward and backward are each
contiguous, apart from sums of gradients over micro-batches. An MLP consists of products with weights (at
least two), layer norms and elementwise ops; for norms see `norm_rows`. A module that draws random numbers or
mixes rows is not tiled, nor is an MLP with casts. Over samples any module is tiled whose ops compute each
sample alone, such as attention and convolutions (`by_sample`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from memtune.activations.tiling.step_rows import made_by, used_in, uses_of
from memtune.program import I32, READS, WRITES, Kind, Phase, Step

_PRODUCTS = ("aten.mm.default", "aten.addmm.default")
_NORMS = ("aten.native_layer_norm.default", "aten._fused_rms_norm.default")
_ALIKE = (
    *_PRODUCTS,
    *_NORMS,
    "aten.gelu.default",
    "aten.silu.default",
    "aten.relu.default",
    "aten.tanh.default",
    "aten.sigmoid.default",
    "aten.mul.Tensor",
    "aten.add.Tensor",
    "aten.square.default",
    "aten.pow.Tensor_Scalar",
)

_WITH_WEIGHT = (*_PRODUCTS, "aten.convolution.default")
_EACH_SAMPLE = frozenset(
    (
        *_ALIKE,
        *_WITH_WEIGHT,
        "aten._adaptive_avg_pool2d.default",
        "aten._log_softmax.default",
        "aten._softmax.default",
        "aten._to_copy.default",
        "aten.add.Scalar",
        "aten.add_.Tensor",
        "aten.avg_pool2d.default",
        "aten.baddbmm.default",
        "aten.bmm.default",
        "aten.cat.default",
        "aten.clone.default",
        "aten.constant_pad_nd.default",
        "aten.div.Tensor",
        "aten.elu.default",
        "aten.hardtanh.default",
        "aten.leaky_relu.default",
        "aten.max_pool2d_with_indices.default",
        "aten.mean.dim",
        "aten.mul_.Tensor",
        "aten.native_group_norm.default",
        "aten.neg.default",
        "aten.relu_.default",
        "aten.rsqrt.default",
        "aten.silu_.default",
        "aten.sub.Tensor",
        "aten.upsample_bilinear2d.vec",
        "aten.upsample_nearest2d.vec",
    )
)
"""Ops that compute each sample alone if samples are the first dim of what they read; `tiled_region` verifies
that on the first two samples, since a softmax or mean over the first dim has the same name.
"""
_ATTENTION = "aten._scaled_dot_product_"


@dataclass(frozen=True)
class PositionWise:
    """One module of one call of a block that computes each row alone: a token or a sample."""

    module: str
    module_id: int
    call: int
    forward: tuple[int, ...]
    """Ops, ascending and contiguous."""
    backward: tuple[int, ...]
    """Ops, ascending; between them are only sums with the gradients of earlier micro-batches."""
    x: int
    """Input storage; `y` is the output."""
    y: int
    rows: int
    """Number of tokens, or of samples."""
    dy: int
    """Gradient of `y`."""
    dx: int
    """Gradient of `x` through this module, -1 if none is needed; with `residual`, the sum."""
    gradients: tuple[int, ...]
    """Gradients of its parameters."""
    save: int
    """Save row of `x`; if the module does not save it, one of `saves` that can hold it."""
    saves: tuple[int, ...]
    """Save rows of all tensors that its ops save."""
    inner_bytes: int
    """Bytes of its saves except `x`; less `x` if only its parts save that."""
    part_samples: int = 0
    """Fewest rows of a part, if they are samples, the first dim of `x`; 0 for tokens."""
    residual: int = -1
    """Gradient of `x` from other paths (around a norm), added here; -1 if another op adds it."""
    join: int = -1
    """The op that adds `residual` to the module's gradient."""


_Rows = Callable[[Step, tuple[int, ...], set[int]], tuple[int, int]]
"""Function from a module's forward ops and outputs to the storage they read, and its rows."""


@lru_cache(maxsize=8)
def position_wise(step: Step) -> tuple[PositionWise, ...]:
    """Return the outermost MLPs inside the blocks of `step`, in the order of their forwards."""
    return _outermost(step, _mlp_rows)


@lru_cache(maxsize=8)
def norms(step: Step) -> tuple[PositionWise, ...]:
    """Return the norms inside blocks, also in MLPs, that make more tensors than backward needs."""
    if not has_norms(step):
        return ()
    return tuple(each for each in _outermost(step, norm_rows) if each.inner_bytes > 0)


@lru_cache(maxsize=8)
def by_sample(step: Step, samples: int) -> tuple[PositionWise, ...]:
    """Return the outermost modules inside blocks that compute each of `samples` samples alone and save more
    than their input, without those around or inside of an MLP.
    """
    if samples < 2:
        return ()
    mlps = {f"{each.module}." for each in position_wise(step)}

    def is_apart(name: str) -> bool:
        return not any(mlp.startswith(name) or name.startswith(mlp) for mlp in mlps)

    found = _outermost(step, partial(_samples, samples))
    return tuple(
        # A transposed tensor of one sample may be a view of another form, without the copy.
        replace(each, part_samples=1 + any("aten.clone" in name for name in _names(step, each.forward)))
        for each in found
        # A norm that saves its input and a few sums gains nothing.
        if is_apart(f"{each.module}.") and each.inner_bytes >= step.storages.bytes[each.x]
    )


def _names(step: Step, ops: tuple[int, ...]) -> list[str]:
    return [step.names[step.ops.name[op]] for op in ops]


def _outermost(step: Step, rows_of: _Rows) -> tuple[PositionWise, ...]:
    found: list[PositionWise] = []
    forward = np.flatnonzero((step.ops.phase == Phase.FORWARD) & (step.ops.block >= 0)).astype(np.int32)
    for call in np.unique(step.ops.call[forward]).tolist():
        ops = forward[step.ops.call[forward] == call]
        taken: list[str] = []
        block = step.blocks[step.calls.block[call]]
        # Backward runs outside of any call, so its ops are found by their module.
        around = [i for i, name in enumerate(step.modules) if name.startswith(f"{block}.")]
        # Outermost first: a larger module saves more inner tensors when it is tiled.
        for name in sorted(_modules_in(step, ops, block), key=lambda each: (each.count("."), each)):
            if any(f"{name}.".startswith(f"{other}.") for other in taken):
                continue
            try:
                found.append(_match(step, call, name, ops, around, rows_of))
                taken.append(name)
            except NotTokenWise:
                continue
    return tuple(sorted(found, key=lambda each: each.forward[0]))


def _modules_in(step: Step, ops: I32, block: str) -> set[str]:
    """Return the modules strictly inside `block` that run some of `ops`, and those around them."""
    names = set()
    for number in np.unique(step.ops.module[ops]).tolist():
        name = step.modules[number]
        while name.startswith(f"{block}."):
            names.add(name)
            name = name.rpartition(".")[0]
    return names


def _match(
    step: Step, call: int, name: str, block_ops: I32, around: list[int], rows_of: _Rows
) -> PositionWise:
    """Return the module `name` as a pattern; raise `NotTokenWise` if positions depend on one another."""
    inside = np.zeros(len(step.modules), bool)
    inside[[i for i in around if f"{step.modules[i]}.".startswith(f"{name}.")]] = True
    forward = _in_one_piece(block_ops[inside[step.ops.module[block_ops]]])
    backward = _in_one_piece(
        np.flatnonzero(inside[step.ops.module] & (step.ops.phase == Phase.BACKWARD)), but=sums_of(step)
    )
    if step.ops.rng[list(forward)].any():
        raise NotTokenWise
    made = set(made_by(step, forward))
    x, rows = rows_of(step, forward, made)
    # Uses between forward and backward, and after backward; those inside are the module's own.
    read_later = used_in(step, made, uses_of(step, forward[-1] + 1, backward[0] - 1))
    read_later |= used_in(step, made, uses_of(step, backward[-1] + 1, step.ops.n))
    # Python or autograd may hold an output that no later op reads.
    kept = {s for s in made if step.storages.held_until[s] > forward[-1]}
    # The one tensor that outlives the module; others would have to exist in full.
    y = _single(read_later or kept)
    if kept - {y}:
        raise NotTokenWise
    join, residual = _joined(step, backward, made | {x})
    dy, dx, gradients = _gradients(step, backward, made | {x}, residual)
    # An op packs its inputs before it runs and its output after: the window of outputs is one op later.
    window = (step.saves.packed_before > forward[0]) | (
        (step.saves.packed_before == forward[0]) & (step.saves.is_output == 0)
    )
    window &= (step.saves.packed_before <= forward[-1]) | (
        (step.saves.packed_before == forward[-1] + 1) & (step.saves.is_output == 1)
    )
    saves = np.flatnonzero(window & (step.saves.call == call))
    mine = saves[step.saves.storage[saves] == x]
    # Without a save nothing is gained; a joined gradient without one of the input has no place to go.
    if not len(saves) or (residual >= 0 and dx < 0):
        raise NotTokenWise
    held = np.unique(step.saves.storage[saves])
    inner = int(step.storages.bytes[held[(held != x) & np.isin(held, list(made))]].sum())
    if not (step.saves.storage == x).any():
        # The tiled module saves its input, which the plain one did not.
        inner -= int(step.storages.bytes[x])
    # The pass gives one row to the input; any of the rows that it frees will do.
    save = int(mine[0]) if len(mine) else int(saves[0])
    return PositionWise(
        module=name,
        module_id=int(step.ops.module[forward[-1]]),
        call=call,
        forward=forward,
        backward=backward,
        x=x,
        y=y,
        rows=rows,
        dy=dy,
        dx=dx,
        gradients=gradients,
        save=save,
        saves=tuple(saves.tolist()),
        inner_bytes=inner,
        residual=residual,
        join=join,
    )


@lru_cache(maxsize=8)
def sums_of(step: Step) -> frozenset[int]:
    """Return the ops that add a gradient to the sum of earlier micro-batches."""
    gradients = step.storages.kind[step.uses.storage] == Kind.GRADIENT
    mine = (step.uses.mode == WRITES) & gradients & (step.storages.producer[step.uses.storage] < 0)
    # `grad` of a parameter exists before the step, and backward adds to it.
    mine &= step.use_phase == Phase.BACKWARD
    return frozenset(step.uses.op[mine].tolist())


def _in_one_piece(ops: np.ndarray, but: frozenset[int] = frozenset()) -> tuple[int, ...]:
    """Return `ops`; between the first and the last there may be no others, except for those in `but`."""
    mine = tuple(ops.tolist())
    if not mine or set(range(mine[0], mine[-1] + 1)) - set(mine) - but:
        raise NotTokenWise
    return mine


def _single(storages: set[int]) -> int:
    if len(storages) != 1:
        raise NotTokenWise
    return next(iter(storages))


def _mlp_rows(step: Step, ops: tuple[int, ...], made: set[int]) -> tuple[int, int]:
    x = _single(_outside_inputs(step, ops, made))
    return x, _rows(step, ops, x)


def _outside_inputs(step: Step, ops: tuple[int, ...], made: set[int]) -> set[int]:
    """Return the outside storages that `ops` read, without parameters."""
    # All ops must be token-wise, and at least two must be products with weights.
    inputs: set[int] = set()
    products = 0
    for op in ops:
        name = step.names[step.ops.name[op]]
        used = uses_of(step, op, op)
        reads = set(step.uses.storage[used].tolist())
        if name not in _ALIKE or step.uses.mode[used].any():
            raise NotTokenWise
        ranks = sorted(
            len(step.parameters[step.parameter_of[s]].shape) for s in reads if step.parameter_of[s] >= 0
        )
        is_product = name in _PRODUCTS
        if (is_product and 2 not in ranks) or (not is_product and set(ranks) - {1}):
            raise NotTokenWise  # a product of two activations, or an added position embedding
        products += is_product
        inputs |= {s for s in reads - made if step.parameter_of[s] < 0}
    if products < 2:
        raise NotTokenWise
    return inputs


def _samples(samples: int, step: Step, ops: tuple[int, ...], made: set[int]) -> tuple[int, int]:
    """Return the tensor that `ops` read, and `samples`, if each op computes every sample alone."""
    inputs: set[int] = set()
    for op in ops:
        name, used = step.names[step.ops.name[op]], uses_of(step, op, op)
        storages = step.uses.storage[used]
        if name not in _EACH_SAMPLE and not name.startswith(_ATTENTION):
            raise NotTokenWise
        weights = step.parameter_of[storages] >= 0
        # A product of two activations sums over samples; of an op in place only what is made here is written.
        if (name in _WITH_WEIGHT and not weights.any()) or set(
            storages[step.uses.mode[used] != READS]
        ) - made:
            raise NotTokenWise
        inputs |= set(storages[~weights].tolist()) - made
    x = _single(inputs)
    if any(int(step.storages.bytes[each]) % samples for each in (x, *made)):
        raise NotTokenWise
    return x, samples


def _rows(step: Step, forward: tuple[int, ...], x: int) -> int:
    """Return the tokens in `x`, from the first product with a weight."""
    for op in forward:
        weights = [
            step.parameter_of[s]
            for s in step.uses.storage[uses_of(step, op, op)].tolist()
            if step.parameter_of[s] >= 0
        ]
        shapes = [step.parameters[each] for each in weights if len(step.parameters[each].shape) == 2]
        if shapes:
            # Storages have bytes and no dtype: the weight, whose shape is known, tells the bytes of an
            # element.
            width = (
                shapes[0].shape[1]
                * int(step.storages.bytes[shapes[0].storage])
                // int(np.prod(shapes[0].shape))
            )
            if int(step.storages.bytes[x]) % width:
                raise NotTokenWise
            return int(step.storages.bytes[x] // width)
    raise NotTokenWise


def _joined(step: Step, backward: tuple[int, ...], known: set[int]) -> tuple[int, int]:
    """Return the op of `backward` that adds an outside gradient of the input, and that one; else (-1, -1)."""
    made = set(made_by(step, backward))
    found = (-1, -1)
    for op in backward:
        if step.names[step.ops.name[op]] == "aten.add.Tensor":
            outside = set(step.uses.storage[uses_of(step, op, op)].tolist()) - made - known
            # The tiled module adds one outside gradient, part by part.
            if outside and found[0] >= 0:
                raise NotTokenWise
            found = (op, _single(outside)) if outside else found
    return found


def _gradients(
    step: Step, backward: tuple[int, ...], known: set[int], residual: int
) -> tuple[int, int, tuple[int, ...]]:
    """Return the gradient that backward reads, that of the input, and those of the parameters."""
    made = set(made_by(step, backward))
    window = uses_of(step, backward[0], backward[-1])
    inside = np.isin(step.uses.op[window], backward)
    used = step.uses.storage[window]
    read = set(used[inside].tolist()) - made - known
    outside = {s for s in read if step.parameter_of[s] < 0}
    # In x + f(x) the gradient of the output is added to that of the input.
    dy = _single(outside - {residual} or outside)
    if (step.uses.mode[window][inside] == WRITES).any():
        raise NotTokenWise
    # A parameter's gradient is one that autograd accumulates, or that has an owner.
    ready = made & _gradients_in(step) | {s for s in made if step.storages.owner[s] >= 0}
    left = made & set(used[~inside].tolist())
    left |= used_in(step, made, uses_of(step, backward[-1] + 1, step.ops.n))
    left |= {s for s in made if step.storages.held_until[s] > backward[-1]}
    gradients = tuple(sorted(left & ready, key=lambda s: int(step.storages.producer[s])))
    # The only other tensor that leaves backward is the gradient of the input.
    others = left - ready
    if len(others) > 1:
        raise NotTokenWise
    return dy, next(iter(others), -1), gradients


@lru_cache(maxsize=8)
def _gradients_in(step: Step) -> frozenset[int]:
    """Return the parameters' gradients."""
    return frozenset(step.grad_order.tolist())


# Norms over the last dim that make full-sized tensors inside.
_CAST = "aten._to_copy.default"
_FUSED = ("aten.native_layer_norm.default", "aten._fused_rms_norm.default")
_MEAN = "aten.mean.dim"
_ALIKE_NORMS = (
    *_FUSED,
    _CAST,
    _MEAN,
    "aten.rsqrt.default",
    "aten.sqrt.default",
    "aten.pow.Tensor_Scalar",
    "aten.square.default",
    "aten.mul.Tensor",
    "aten.add.Tensor",
    "aten.add_.Scalar",
    "aten.add_.Tensor",
    "aten.add.Scalar",
    "aten.sub.Tensor",
    "aten.div.Tensor",
    "aten.reciprocal.default",
)


class NotTokenWise(Exception):
    """The ops are no token-wise module."""


def has_norms(step: Step) -> bool:
    """Return whether an op of the blocks' forward can be part of such a norm; a cheap test."""
    wanted = [i for i, name in enumerate(step.names) if name in (_CAST, _MEAN)]
    return bool(wanted) and bool(
        np.isin(step.ops.name[(step.ops.phase == Phase.FORWARD) & (step.ops.block >= 0)], wanted).any()
    )


def norm_rows(step: Step, ops: tuple[int, ...], made: set[int]) -> tuple[int, int]:
    """Return the tensor that `ops`, a norm over its last dim, read, and its rows.

    The ops may also read weights of that length.

    Args:
        step: Step with the ops.
        ops: All ops of a module's forward.
        made: Their output storages.

    Raises:
        NotTokenWise: The ops are no such norm. Only sizes show that the mean is over the last dim;
            `activations.tiling.tiled_region` verifies it on the first tokens.
    """
    inputs: set[int] = set()
    weights = []
    for op in ops:
        if step.names[step.ops.name[op]] not in _ALIKE_NORMS:
            raise NotTokenWise
        used = uses_of(step, op, op)
        reads = set(step.uses.storage[used].tolist())
        # In place is fine inside: `add_(eps)` writes what the norm itself has made.
        written = set(step.uses.storage[used][step.uses.mode[used] == WRITES].tolist())
        weights += [step.parameters[step.parameter_of[s]] for s in reads if step.parameter_of[s] >= 0]
        if written - made or any(len(each.shape) != 1 for each in weights):
            raise NotTokenWise
        inputs |= {s for s in reads - made if step.parameter_of[s] < 0}
    if len(inputs) != 1 or len({each.shape for each in weights}) > 1:
        raise NotTokenWise
    x = inputs.pop()
    names = {step.names[step.ops.name[op]] for op in ops}
    # A fused norm without a cast makes no full-sized tensor inside, so that parts would save nothing.
    if _MEAN not in names and not (_CAST in names and names.intersection(_FUSED)):
        raise NotTokenWise
    itemsize = _itemsize(
        step, ops, x, {int(step.storages.bytes[each.storage]) // each.shape[0] for each in weights}
    )
    width = weights[0].shape[0] if weights else 0
    return x, _norm_rows(step, ops, x, itemsize, width)


def _itemsize(step: Step, ops: tuple[int, ...], x: int, of_weights: set[int]) -> int:
    """Return the bytes per element of `x`: two if it is cast to twice its size, else the weights'."""
    for op in ops:
        if step.names[step.ops.name[op]] == _CAST and x in step.uses.storage[uses_of(step, op, op)]:
            if int(step.storages.bytes[step.storages.producer == op].sum()) != 2 * int(
                step.storages.bytes[x]
            ):
                raise NotTokenWise
            return 2
    if len(of_weights) != 1:
        raise NotTokenWise
    return of_weights.pop()


def _norm_rows(step: Step, ops: tuple[int, ...], x: int, itemsize: int, width: int) -> int:
    """Return the rows of `x`; its mean, one number per row, must agree with the weights' length."""
    for op in ops:
        if step.names[step.ops.name[op]] == _MEAN:
            # The mean divides the size by the row's length.
            of = max(int(step.storages.bytes[s]) for s in step.uses.storage[uses_of(step, op, op)].tolist())
            ratio = of // max(int(step.storages.bytes[step.storages.producer == op].sum()), 1)
            if width not in (0, ratio):
                raise NotTokenWise
            width = ratio
        elif step.names[step.ops.name[op]] in _FUSED and not width:
            raise NotTokenWise
    if width < 2 or int(step.storages.bytes[x]) % (width * itemsize):
        raise NotTokenWise
    return int(step.storages.bytes[x]) // (width * itemsize)
