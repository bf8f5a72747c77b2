"""Recordings of a model with layers partitioned over ranks.

The runtime partitions the fake model, the recorder observes one rank.

The user's code between the layers of a pair was not written for partitioning. It is correct if and only if
each op there treats every head (of attention) or every feature (of an MLP) alike, so the two recordings are
compared op by op:

1. The same ops run in the same order.
2. In every shape at most one dimension differs, by the factor of the degree.
3. No op works along that dimension: it is element-wise, or a product with whole rows and columns of its
  contracted dimension, or attention over whole heads. Only the row layer, whose own ops are known and
  skipped, sums over the divided dimension.
4. No op in a pair draws random numbers, because each rank would draw others.
5. No divided tensor is combined with a weight that every rank has in full: its gradient would differ between
  ranks. If positions are divided as well (`sequence_check`), the gradients of such weights are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from memtune import refusals
from memtune.autotune.record import Session, error_line, record
from memtune.autotune.record_parallel.fake_process_group import fake_ranks
from memtune.autotune.record_parallel.op_check import (
    Op,
    count_divided,
    draws_nothing,
    forward_ops,
    partition_error,
)
from memtune.autotune.record_parallel.sequence_check import positions_differ
from memtune.errors import MemtuneError, WorkloadError
from memtune.parallel.model import (
    FIX,
    HEAD_CONTEXT,
    NO_REPLICAS,
    AttentionCall,
    Load,
    Place,
    ReplicaRule,
    SequenceLayout,
    Split,
    attend,
    cut_layers,
    divide_layers,
    divided_attention,
    divisible_experts,
    dropouts,
    grid_of,
    order_experts,
    owners_of,
    require_linear,
    rotatable,
    rotate_layers,
    shard_fake_blocks,
    shard_fake_sequence,
    with_attention,
)
from memtune.parallel.ranks import Ring, put_placeholders
from memtune.parallel.sharding import meshes
from memtune.program import Phase, Recording, Step
from memtune.runtime import node_topology
from memtune.technique import Reason, ShardedRecording
from memtune.workload import Pair, Workload, find_pairs, sharding_error

_FIX = "another degree, or layers: mlp"


class ShardedRecordings:
    """Steps of a workload with partitioned layers, each recorded when first needed.

    Args:
        workload: The user's model, batch, loss and optimizer.
        plain: The recording of the unpartitioned step, not translated.
        ranks_per_node: Consecutive ranks that share a node.
        translate: Translates a recording to the target's kernels.
        **how: The other arguments of `record`.
    """

    def __init__(
        self,
        workload: Workload,
        plain: Recording,
        ranks_per_node: int | None = None,
        translate: Callable[[Recording], Recording] = lambda recording: recording,
        **how: Any,
    ) -> None:
        self._record = partial(record, workload, **how)
        self._workload, self._plain, self._node, self._translate = workload, plain, ranks_per_node, translate
        self._known: dict[tuple[int, str, int], ShardedRecording | Reason] = {}
        self._alone: dict[tuple[int, int], AttentionArguments | Reason] = {}

    def __call__(self, degree: int, what: str, ranks: int) -> ShardedRecording | Reason:
        """Return the step of a rank whose layers `degree` of the `ranks` partition, or why they cannot."""
        key = degree, what, ranks
        if key not in self._known:
            self._known[key] = self._attempt(*key)
        return self._known[key]

    def _attempt(self, degree: int, what: str, ranks: int) -> ShardedRecording | Reason:
        # Fake ranks are a process group, of which a process has one.
        if dist.is_initialized():
            return refusals.trains_with_others()
        if what in ROTATED:
            return self._rotated(degree, ROTATED[what], ranks)
        if what.startswith(EXPERTS):
            return self._dispatched(degree, *expert_mode(what, degree), ranks)
        if what.startswith(HEAD_CONTEXT):
            return self._head_context(Split.named(what.removeprefix(HEAD_CONTEXT)), ranks)
        step, sequence = self._plain.step, what == "sequence"
        pairs = chosen_pairs(step, degree, "all" if sequence else what)
        if isinstance(pairs, Reason):
            return pairs
        cut = self._recorded(partial(cut_session, pairs=pairs, degree=degree), ranks)
        if isinstance(cut, Reason):
            return cut
        reason = partition_difference(self._plain, cut, pairs, degree, summed=sequence)
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
        return ShardedRecording(self._translate(cut), {"degree": degree, "pairs": tuple(pairs)})

    def _rotated(self, degree: int, in_place: bool, ranks: int) -> ShardedRecording | Reason:
        layers, refused = list[str](), list[str]()
        change = partial(rotate_session, degree=degree, in_place=in_place, layers=layers, refused=refused)
        recording = self._recorded(change, ranks)
        if isinstance(recording, Reason):
            return recording
        if not layers:
            return nothing_rotates(refused)
        divided = changed_shapes(self._plain, recording)
        fields = self._divided_fields(recording, layers, degree, divided)
        if isinstance(fields, Reason):
            return fields
        return ShardedRecording(self._translate(recording), fields)

    def _dispatched(
        self, degree: int, inner_degree: int, rule: ReplicaRule, ranks: int
    ) -> ShardedRecording | Reason:
        layers, refused, divided, loads = dict[str, int](), list[str](), list[str](), list[Load]()
        change = partial(
            dispatch_session,
            degree=degree,
            inner_degree=None if inner_degree == degree else inner_degree,
            layers=layers,
            refused=refused,
            divided=divided,
            loads=loads,
            rule=rule,
        )
        recording = self._recorded(change, ranks)
        if isinstance(recording, Reason):
            return recording
        if not layers:
            return refusals.no_divisible_experts(min(refused, default="the model has none"))
        fields = self._divided_fields(recording, layers, degree, divided)
        if isinstance(fields, Reason):
            return fields
        rows = sum(load.routed for load in loads)
        busiest = sum(load.arriving for load in loads) / rows if rows else 1.0
        more = {"busiest": busiest} | ({"worth_rows": rule.worth_rows} if rule.most else {})
        return ShardedRecording(self._translate(recording), {**fields, **more})

    def _divided_fields(
        self, recording: Recording, layers: Collection[str], degree: int, parameters: Sequence[str]
    ) -> dict[str, Any] | Reason:
        """Return the fields of a plan whose `layers` have the divided weights `parameters`, or why other code
        uses those.
        """
        reason = used_outside(recording, layers, parameters)
        if reason is not None:
            return reason
        step, names = self._plain.step, frozenset(parameters)
        n_bytes = sum(int(step.storages.bytes[p.storage]) for p in step.parameters if p.name in names)
        return {
            "degree": degree,
            "layers": tuple(layers),
            "parameters": tuple(parameters),
            "divided_bytes": n_bytes,
        }

    def _head_context(self, split: Split, ranks: int) -> ShardedRecording | Reason:
        key = split.ranks, ranks
        if key not in self._alone:
            self._alone[key] = self._attention_within_shares(*key)
        seen = self._alone[key]
        reason = seen if isinstance(seen, Reason) else attention_refusal(seen, split)
        if reason is not None:
            return reason
        assert isinstance(seen, AttentionArguments)
        change = partial(divide_positions, split=split, copies=ranks // split.ranks)
        recording = self._recorded(change, ranks)
        if isinstance(recording, Reason):
            return recording
        return ShardedRecording(self._translate(recording), fields_of(seen, split))

    def _attention_within_shares(self, degree: int, ranks: int) -> AttentionArguments | Reason:
        """Return the arguments of attention, or why blocks cannot work on one of `degree` shares."""
        seen = AttentionArguments()
        alone = self._recorded(partial(attend_within_shares, ranks=degree, seen=seen), ranks)
        if isinstance(alone, Reason):
            return alone
        plain = self._recorded(attend_without_dropout, ranks) if seen.drops_weights else self._plain
        if isinstance(plain, Reason):
            return plain
        reason = positions_differ(plain, alone, (), degree, seen.drops, apart=True, fix=FIX)
        return seen if reason is None else reason

    def _recorded(self, change: Callable[[Session], None], ranks: int) -> Recording | Reason:
        """Return a rank's step after `change`, or why it does not run."""
        try:
            with fake_ranks(ranks):
                node_topology.declare(self._node)
                recording = self._record(change=change)
        except Exception as error:
            if isinstance(error, MemtuneError) and not isinstance(error, WorkloadError):
                return Reason(_first_line(error), error.fix or _FIX)
            # Of user code, which runs undivided, but was not written for fewer heads or positions.
            return Reason(
                "its code does not run with a share of the weights or positions:"
                f" {error_line(error, self._workload)}",
                _FIX,
            )
        # Recorded in another way, its ops would differ whatever the partition.
        if recording.rung != self._plain.rung:
            return Reason(f"with layers cut it runs only {recording.rung}: {recording.notes[0]}", _FIX)
        return recording


