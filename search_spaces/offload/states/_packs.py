"""What techniques share that run packs of blocks over all micro-batches (`runtime.order`): what fits, pass, how it is applied."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from memtune.errors import ApplyError
from memtune.packs import Packs, Span
from memtune.parameters import columns_of
from memtune.passes.chain import not_a_chain
from memtune.passes.host_optimizer import Native, optimizer_on_host
from memtune.passes.layer_major import Where, layer_major
from memtune.program import Kind, Program, Step
from memtune.remembered import remembered
from memtune.runtime.context import Context
from memtune.runtime.host_optimizer import HostOptimizer
from memtune.runtime.order import LayerMajor
from memtune.runtime.pack_store import PackStore
from memtune.runtime.ranks import require_ranks
from memtune.search_spaces.offload.states._layers import cannot_run
from memtune.technique import Plan, Reason, Target

_BY_BLOCK = (
    "full", "every_nth", "selective", "attention_output", "balanced", "planned", "attention_boundary", "checkmate", "dtr",
    "megtaichi", "coop",
)  # fmt: skip
"""Ways to recompute that say of each block what runs again: the blocks of a pack do so as they would in a plain step."""
_ALONE = {
    "recompute": "what moves activations does not hold for packs, which run one after the other",
    "offload.activations": "what a pack saves is used at once",
    "split": "the model's own code runs once more up to the first block",
}
_TRIES = 4
"""Whole rewrites of a plan: what sums of sizes promise is confirmed by the pass."""
T = TypeVar("T")
F64 = npt.NDArray[np.float64]
_OF_RANKS = dict.fromkeys(("sharding.states", "sharding.parallel"), "packs average their gradients themselves")


def not_in_packs(program: Program, target: Target, *, alone: bool = True) -> Reason | None:
    """Why the blocks of `program` cannot be run pack by pack over all micro-batches, `alone` or with ranks that do the same."""
    for slot, why in (_ALONE if alone or target.ranks == 1 else _ALONE | _OF_RANKS).items():
        technique = target.chosen.get(slot)
        if technique is not None and technique.kind not in ("none", *(_BY_BLOCK if slot == "recompute" else ())):
            return Reason(why, _fix(slot))
    if (reason := cannot_run(program, target, alone=alone)) is not None:
        return reason
    if (why := not_a_chain(program.step)) != "":
        return Reason(why, "offload: {states: {kind: stronghold}}")
    return None


def _fix(slot: str) -> str:
    return "recompute: {kind: full}, selective or every_nth" if slot == "recompute" else f"{slot}: {{kind: none}}"


class BlockBytes(NamedTuple):
    """What each block needs, and what is there beside them."""

    weights: tuple[int, ...]
    gradients: tuple[int, ...]
    saved: tuple[int, ...]
    """By one micro-batch, for its backward."""
    boundary: int
    """The largest of what a block starts from, in one micro-batch."""
    beside: int
    """All else that is there at the peak of a plain step: an upper bound."""


@functools.lru_cache(maxsize=32)
def block_bytes(step: Step) -> BlockBytes:
    """Sizes of the blocks of `step`."""
    columns, n_blocks = columns_of(step.parameters), len(step.blocks)
    n_bytes, inside = columns.numel * columns.itemsize, columns.block >= 0
    weights = np.bincount(columns.block[inside], n_bytes[inside], n_blocks).astype(np.int64)
    trained = inside & (columns.gradient >= 0)
    gradients = np.bincount(columns.block[trained], n_bytes[trained], n_blocks).astype(np.int64)
    given = [step.input_storage[step.input_call == i] for i in range(n_blocks)]
    boundary = max(int(step.bytes[each[step.producer[each] >= 0]].sum()) for each in given)
    saved = tuple(step.saved_bytes(i) for i in range(n_blocks))
    state = int(step.bytes[(step.kind == Kind.OPTIMIZER) & (step.tier == 0)].sum())
    beside = step.peak_bytes() - int(weights.sum() + gradients.sum()) - sum(saved) - state
    return BlockBytes(tuple(weights.tolist()), tuple(gradients.tolist()), saved, boundary, max(beside, 0))


@remembered
def in_packs(program: Program, packs: Packs, boundaries: Where) -> Program:
    """The program of a whole step in layer-major order: all its micro-batches are in one body."""
    step = layer_major(program.step, packs, program.accumulate, boundaries, program.ranks)
    whole = program.micro_batch * program.accumulate
    return program.with_step(optimizer_on_host(step, Native()), micro_batch=whole, accumulate=1)


def within_budget(
    solve: Callable[[F64], T | None], needed: Callable[[T], F64], peaks: Callable[[T], F64], budget_bytes: int, ranks: int = 1
) -> T | None:
    """What `solve` finds and the pass confirms, None where a few tries lead to nothing.

    Sums of sizes leave out what else is on the device, and what that comes to the pass says: the room of a rank whose peak is
    above the budget becomes what was needed less what was too much.

    Args:
        solve: From the room for blocks on each rank, the best that sums of sizes promise; None where there is none.
        needed: (ranks,) that sum.
        peaks: (ranks,) peaks of the rewritten step.
        budget_bytes: Of each rank.
        ranks: Whose room differs.
    """
    room = np.full(ranks, float(budget_bytes))
    for _ in range(_TRIES):
        found = solve(room)
        if found is None:
            return None
        over = peaks(found) - budget_bytes
        if (over <= 0).all():
            return found
        room = np.where(over > 0, np.minimum(room, needed(found) - over), room)
    return None


def require_packs_alone(context: Context, kind: str) -> None:
    """Refuse what `not_in_packs` refuses of other axes: a config may say it all the same.

    Raises:
        ApplyError: Another axis moves activations, replaces the blocks' or the loss's code, or averages gradients.
    """
    regions, checks = context.activations.regions, context.checks
    wrong = {
        "offload.activations": any(region.move for region in regions),
        "split": any(slot.startswith("split") for slot in checks),
        "sharding.states": "sharding.states" in checks,
    }
    for slot in (slot for slot, is_wrong in wrong.items() if is_wrong):
        raise ApplyError(
            f"offload.states: {{kind: {kind}}} does not work beside what this config has under {slot}.",
            evidence=f"{(_ALONE | _OF_RANKS)[slot].capitalize()}.",
            fix=_fix(slot), code="MT315",
        )  # fmt: skip


def apply_packs(context: Context, packs: Packs, boundaries: Where, kind: str) -> None:
    """Move the optimizer and the blocks' parameters to the host, and have `Tuned.step` run pack by pack.

    Raises:
        ApplyError: The ranks' weights differ, another axis is in the way, or what `runtime.order` and `runtime.pack_store` raise.
    """
    require_packs_alone(context, kind)
    if context.ranks > 1:
        require_ranks(context, kind)
    store = PackStore(context, HostOptimizer(context, "native"), late=frozenset(packs.late))
    order = LayerMajor(context, store, packs, boundaries)
    context.order = order
    context.checks["offload.states"] = lambda: store.check() | order.check()


def from_plan(plan: Plan, kind: str, what: str, read: Callable[[Mapping[str, Any]], T]) -> T:
    """What `read` makes of the decisions of `plan`; `what` says what that is.

    Raises:
        ApplyError: There are none, they are damaged, or were made for another model.
    """
    try:
        return read(plan.decisions)
    except (KeyError, TypeError, ValueError) as error:
        raise ApplyError(
            f"offload.states: {{kind: {kind}}} has no {what}.",
            evidence=f"The plan says {plan.decisions or 'nothing'}: {error}.",
            fix="memtune search, which writes them with the config; memtune trial finds them for itself", code="MT364",
        ) from None  # fmt: skip


def planned_packs(plan: Plan, context: Context, kind: str, **settings: Any) -> Packs:
    """The packs that `plan` names.

    Raises:
        ApplyError: There is no plan, or it was made for another number of blocks.
    """
    blocks = len(context.blocks)

    def read(decisions: Mapping[str, Any]) -> Packs:
        packs = packs_of(decisions, **settings)
        if packs.blocks != blocks:
            raise ValueError(f"it was made for {packs.blocks}")
        return packs

    return from_plan(plan, kind, f"packs for {blocks} blocks", read)


def spans_of(plan: Plan) -> tuple[Span, ...]:
    """The blocks that run backward together, in `plan` for one rank or several."""
    return tuple((first, end) for first, end in plan.decisions["spans" if "spans" in plan.decisions else "backward"])


def packs_of(decisions: Mapping[str, Any], **settings: Any) -> Packs:
    """The packs in the decisions of a plan.

    Raises:
        KeyError: There are none.
        TypeError: They are no spans.
        ValueError: They are not those of one chain.
    """
    forward, backward = (tuple((int(first), int(last)) for first, last in decisions[name]) for name in ("forward", "backward"))
    return Packs(forward, backward, late=late_in(decisions), **settings)


def late_in(decisions: Mapping[str, Any]) -> tuple[int, ...]:
    """The blocks that a plan leaves to the next step, none where it says nothing of them.

    Raises:
        TypeError: They are no list.
        ValueError: They are no numbers.
    """
    return tuple(int(each) for each in decisions.get("late", ()))
