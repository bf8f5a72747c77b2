"""Pages of weights that come and go by one schedule of computations and moves (Angel-PTM, Nie et al.
2023).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from memtune.effects import Effects
from memtune.offload.chunks import sweep_in_next_step
from memtune.offload.core import ALIGNMENT
from memtune.offload.parameters import sizes_in_blocks
from memtune.program import Program
from memtune.runtime import Context
from memtune.search_spaces.offload.states._common import (
    EAGER_ONLY,
    OnSsd,
    PagesPlan,
    apply_pages,
    are_rows,
    cannot_run_on_ranks,
    in_pages,
    page_bytes_for,
    page_plan_from,
    page_plan_of,
    solved,
)
from memtune.ssd import offload_dir
from memtune.technique import Exactness, Facts, Plan, Reason, Target, Technique, no_directory
from memtune.units import MIB, format_bytes


class AngelPtm(Technique):
    """Trades pages of weights up the link, beside computation, for the bytes of all blocks' weights but those
    in frames.

    The blocks' parameters lie in pages of one size on the host, each a list of spans, two parameters on a
    page at most. The device holds frames for as many pages as the budget leaves beside the fullest moment of
    the step; a page goes only when another one takes its frame, so a block's weights may be there in part.
    One schedule places computations and moves before training: pages are taken in the order of need, and each
    comes in beside the earliest computation that has a free frame and hides it. Gradients leave as they land,
    so clipping by norm is refused; the user's own optimizer works on the host's pages after backward: the
    bits of a host optimizer with weights in place. What is in no block, as embeddings, stays on the device,
    and so do, with their optimizer state, as many parameters as the budget holds beside frames for all pages.
    With `lock_free` a thread updates when it can and training never waits for it, which is lossy and off by
    default. With `optimizer: ssd` master weights and moments are on SSD, in pieces of a parameter each, and
    stream through the host in the step; with `lock_free` as well they do so in the thread, for which the
    updater was made: 24 bytes per parameter for every update, at most one per step, and host memory for the
    gradients of two steps more than at an even pace. Not in it: activations in pages, gathers on the same
    schedule, frames whose number changes within a step.

    Under `fsdp` or `zero3`, as in the paper, pages hold a rank's rows, which FSDP2 gathers from the frames,
    one block ahead in backward; each rank's host updates its own rows, `lock_free` at times of its own. Among
    replicas (`ddp`) each has all pages on its host, gradients are averaged before they leave, nothing is
    cached, and `lock_free` is refused.

    Distinguishing test: no page holds three parameters and less than a page per parameter is wasted, frames
    hold some pages of a parameter and not the others; no other placement of moves takes less time (brute
    force) and just in time takes more; of what is cached nothing crosses the link; and lock-free weights are
    those of Adam on the gradients in the order of delivery.
    """

    kind: Literal["angel_ptm"] = "angel_ptm"
    slot: ClassVar[str] = "offload.states"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (PagesPlan,)
    title: ClassVar[str] = "Pages of weights on one schedule with computation"
    source: ClassVar[str] = (
        "Nie et al. 2023, Angel-PTM: A Scalable and Economical Large-scale Pre-training System in Tencent,"
        " VLDB 16(12), arXiv:2303.02868, sections 4 and 5"
    )
    exactness: ClassVar[Exactness] = Exactness.REORDERED

    page_mib: Annotated[float, Field(ge=0.001, le=64)] | None = None
    """Size of a page. A smaller one wastes less and fills gaps between computations better, a larger one
    makes better use of the link; useful are 1 to 64. Default: the paper's 4, or where blocks are small an
    eighth of the largest one, a power of two.
    """
    moves: Literal["scheduled", "just_in_time"] = "scheduled"
    """`just_in_time` brings each page in when the block that uses it is called, and waits."""

    device_cache: bool = True
    """What the budget leaves when all pages have a frame holds optimizer state of the parameters that are
    used first, which are updated on the device, by the user's own optimizer; not under `lock_free`, nor with
    the optimizer on SSD.
    """
    lock_free: bool = False
    """The host updates when it can, from the sum of the gradients that have been delivered until then, and
    training goes on with the newest weights that are ready.
    """
    optimizer: Literal["host", "ssd"] = "host"
    """Where master weights and moments are; on SSD they stream through the host while the step, or the thread
    of `lock_free`, updates them, natively.
    """
    ahead: Annotated[int, Field(ge=0, le=64)] = 3
    """Parameters whose state is read ahead from SSD."""
    max_staleness: Annotated[int, Field(ge=1, le=64)] = 4
    """Steps that weights may lack under `lock_free`, before training waits; the paper has no bound."""
    resume: Literal["checkpoint", "last_step"] = "checkpoint"
    """After a crash training goes on from the user's own checkpoint, or from the last complete step, with
    `optimizer: ssd` alone, not under `lock_free`: each piece has two slots there, which takes twice the space
    for the same bytes written, and every step ends with a flush.
    """

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.lock_free and self.effects.keeps_steps:
            raise ValueError(
                "no step is complete while updates go on: set resume: checkpoint, or lock_free: false"
            )
        if self.effects.keeps_steps and self.optimizer == "host":
            raise ValueError(
                "the last step is kept on SSD, where the state must be: set optimizer: ssd, or resume:"
                " checkpoint"
            )
        return self

    @property
    def effects(self) -> Effects:
        """Optimizer state is on the host but for what is cached on the device or on SSD."""
        return Effects(
            averages="blocks",
            calls="block_hooks",
            moves="page",
            eager_only=EAGER_ONLY,
            host_share=0.0 if self._caches or self.optimizer == "ssd" else 1.0,
            keeps_steps=self.resume == "last_step",
        )

    def refuses(self, facts: Facts) -> Reason | None:
        """`lock_free` among replicas."""
        states = facts.chosen.get("sharding.states") if facts.ranks > 1 else None
        if self.lock_free and states is not None and states.effects.shards == "replicas":
            why = "each rank's thread would update at times of its own, and weights of replicas would differ"
            return Reason(why, "lock_free: false, or  sharding: {states: {kind: fsdp}}", "MT364")
        return None

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs blocks that run one after the other and share nothing; several ranks: `fsdp`, or replicas
        without `lock_free`.
        """
        if (reason := self.refuses(Facts.of(program, target))) is not None:
            return reason
        if self._on_ssd is not None and (reason := no_directory(target)) is not None:
            return reason
        return cannot_run_on_ranks(self, program, target, natively=self.lock_free or self._on_ssd is not None)

    def plan(self, program: Program, target: Target) -> PagesPlan:
        """How many frames there are, what is cached, and how many pages come in beside each moment's
        computation.
        """
        page_bytes = page_bytes_for(program.step) if self.page_mib is None else _bytes_of(self.page_mib)
        parts = target.optimizer is None or not target.optimizer.not_one_by_one
        how = {"scheduled": self.moves == "scheduled", "cache": self._caches and parts}
        return page_plan_of(solved(program, target.hardware, target.budget_bytes, page_bytes, **how))

    def rewrite(self, program: Program, plan: PagesPlan, target: Target) -> Program:
        """Pages that come and go, the optimizer on the host or on SSD."""
        found = in_pages(
            program, page_plan_from(sizes_in_blocks(program.step), plan, are_rows(program)), self._on_ssd
        )
        in_host = self.lock_free and self._on_ssd is None
        return found.with_step(sweep_in_next_step(found.step)) if in_host else found

    def apply(self, context: Context, plan: PagesPlan) -> None:
        """Blocks' weights into pages on the host and frames on the device, hooks that bring them in."""
        if self._on_ssd is not None:
            offload_dir.checked()
        apply_pages(context, self.kind, plan, self.max_staleness if self.lock_free else None, self._on_ssd)

    def explain(self, plan: PagesPlan) -> tuple[str, ...]:
        """How many frames of which size."""
        stay = (f"{plan.cached} parameters stay there with their optimizer state",) if plan.cached else ()
        return (f"{plan.frames} frames of {format_bytes(plan.page_bytes)} on the device", *stay)

    def record(self, target: Target) -> dict[str, Any]:
        """Tier of parameters and optimizer, what moves, and when."""
        page = "solved" if self.page_mib is None else _bytes_of(self.page_mib)
        how: dict[str, Any] = {"unit": "page", "page_bytes": page, "moves": self.moves, "cache": self._caches}
        how |= {"max_staleness": self.max_staleness} if self.lock_free else {}
        how |= {"ahead": self.ahead} if self._on_ssd is not None else {}
        how |= {"resume": self.resume} if self.effects.keeps_steps else {}
        trigger = "lock_free" if self.lock_free else "end_of_step"
        return {
            "states.offload": {"parameters": "host", "optimizer": self.optimizer, "trigger": trigger, **how}
        }

    def exactly(self) -> Exactness:
        """Lossy where weights may be some steps old."""
        return Exactness.LOSSY if self.lock_free else Exactness.REORDERED

    @property
    def _on_ssd(self) -> OnSsd | None:
        return (
            OnSsd(self.ahead, self.effects.keeps_steps, self.lock_free) if self.optimizer == "ssd" else None
        )

    @property
    def _caches(self) -> bool:
        return self.device_cache and not self.lock_free and self.optimizer == "host"


def _bytes_of(page_mib: float) -> int:
    return max(int(page_mib * MIB) // ALIGNMENT, 1) * ALIGNMENT