def _first_line(error: MemtuneError) -> str:
    return f"{error.what} {error.evidence}".strip()


def chosen_pairs(step: Step, degree: int, what: str) -> tuple[Pair, ...] | Reason:
    """Return the pairs that `what` (`all` or `mlp`) selects, or why `degree` ranks cannot divide them."""
    shapes = [(p.name, p.shape) for p in step.parameters]
    pairs = find_pairs(shapes, step.blocks)
    if what == "all" and pairs.refused:
        return Reason(pairs.refused[0], "layers: mlp leaves attention whole")
    chosen = tuple(pair for pair in pairs.found if what == "all" or not pair.attention)
    if not chosen:
        kind = (
            "linear layers that widen and narrow again"
            if what == "mlp"
            else "attention or linear layers that could be cut"
        )
        return Reason(f"no {kind} were found in the blocks", "parallel: {kind: none}")
    by_module = {name.removesuffix(".weight"): shape for name, shape in shapes}
    unequal = next((error for pair in chosen if (error := sharding_error(pair, by_module, degree))), None)
    return chosen if unequal is None else Reason(unequal, _FIX)


def cut_session(session: Session, *, pairs: tuple[Pair, ...], degree: int) -> None:
    """Partition the model of `session`.

    Its weights remain plain tensors, so that only plain ops are recorded.
    """
    model = session.model
    require_linear(model, pairs, degree)
    mesh = meshes("cpu", degree)[1]
    before = dict(model.named_parameters())
    with session.entered():
        cut_layers(model, pairs, Place(mesh.get_group().group_name, degree, 0))
    _update_optimizer(session, before)


