"""Where blocks hold modules that treat every token alike: what `passes.tiled_region` can run a few tokens at a time.

Such a module reads one tensor, makes one, and is an MLP or a norm, forward and backward each in one piece. An MLP consists of
products with weights (at least two), layer norms and element-wise ops; a norm is what `passes.norm_rows` takes for one. Anything
that draws random numbers or mixes rows is left whole, and so is an MLP that casts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from memtune.passes.norm_rows import NotAlike, has_norms, norm_rows, uses_of
from memtune.program import HANDS_OVER, I32, READS, Kind, Phase, Step

_PRODUCTS = ("aten.mm.default", "aten.addmm.default")
_NORMS = ("aten.native_layer_norm.default", "aten._fused_rms_norm.default")
_ALIKE = (
    *_PRODUCTS, *_NORMS, "aten.gelu.default", "aten.silu.default", "aten.relu.default", "aten.tanh.default",
    "aten.sigmoid.default", "aten.mul.Tensor", "aten.add.Tensor", "aten.square.default", "aten.pow.Tensor_Scalar",
)  # fmt: skip


@dataclass(frozen=True)
class PositionWise:
    """One such module of one call of a block."""

    module: str
    module_id: int
    call: int
    forward: tuple[int, ...]
    """Ops, ascending and without others in between; so are those of backward."""
    backward: tuple[int, ...]
    x: int
    """Storage that it reads; `y` is the one that it makes."""
    y: int
    rows: int
    """Tokens."""
    given: int
    """Gradient of `y`."""
    dx: int
    """Gradient of `x`, as far as it comes through here; -1 where none is wanted. With `residual`, all of it."""
    gradients: tuple[int, ...]
    """Of its parameters."""
    save: int
    """Save row of `x`; where the module does not save it, one of `saves` that it can take."""
    saves: tuple[int, ...]
    """Save rows of all that its ops save."""
    inner_bytes: int
    """Of what it saves but `x`; less `x` where only its parts save that."""
    residual: int = -1
    """Gradient of `x` that comes by other ways (around a norm), added in here; -1 where it is added elsewhere."""
    join: int = -1
    """The op that adds `residual` to what the module makes."""


_Rows = Callable[[Step, tuple[int, ...], set[int]], tuple[int, int]]
"""What a module's forward ops read, and its rows, from the ops and what they make; raises `NotAlike`."""


@lru_cache(maxsize=8)
def position_wise(step: Step) -> tuple[PositionWise, ...]:
    """The outermost MLPs inside the blocks of `step`, in the order of their forwards."""
    return _outermost(step, _mlp_rows)


@lru_cache(maxsize=8)
def norms(step: Step) -> tuple[PositionWise, ...]:
    """Norms inside the blocks of `step`, those inside its MLPs as well, that make more than backward needs of them."""
    if not has_norms(step):
        return ()
    return tuple(each for each in _outermost(step, norm_rows) if each.inner_bytes > 0)


def _outermost(step: Step, rows_of: _Rows) -> tuple[PositionWise, ...]:
    found: list[PositionWise] = []
    forward = np.flatnonzero((step.op_phase == Phase.FORWARD) & (step.op_block >= 0)).astype(np.int32)
    for call in np.unique(step.op_call[forward]).tolist():
        ops = forward[step.op_call[forward] == call]
        taken: list[str] = []
        block = step.blocks[step.call_block[call]]
        around = [i for i, name in enumerate(step.modules) if name.startswith(f"{block}.")]
        for name in sorted(_modules_in(step, ops, block), key=lambda each: (each.count("."), each)):
            if any(f"{name}.".startswith(f"{other}.") for other in taken):
                continue
            try:
                found.append(_found(step, call, name, ops, around, rows_of))
                taken.append(name)
            except NotAlike:
                continue
    return tuple(sorted(found, key=lambda each: each.forward[0]))


def _modules_in(step: Step, ops: I32, block: str) -> set[str]:
    """Modules strictly inside `block` that run some of `ops`, and those around them."""
    names = set()
    for number in np.unique(step.op_module[ops]).tolist():
        name = step.modules[number]
        while name.startswith(f"{block}."):
            names.add(name)
            name = name.rpartition(".")[0]
    return names


def _found(step: Step, call: int, name: str, block_ops: I32, around: list[int], rows_of: _Rows) -> PositionWise:
    inside = np.zeros(len(step.modules), bool)
    inside[[i for i in around if f"{step.modules[i]}.".startswith(f"{name}.")]] = True
    forward = _in_one_piece(block_ops[inside[step.op_module[block_ops]]])
    backward = _in_one_piece(np.flatnonzero(inside[step.op_module] & (step.op_phase == Phase.BACKWARD)))
    if (step.op_phase[backward[0] : backward[-1] + 1] != Phase.BACKWARD).any() or step.op_rng[list(forward)].any():
        raise NotAlike
    made = set(made_by(step, forward))
    x, rows = rows_of(step, forward, made)
    later, again, after = np.searchsorted(step.use_op, (forward[-1] + 1, backward[0], backward[-1] + 1)).tolist()
    read_later = _among(made, step.use_storage[later:again]) | _among(made, step.use_storage[after:])
    kept = {s for s in made if step.held_until[s] > forward[-1]}
    y = _only(read_later or kept)
    if kept - {y}:
        raise NotAlike
    join, residual = _joined(step, backward, made | {x})
    given, dx, gradients = _gradients(step, backward, made | {x, residual})
    window = (step.save_before > forward[0]) | ((step.save_before == forward[0]) & (step.save_is_output == 0))
    window &= (step.save_before <= forward[-1]) | ((step.save_before == forward[-1] + 1) & (step.save_is_output == 1))
    saves = np.flatnonzero(window & (step.save_call == call))
    mine = saves[step.save_storage[saves] == x]
    if not len(saves) or (residual >= 0 and dx < 0):
        raise NotAlike
    held = np.unique(step.save_storage[saves])
    inner = int(step.bytes[held[(held != x) & np.isin(held, list(made))]].sum())
    if not (step.save_storage == x).any():
        inner -= int(step.bytes[x])
    save = int(mine[0]) if len(mine) else int(saves[0])
    return PositionWise(
        name, int(step.op_module[forward[-1]]), call, forward, backward, x, y, rows, given, dx, gradients, save,
        tuple(saves.tolist()), inner, residual, join,
    )  # fmt: skip


