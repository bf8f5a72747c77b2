"""Recordings of a model with layers cut over ranks: the runtime cuts the fake model itself, the recorder watches one rank.

What the user's code does between the layers of a pair was not written with a cut in mind. It is right exactly if each op there
treats every head (of attention) or every feature (of an MLP) alike, so the two recordings are compared op by op:

1. The same ops run in the same order.
2. In every shape at most one dimension differs, and there by the degree.
3. No op works along that dimension: it is element-wise, or a product with whole rows and columns of what it sums over, or
   attention over whole heads. Only the row layer, whose own ops are known and left out, sums over what was divided.
4. Nothing in a pair draws random numbers, which each rank would draw anew.
5. What is divided meets no weight that every rank has whole: its gradient would be another one on each rank. Where positions are
   divided as well (`cut_positions`), the gradients of such weights are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch.distributed as dist

from memtune.autotune import cut_head_context
from memtune.autotune.cut_ops import Op, count_divided, draws_nothing, forward_ops, wrong
from memtune.autotune.cut_positions import positions_differ
from memtune.autotune.cut_rotated import ROTATED, nothing_rotates, rotate_session, used_elsewhere
from memtune.autotune.fake_ranks import fake_ranks
from memtune.autotune.record import Session, record, why
from memtune.errors import MemtuneError
from memtune.hardware import Device
from memtune.linear_pairs import Pair, find_pairs, share_of
from memtune.program import Recording, Step
from memtune.runtime import nodes
from memtune.runtime.contexts import Split
from memtune.runtime.head_context import FIX, HEAD_CONTEXT
from memtune.runtime.positions import dropouts
from memtune.runtime.sequence import divide_fake
from memtune.runtime.sharding import meshes
from memtune.runtime.tensor import Place, cut_layers, require_linear
from memtune.runtime.workspace import WorkspaceTable
from memtune.technique import CutRecording, Reason
from memtune.workload import Workload

_FIX = "another degree, or cut: mlp"


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
        self._alone: dict[tuple[int, int], cut_head_context.Seen | Reason] = {}

    def __call__(self, degree: int, what: str, ranks: int) -> CutRecording | Reason:
        """The step of a rank whose layers `degree` of the `ranks` share, or why they cannot."""
        key = degree, what, ranks
        if key not in self._known:
            self._known[key] = self._made(*key)
        return self._known[key]

    def _made(self, degree: int, what: str, ranks: int) -> CutRecording | Reason:
        if dist.is_initialized():
            return Reason("this process trains with others already", "plan in a process of its own")
        if what in ROTATED:
            return self._rotated(degree, ROTATED[what], ranks)
        if what.startswith(HEAD_CONTEXT):
            return self._head_context(Split.named(what.removeprefix(HEAD_CONTEXT)), ranks)
        step, sequence = self._plain.step, what == "sequence"
        pairs = chosen_pairs(step, degree, "all" if sequence else what)
        if isinstance(pairs, Reason):
            return pairs
        cut = self._recorded(partial(cut_session, pairs=pairs, degree=degree), ranks)
        if isinstance(cut, Reason):
            return cut
        reason = differs(self._plain, cut, pairs, degree, summed=sequence)
        if reason is not None:
            return reason
        if sequence:
            drops: set[str] = set()
            divided = self._recorded(partial(divide_session, pairs=pairs, degree=degree, drops=drops), ranks)
            if isinstance(divided, Reason):
                return divided
            reason = positions_differ(cut, divided, pairs, degree, drops)
            if reason is not None:
                return reason
            cut = divided
        document = {"degree": degree, "pairs": [pair.document() for pair in pairs]}
        return CutRecording(self._translate(cut), document)

    def _rotated(self, degree: int, in_place: bool, ranks: int) -> CutRecording | Reason:
        layers, refused = list[str](), list[str]()
        change = partial(rotate_session, degree=degree, in_place=in_place, layers=layers, refused=refused)
        recording = self._recorded(change, ranks)
        if isinstance(recording, Reason):
            return recording
        if not layers:
            return nothing_rotates(refused)
        parameters = changed_shapes(self._plain, recording)
        reason = used_elsewhere(recording, layers, parameters)
        if reason is not None:
            return reason
        n_bytes = degree * sum(int(recording.step.bytes[p.storage]) for p in recording.step.parameters if p.name in parameters)
        document = {"degree": degree, "layers": layers, "parameters": parameters, "rotated_bytes": n_bytes}
        return CutRecording(self._translate(recording), document)

    def _head_context(self, split: Split, ranks: int) -> CutRecording | Reason:
        key = split.ranks, ranks
        if key not in self._alone:
            self._alone[key] = self._apart(*key)
        seen = self._alone[key]
        reason = seen if isinstance(seen, Reason) else cut_head_context.unfit(seen, split)
        if reason is not None:
            return reason
        assert isinstance(seen, cut_head_context.Seen)
        change = partial(cut_head_context.divided_session, split=split, copies=ranks // split.ranks)
        recording = self._recorded(change, ranks)
        if isinstance(recording, Reason):
            return recording
        return CutRecording(self._translate(recording), cut_head_context.document(seen, split))

    def _apart(self, degree: int, ranks: int) -> cut_head_context.Seen | Reason:
        """What attention is called with, where the blocks may work on one of `degree` shares of the positions; or why not."""
        seen = cut_head_context.Seen()
        alone = self._recorded(partial(cut_head_context.alone_session, ranks=degree, seen=seen), ranks)
        if isinstance(alone, Reason):
            return alone
        reason = positions_differ(self._plain, alone, (), degree, seen.drops, apart=True, fix=FIX)
        return seen if reason is None else reason

    def _recorded(self, change: Callable[[Session], None], ranks: int) -> Recording | Reason:
        """A rank's step after `change`, or why it does not run."""
        try:
            with fake_ranks(ranks):
                nodes.declare(self._node)
                recording = self._record(change=change)
        except MemtuneError as error:
            return Reason(_first_line(error), error.fix or _FIX)
        except Exception as error:  # of user code, which was not written for fewer heads or positions
            return Reason(f"its code does not run with a share of the weights or positions: {why(error, self._workload)}", _FIX)
        if recording.rung != self._plain.rung:
            return Reason(f"with layers cut it runs only {recording.rung}: {recording.notes[0]}", _FIX)
        return recording


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