def _update_optimizer(session: Session, before: dict[str, nn.Parameter]) -> None:
    """Give the optimizer the parameters that have replaced those of `before`, by name."""
    new_of = {old: session.model.get_parameter(name) for name, old in before.items()}
    for group in session.optimizer.param_groups:
        group["params"] = [new_of.get(parameter, parameter) for parameter in group["params"]]


def divide_session(session: Session, *, pairs: tuple[Pair, ...], degree: int, drops: set[str]) -> None:
    """Partition the model, and give each rank its share of the positions; `drops` gets names of dropouts."""
    drops.update(dropouts(session.model, session.blocks))
    cut_session(session, pairs=pairs, degree=degree)
    place = Place(meshes("cpu", degree)[1].get_group().group_name, degree, 0)
    shard_fake_sequence(session.model, pairs, session.blocks, place)


def partition_difference(
    plain: Recording, cut: Recording, pairs: Iterable[Pair], degree: int, *, summed: bool = False
) -> Reason | None:
    """Return why the recordings are not one computation partitioned `degree` times.

    None if they are (rules 1 to 5).

    Args:
        plain: The step of a rank with the full model.
        cut: The same with `pairs` partitioned.
        pairs: The partitioned layers.
        degree: Number of parts.
        summed: Gradients of whole weights are summed over the ranks.
    """
    # Summed gradients are whole on every rank, so rule 5 has nothing to check.
    whole_weights = {} if summed else _whole_weights(plain, cut)
    pairs = tuple(pairs)
    # Row layers sum over the divided dimension; rule 3 excepts their own ops.
    rows = {pair.row for pair in pairs}
    for pair in pairs:
        mine, theirs = (ops_in(each, pair, rows) for each in (plain, cut))
        if [op.name for op in mine] != [op.name for op in theirs]:
            return Reason(f"{pair.owner} runs other ops with a share of its {_parts(pair)}", _FIX)
        for one, other in zip(mine, theirs, strict=True):
            if one.draws and not draws_nothing(other):
                return Reason(
                    f"{pair.owner} draws random numbers ({one.name}): each rank would draw its own", _FIX
                )
            error = partition_error(one.name, one.arguments, other.arguments, degree)
            if error:
                return Reason(f"{one.name} in {pair.owner} {error}", _FIX)
            met = whole_weights.keys() & other.reads
            if met and count_divided(one.arguments, other.arguments, degree)[0]:
                return Reason(
                    f"{whole_weights[min(met)]} is used for what is divided: each rank has a part of its"
                    " gradient",
                    _FIX,
                )
    return None