def made_by(step: Step, ops: tuple[int, ...]) -> list[int]:
    """Storages that `ops` make, workspaces left out; there are no other ops in between."""
    mine = (step.producer >= ops[0]) & (step.producer <= ops[-1]) & (step.kind != Kind.WORKSPACE)
    found: list[int] = np.flatnonzero(mine).tolist()
    return found


def _among(storages: set[int], rows: I32) -> set[int]:
    """Those of `storages` that occur in `rows`."""
    mine = np.asarray(sorted(storages), np.int32)
    return set(mine[np.isin(mine, rows)].tolist())


def _in_one_piece(ops: np.ndarray) -> tuple[int, ...]:
    if not len(ops) or int(ops[-1] - ops[0]) + 1 != len(ops):
        raise NotAlike
    return tuple(ops.tolist())


def _only(storages: set[int]) -> int:
    if len(storages) != 1:
        raise NotAlike
    return next(iter(storages))


def _mlp_rows(step: Step, ops: tuple[int, ...], made: set[int]) -> tuple[int, int]:
    x = _only(_all_alike(step, ops, made))
    return x, _rows(step, ops, x)


def _all_alike(step: Step, ops: tuple[int, ...], made: set[int]) -> set[int]:
    """What `ops` read from outside besides parameters; all of them must treat rows alike, and two be products with weights."""
    inputs: set[int] = set()
    products = 0
    for op in ops:
        name = step.names[step.op_name[op]]
        used = uses_of(step, op, op)
        reads = set(step.use_storage[used].tolist())
        if name not in _ALIKE or step.use_mutates[used].any():
            raise NotAlike
        ranks = sorted(len(step.parameters[step.parameter_of[s]].shape) for s in reads if step.parameter_of[s] >= 0)
        is_product = name in _PRODUCTS
        if (is_product and 2 not in ranks) or (not is_product and set(ranks) - {1}):
            raise NotAlike  # a product of two activations, or positions added
        products += is_product
        inputs |= {s for s in reads - made if step.parameter_of[s] < 0}
    if products < 2:
        raise NotAlike
    return inputs


def _rows(step: Step, forward: tuple[int, ...], x: int) -> int:
    """Tokens in `x`, from the first product with a weight."""
    for op in forward:
        weights = [step.parameter_of[s] for s in step.use_storage[uses_of(step, op, op)].tolist() if step.parameter_of[s] >= 0]
        shapes = [step.parameters[each] for each in weights if len(step.parameters[each].shape) == 2]
        if shapes:
            width = shapes[0].shape[1] * int(step.bytes[shapes[0].storage]) // int(np.prod(shapes[0].shape))
            if int(step.bytes[x]) % width:
                raise NotAlike
            return int(step.bytes[x] // width)
    raise NotAlike


def _joined(step: Step, backward: tuple[int, ...], known: set[int]) -> tuple[int, int]:
    """The op of `backward` that adds to another gradient of the input, made outside, and that gradient; (-1, -1) for none."""
    made = set(made_by(step, backward))
    found = (-1, -1)
    for op in backward:
        if step.names[step.op_name[op]] == "aten.add.Tensor":
            outside = set(step.use_storage[uses_of(step, op, op)].tolist()) - made - known
            if outside and found[0] >= 0:
                raise NotAlike
            found = (op, _only(outside)) if outside else found
    return found


def _gradients(step: Step, backward: tuple[int, ...], known: set[int]) -> tuple[int, int, tuple[int, ...]]:
    """The gradient that backward is given, those of the input and of the parameters."""
    made = set(made_by(step, backward))
    inside = uses_of(step, backward[0], backward[-1])
    read = set(step.use_storage[inside].tolist()) - made - known
    given = _only({s for s in read if step.parameter_of[s] < 0})
    if not np.isin(step.use_mutates[inside], (READS, HANDS_OVER)).all():
        raise NotAlike
    landed = _among(made, step.landing) | {s for s in made if step.owner[s] >= 0}
    left = _among(made, step.use_storage[inside.stop :]) | {s for s in made if step.held_until[s] > backward[-1]}
    gradients = tuple(sorted(left & landed, key=lambda s: int(step.producer[s])))
    others = left - landed
    if len(others) > 1:
        raise NotAlike
    return given, next(iter(others), -1), gradients