def divide_session(session: Session, *, pairs: tuple[Pair, ...], degree: int, drops: set[str]) -> None:
    """`cut_session`, and every rank has its share of the positions between the layers that are cut.

    Args:
        session: Changed in place.
        pairs: What is cut.
        degree: Into how many parts.
        drops: Gets the names of the dropouts, which draw for all positions.
    """
    drops.update(dropouts(session.model, session.blocks))
    cut_session(session, pairs=pairs, degree=degree)
    place = Place(meshes("cpu", degree)[1].get_group().group_name, degree, 0)
    divide_fake(session.model, pairs, session.blocks, place)


def differs(plain: Recording, cut: Recording, pairs: Iterable[Pair], degree: int, *, summed: bool = False) -> Reason | None:
    """Why the recordings are not those of one computation, cut `degree` times; None if they are (rules 1 to 5).

    Args:
        plain: The step of a rank that has all.
        cut: The same with `pairs` cut.
        pairs: What was cut.
        degree: Into how many parts.
        summed: Gradients of whole weights are summed over the ranks.
    """
    whole_weights = {} if summed else _whole_weights(plain, cut)
    for pair in pairs:
        mine, theirs = (ops_in(each, pair) for each in (plain, cut))
        if [op.name for op in mine] != [op.name for op in theirs]:
            return Reason(f"{pair.owner} runs other ops with a share of its {_parts(pair)}", _FIX)
        for one, other in zip(mine, theirs, strict=True):
            if one.draws and not draws_nothing(other):
                return Reason(f"{pair.owner} draws random numbers ({one.name}): each rank would draw its own", _FIX)
            said = wrong(one.name, one.arguments, other.arguments, degree)
            if said:
                return Reason(f"{one.name} in {pair.owner} {said}", _FIX)
            met = whole_weights.keys() & other.reads
            if met and count_divided(one.arguments, other.arguments, degree)[0]:
                return Reason(
                    f"{whole_weights[min(met)]} is used for what is divided: each rank has a part of its gradient", _FIX
                )
    return None


def changed_shapes(plain: Recording, cut: Recording) -> list[str]:
    """Names of the parameters of which a rank of the cut step has a part."""
    both = zip(plain.step.parameters, cut.step.parameters, strict=True)
    return [mine.name for one, mine in both if one.shape != mine.shape]


def _whole_weights(plain: Recording, cut: Recording) -> dict[int, str]:
    """Trainable parameters that are not cut: storage in the cut step, and name."""
    both = zip(plain.step.parameters, cut.step.parameters, strict=True)
    return {mine.storage: mine.name for one, mine in both if mine.trainable and one.shape == mine.shape}


def _parts(pair: Pair) -> str:
    return "heads" if pair.attention else "features"


def ops_in(recording: Recording, pair: Pair) -> list[Op]:
    """Forward ops of the pair's module but for the row layer's own."""
    names = recording.step.modules
    inside = [name != pair.row and (name == pair.owner or name.startswith(f"{pair.owner}.")) for name in names]
    return forward_ops(recording, np.asarray(inside, bool))