def changed_shapes(plain: Recording, cut: Recording) -> list[str]:
    """Return the names of the parameters of which a rank of the partitioned step has a part."""
    both = zip(plain.step.parameters, cut.step.parameters, strict=True)
    return [mine.name for one, mine in both if one.shape != mine.shape]


def _whole_weights(plain: Recording, cut: Recording) -> dict[int, str]:
    """Return name by storage in the partitioned step of trainable parameters that are not divided."""
    both = zip(plain.step.parameters, cut.step.parameters, strict=True)
    return {mine.storage: mine.name for one, mine in both if mine.trainable and one.shape == mine.shape}


def _parts(pair: Pair) -> str:
    return "heads" if pair.attention else "features"


def ops_in(recording: Recording, pair: Pair, rows: Collection[str]) -> list[Op]:
    """Return the forward ops of the pair's module, except those of row layers."""
    names = recording.step.modules
    inside = [
        name not in rows and (name == pair.owner or name.startswith(f"{pair.owner}.")) for name in names
    ]
    return forward_ops(recording, np.asarray(inside, bool))


class _CopiedShares(SequenceLayout):
    """A layout whose shares are separate storages, to distinguish divided from undivided tensors."""

    def shard_view(self, whole: Tensor, dim: int) -> Tensor:
        """Return a copy, as `shard` does."""
        return self.shard(whole, dim)


@dataclass
class AttentionArguments:
    """The arguments with which attention was called."""

    heads: set[int] = field(default_factory=set)
    """Numbers of query heads."""
    causal: bool = False
    """True if any call masks later positions."""
    drops: set[str] = field(default_factory=set)
    """Names of the dropouts, which draw for all positions."""
    drops_weights: bool = False
    """True if any call drops weights."""


def _whole_attention(call: AttentionCall, attention: Callable[..., Tensor]) -> Tensor:
    """Return `attention` of the call as one op; dropout, whose draws the runtime makes, is left out."""
    if call.dropout_p:
        return attend(call.query, call.key, call.value, causal=call.is_causal, scale=call.scale).out
    return attention(**call._asdict())


def attend_without_dropout(session: Session) -> None:
    """Make attention in the blocks of `session`'s model drop nothing, as within shares."""
    plain = F.scaled_dot_product_attention

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        return _whole_attention(AttentionCall(*args, **kwargs), plain)

    with session.entered():
        for name in session.blocks:
            block = session.model.get_submodule(name)
            block.forward = with_attention(block.forward, attention)


def attend_within_shares(session: Session, *, ranks: int, seen: AttentionArguments) -> None:
    """Make the blocks of `session`'s model work on one of `ranks` shares, which attends to itself."""
    plain = F.scaled_dot_product_attention

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        call = AttentionCall(*args, **kwargs)
        call.require_plain()
        seen.heads.add(call.query.shape[1])
        seen.causal |= call.is_causal
        seen.drops_weights |= call.dropout_p > 0
        return _whole_attention(call, plain)

    seen.drops.update(dropouts(session.model, session.blocks))
    group = meshes("cpu", ranks)[1].get_group().group_name
    with session.entered():
        shard_fake_blocks(session.model, session.blocks, _CopiedShares.contiguous(group, ranks, 0), attention)


def divide_positions(session: Session, *, split: Split, copies: int) -> None:
    """Divide the positions of `session`'s model as on the last rank of the last context."""
    group = meshes("cpu", split.ranks)[1].get_group().group_name
    # With a causal mask the last context has the most keys before it.
    grid = grid_of(split, "cpu", group, copies, split.rank(split.contexts - 1, split.heads - 1))
    with session.entered():
        shard_fake_blocks(session.model, session.blocks, grid.layout, divided_attention(grid))


def attention_refusal(seen: AttentionArguments, split: Split) -> Reason | None:
    """Return the reason that attention cannot be divided as `split` says, None if it can."""
    uneven = sorted(each for each in seen.heads if each % split.heads)
    if uneven:
        return Reason(
            f"{split.heads} ranks do not divide the {uneven[0]} heads of attention",
            "a head_degree that divides the heads",
        )
    if not seen.heads:
        return Reason(
            "no block calls F.scaled_dot_product_attention: how positions meet is not known",
            "parallel: {kind: none}",
        )
    if (split.zigzag or split.work_sharing) and not seen.causal:
        return Reason("attention masks no later positions: contexts have equal work", "load_balance: none")
    return None


