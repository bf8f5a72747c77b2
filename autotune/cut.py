"""Recordings of a model with layers cut over ranks: the runtime cuts the fake model itself, the recorder watches one rank.

What the user's code does between the layers of a pair was not written with a cut in mind. It is right exactly if each op there
treats every head (of attention) or every feature (of an MLP) alike, so the two recordings are compared op by op:

1. The same ops run in the same order.
2. In every shape at most one dimension differs, and there by the degree.
3. No op works along that dimension: it is element-wise, or a product with whole rows and columns of what it sums over, or
   attention over whole heads. Only the row layer, whose own ops are known and left out, sums over what was divided.
4. Nothing in a pair draws random numbers, which each rank would draw anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist

from memtune.autotune.fake_ranks import fake_ranks
from memtune.autotune.record import Session, record, why
from memtune.errors import MemtuneError
from memtune.hardware import Device
from memtune.linear_pairs import Pair, find_pairs, share_of
from memtune.program import Phase, Recording, Step
from memtune.runtime import nodes
from memtune.runtime.sharding import meshes
from memtune.runtime.tensor import Place, cut_layers, require_linear
from memtune.runtime.workspace import WorkspaceTable
from memtune.technique import CutRecording, Reason
from memtune.workload import Workload

_FIX = "another degree, or cut: mlp"
_ALIKE = frozenset(
    "add sub mul div neg abs pow square sqrt rsqrt reciprocal exp log silu gelu relu sigmoid tanh hardswish hardtanh elu "
    "leaky_relu softplus mish clamp clamp_min clamp_max where masked_fill maximum minimum lerp addcmul addcdiv copy clone "
    "_to_copy fill zeros_like ones_like empty_like zero logical_not eq ne lt le gt ge cos sin".split()
)
"""Element-wise: it does not matter which dimension is divided."""
_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
"""Where the two factors are among the arguments."""
_ALONG = frozenset(("_softmax", "_log_softmax", "cat", "stack", "sum", "mean", "amax", "amin"))
"""Work along the dims that they are told."""


class CutRecordings:
    """A workload's steps with layers cut, each recorded when it is first asked for.

    Args:
        workload: The user's model, batch, loss and optimizer.
        plain: The recording of the plain step, not translated.
        sizes: Micro-batches that will be used.
        between: As in `record`.
        workspace: Where the scratch of CPU kernels is looked up.
        target: Where the step is to run.
        ranks_per_node: Consecutive ranks that share a node.
        translate: Makes a recording that of the target's kernels.
    """

    def __init__(
        self,
        workload: Workload,
        plain: Recording,
        sizes: Iterable[int] = (),
        between: Iterable[int] = (),
        workspace: WorkspaceTable | None = None,
        target: Device = "cpu",
        ranks_per_node: int | None = None,
        translate: Callable[[Recording], Recording] = lambda recording: recording,
    ) -> None:
        self._record = partial(record, workload, sizes=set(sizes), between=set(between), workspace=workspace, target=target)
        self._workload, self._plain, self._node, self._translate = workload, plain, ranks_per_node, translate
        self._known: dict[tuple[int, str, int], CutRecording | Reason] = {}

    def __call__(self, degree: int, what: str, ranks: int) -> CutRecording | Reason:
        """The step of a rank whose layers `degree` of the `ranks` share, or why they cannot."""
        key = degree, what, ranks
        if key not in self._known:
            self._known[key] = self._made(*key)
        return self._known[key]

    def _made(self, degree: int, what: str, ranks: int) -> CutRecording | Reason:
        if dist.is_initialized():
            return Reason("this process trains with others already", "plan in a process of its own")
        step = self._plain.step
        pairs = chosen_pairs(step, degree, what)
        if isinstance(pairs, Reason):
            return pairs
        try:
            with fake_ranks(ranks):
                nodes.declare(self._node)
                recording = self._record(change=partial(cut_session, pairs=pairs, degree=degree))
        except MemtuneError as error:
            return Reason(_first_line(error), _FIX)
        except Exception as error:  # of user code, which was not written for fewer heads
            return Reason(f"its code does not run with a share of the heads or features: {why(error, self._workload)}", _FIX)
        if recording.rung != self._plain.rung:
            return Reason(f"with layers cut it runs only {recording.rung}: {recording.notes[0]}", _FIX)
        reason = differs(self._plain, recording, pairs, degree)
        if reason is not None:
            return reason
        document = {"degree": degree, "pairs": [pair.document() for pair in pairs]}
        return CutRecording(self._translate(recording), document)


def _first_line(error: MemtuneError) -> str:
    return f"{error.what} {error.evidence}".strip()


def chosen_pairs(step: Step, degree: int, what: str) -> tuple[Pair, ...] | Reason:
    """The pairs of the model of `step` that `what` (`all` or `mlp`) names, or why `degree` ranks cannot share them."""
    shapes = [(p.name, p.shape) for p in step.parameters]
    pairs = find_pairs(shapes, step.blocks)
    if what == "all" and pairs.refused:
        return Reason(pairs.refused[0], "cut: mlp leaves attention whole")
    chosen = tuple(pair for pair in pairs.found if what == "all" or not pair.attention)
    if not chosen:
        kind = "linear layers that widen and narrow again" if what == "mlp" else "attention or linear layers that could be cut"
        return Reason(f"no {kind} were found in the blocks", "parallel: {kind: none}")
    by_module = {name.removesuffix(".weight"): shape for name, shape in shapes}
    unequal = next((why for pair in chosen if (why := share_of(pair, by_module, degree))), None)
    return chosen if unequal is None else Reason(unequal, _FIX)


def cut_session(session: Session, *, pairs: tuple[Pair, ...], degree: int) -> None:
    """Cut the model of `session`; its weights stay plain tensors, so that everything that is recorded is a plain op."""
    model = session.model
    require_linear(model, pairs, degree)
    mesh = meshes("cpu", degree)[1]
    before = dict(model.named_parameters())
    with session.entered():
        cut_layers(model, pairs, Place(mesh.get_group().group_name, degree, 0))
    new_of = {old: model.get_parameter(name) for name, old in before.items()}
    for group in session.optimizer.param_groups:
        group["params"] = [new_of.get(parameter, parameter) for parameter in group["params"]]


def differs(plain: Recording, cut: Recording, pairs: Iterable[Pair], degree: int) -> Reason | None:
    """Why the recordings are not those of one computation, cut `degree` times; None if they are (rules 1 to 4)."""
    for pair in pairs:
        mine, theirs = (_ops_in(each, pair) for each in (plain, cut))
        if [name for name, _, _ in mine] != [name for name, _, _ in theirs]:
            return Reason(f"{pair.owner} runs other ops with a share of its {_parts(pair)}", _FIX)
        for (name, rng, whole), (_, _, part) in zip(mine, theirs, strict=True):
            if rng and not _draws_nothing(name, part):
                return Reason(f"{pair.owner} draws random numbers ({name}): each rank would draw its own", _FIX)
            wrong = _wrong(name, whole, part, degree)
            if wrong:
                return Reason(f"{name} in {pair.owner} {wrong}", _FIX)
    return None


def _parts(pair: Pair) -> str:
    return "heads" if pair.attention else "features"


def _draws_nothing(name: str, arguments: list[Any]) -> bool:
    """Whether an op that may draw does not: attention without dropout."""
    return "scaled_dot_product" in name and not any(isinstance(value, float) and value for value in arguments)


def _ops_in(recording: Recording, pair: Pair) -> list[tuple[str, bool, list[Any]]]:
    """Forward ops of the pair's module but for the row layer's own: name, whether it draws, its arguments."""
    step, signatures = recording.step, recording.hints[recording.small].signatures
    modules = [name != pair.row and (name == pair.owner or name.startswith(f"{pair.owner}.")) for name in step.modules]
    ops = np.flatnonzero(np.asarray(modules, bool)[step.op_module] & (step.op_phase == Phase.FORWARD)).tolist()
    return [
        (step.names[step.op_name[op]], bool(step.op_rng[op]), json.loads(signatures[op])[1] if signatures[op] else [])
        for op in ops
    ]


def _wrong(name: str, whole: list[Any], part: list[Any], degree: int) -> str:
    """What an op does that the whole one does not, '' for nothing."""
    divided: list[int | None] = []
    for one, other in zip(_flat(whole), _flat(part), strict=False):
        dim = _divided(one, other, degree)
        if isinstance(dim, str):
            return dim
        divided.append(dim)
    if len(_flat(whole)) != len(_flat(part)):
        return "is given other arguments"
    if all(dim is None for dim in divided):
        return ""
    op = name.split(".")[1].rstrip("_") if not name.split(".")[1].startswith("_") else name.split(".")[1]
    if op in _ALIKE:
        return ""
    if op in _PRODUCTS:
        return _product(op, whole, divided)
    if "scaled_dot_product" in op:
        heads = [dim for shape, dim in zip(_flat(whole), divided, strict=True) if _is_tensor(shape) and dim is not None]
        return "" if all(dim == 1 for dim in heads) else "would divide something else than whole heads"
    if op in _ALONG:
        return _along(whole, divided)
    return "is not known to treat heads and features alike"


def _product(op: str, whole: list[Any], divided: list[int | None]) -> str:
    left, right = _PRODUCTS[op]
    dims = [len(_shape(whole[at])) for at in (left, right)]
    summed = divided[left] == dims[0] - 1 or divided[right] == dims[1] - 2
    return "sums over what was divided" if summed else ""


def _along(whole: list[Any], divided: list[int | None]) -> str:
    tensors = [(value, dim) for value, dim in zip(_flat(whole), divided, strict=True) if _is_tensor(value)]
    rank = len(_shape(tensors[0][0]))
    told = {
        number % rank for value in whole[1:] for number in (value if isinstance(value, list) else [value]) if type(number) is int
    }
    return "works along what was divided" if not told or told & {dim for _, dim in tensors} else ""


def _flat(arguments: list[Any]) -> list[Any]:
    return [each for value in arguments for each in (value if isinstance(value, list) else [value])]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and ("t" in value or "conj" in value)


def _shape(value: Any) -> list[int]:
    found: list[int] = (value.get("t") or value.get("conj"))[1]
    return found


def _divided(one: Any, other: Any, degree: int) -> int | str | None:
    """The dimension that is divided, None where nothing is, or what is wrong."""
    if not (_is_tensor(one) and _is_tensor(other)):
        return None if one == other else "is given another number"
    mine, theirs = _shape(one), _shape(other)
    if len(mine) != len(theirs):
        return "is given another number of dimensions"
    changed = [dim for dim, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b]
    if not changed:
        return None
    if len(changed) > 1 or mine[changed[0]] != theirs[changed[0]] * degree:
        return f"is given {theirs} in place of {mine}"
    return changed[0]