def fields_of(seen: AttentionArguments, split: Split) -> dict[str, Any]:
    """Return the fields of the plan."""
    return {"degree": split.ranks, "split": split, "attention_heads": tuple(sorted(seen.heads))}


# Recordings of a model whose weights go round the ranks: the layers are changed on the fake model, one rank
# is watched.
ROTATED = {"rotated": False, "rotated in place": True}
"""Modes of `ShardedRecordings`, and whether a received shard overwrites the rank's own."""
_FIX_ROTATED = "another degree, or parallel: {kind: none}"


def rotate_session(
    session: Session, *, degree: int, in_place: bool, layers: list[str], refused: list[str]
) -> None:
    """Rotate the weights of `session`'s model, which remain plain tensors: only plain ops are recorded."""
    # `layers` receives the names of the layers, `refused` a line about each one that is not divided.
    model = session.model
    layers[:], refused[:] = rotatable(model, degree)
    before = dict(model.named_parameters())
    with session.entered():
        rotate_layers(
            model, layers, Ring(meshes("cpu", degree)[1].get_group().group_name, degree, 0, in_place)
        )
        order_experts(model, layers)
    _update_optimizer(session, before)


EXPERTS = "experts"
"""Mode of `ShardedRecordings` with divided experts; then the ranks of a node, if rows go there first, and the
replicas of a rank and the rows that each is worth, if there are some.
"""


def expert_mode(what: str, degree: int) -> tuple[int, ReplicaRule]:
    """Return the ranks of a node and the replicas of a mode with divided experts: `experts4+1:900`."""
    inner, _, replicas = what.removeprefix(EXPERTS).partition("+")
    most, _, worth_rows = replicas.partition(":")
    return int(inner or degree), ReplicaRule(int(most), int(worth_rows)) if most else NO_REPLICAS


def dispatch_session(
    session: Session,
    *,
    degree: int,
    inner_degree: int | None,
    layers: dict[str, int],
    refused: list[str],
    divided: list[str],
    loads: list[Load],
    rule: ReplicaRule = NO_REPLICAS,
) -> None:
    """Divide the experts of `session`'s model; their weights remain plain tensors.

    Args:
        session: Changed in place.
        degree: Number of owners.
        inner_degree: Ranks among which rows are sent first, None if they are sent at once.
        layers: Receives the number of experts by module.
        refused: Receives a line about each module that is not divided.
        divided: Receives the names of the weights that are.
        loads: Receives the rows of every call.
        rule: Replicas of hot experts.
    """
    found, lines = divisible_experts(session.model, degree)
    layers.update(found)
    refused[:] = lines
    before = dict(session.model.named_parameters())
    place = Place(meshes("cpu", degree)[1].get_group().group_name, degree, 0)
    owners = owners_of("cpu", degree, inner_degree)
    with session.entered():
        pieces, owner_of, _ = divide_layers(session.model, found, place, owners, loads, rule)
        absent = put_placeholders(session.model, {name for name, owner in owner_of.items() if owner})
        for placeholder in absent.values():
            placeholder.requires_grad_(False)  # is trained by its owner
    divided[:] = [*pieces, *owner_of]
    _update_optimizer(session, before)


def nothing_rotates(refused: Collection[str]) -> Reason:
    """Return the reason that no weight rotates."""
    first = min(refused, default="the model has no plain linear layer, convolution or embedding")
    return refusals.does_not_rotate(first)


def used_outside(recording: Recording, layers: Collection[str], parameters: Collection[str]) -> Reason | None:
    """Return the reason that code outside of `layers` would see a part of one of the weights `parameters`.

    None if it does not use them.
    """
    step = recording.step
    weights = {p.storage: p.name for p in step.parameters if p.name in parameters}
    lists = tuple(f"{name}." for name in layers)
    inside = np.array([name in layers or name.startswith(lists) for name in step.modules], bool)
    uses = (
        np.isin(step.uses.storage, list(weights))
        # Backward reads a weight where forward did.
        & (step.ops.phase[step.uses.op] <= Phase.FORWARD)
        & ~inside[step.ops.module[step.uses.op]]
    )
    for at in np.flatnonzero(uses).tolist():
        op = step.uses.op[at]
        name, module = step.names[step.ops.name[op]], step.modules[step.ops.module[op]]
        where = {"": "the model", "(outside)": "the loss"}.get(module, module)
        return Reason(
            f"{name} in {where} uses {weights[int(step.uses.storage[at])]}, of which each rank has a part",
            _FIX_ROTATED,
        )
    return None
