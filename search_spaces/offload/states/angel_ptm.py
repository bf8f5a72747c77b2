"""Pages of weights on one schedule of computations and copies (Angel-PTM)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from memtune.effects import Effects
from memtune.offload.chunks import sweep_in_next_step
from memtune.offload.core import ALIGNMENT
from memtune.offload.parameters import sizes_in_blocks
from memtune.program import Program
from memtune.runtime import Context
from memtune.search_spaces.offload.states._common.chunk_technique import are_sharded
from memtune.search_spaces.offload.states._common.layer_rules import (
    EAGER_ONLY,
    cannot_run_on_ranks,
    other_gathers,
)
from memtune.search_spaces.offload.states._common.page_technique import (
    OnSsd,
    PagesPlan,
    apply_pages,
    in_pages,
    page_bytes_for,
    page_plan_from,
    page_plan_of,
    solve_pages,
)
from memtune.ssd import offload_dir
from memtune.technique import Exactness, Facts, Plan, Reason, Target, Technique, no_directory
from memtune.units import MIB, format_bytes


class AngelPtm(Technique):
    """Trades H2D copies of pages of weights, overlapped with compute, for the bytes of all blocks' weights
    outside of frames.

    The blocks' parameters lie in pages of one size on the host, each a list of spans of at most two
    parameters. The device holds frames for as many pages as the budget leaves at the peak of the rest of the
    step. A page is evicted only when another one takes its frame, so a block's weights may be resident in
    part. One schedule places computations and copies before training: pages are taken in the order of need,
    and each is loaded during the earliest computation that has a free frame and hides the copy. Gradients are
    offloaded when they are ready, and the user's own optimizer updates the host's
    pages after backward, with the bits of a host optimizer. Parameters in no block, such as embeddings, are
    resident; so are, with their optimizer state, as many parameters as fit next to frames for all pages.

    With `lock_free` a thread updates weights asynchronously and training never waits for it, which is lossy
    and off by default. With `optimizer: ssd` master weights and moments are on SSD, in pieces of a parameter
    each, and stream through the host in the step; with both they stream in the thread: 24 bytes per parameter
    for every update, at most one per step, and host memory for two more steps' gradients. Not implemented:
    activations in pages, gathers on the same schedule, frames whose number changes within a step.

    Under `fsdp` or `zero3`, as in the paper, pages hold a rank's rows, which FSDP2 gathers from the frames,
    one block ahead in backward; each rank's host updates its own rows, with `lock_free` at its own times.
    Replicas (`ddp`) each have all pages on their host and average gradients before the offload, cache no
    parameters, and refuse `lock_free`.
    """

    kind: Literal["angel_ptm"] = "angel_ptm"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (PagesPlan,)
    title: ClassVar[str] = "Pages of weights on one schedule with computation"
    source: ClassVar[str] = (
        "Nie et al. 2023, Angel-PTM: A Scalable and Economical Large-scale Pre-training System in Tencent,"
        " VLDB 16(12), arXiv:2303.02868, sections 4 and 5"
    )
    paper: ClassVar[str] = "Angel-PTM"
    exactness: ClassVar[Exactness] = Exactness.REORDERED

    page_mib: Annotated[float, Field(ge=0.001, le=64)] | None = None
    """Size of a page, usefully 1 to 64. A smaller one wastes less and fills gaps between computations better,
    a larger one uses the link better. Default: the paper's 4, or for small blocks a power of two, an eighth
    of the largest block.
    """
    moves: Literal["scheduled", "just_in_time"] = "scheduled"
    """`just_in_time` loads each page when the block that uses it is called, and waits."""

    device_cache: bool = True
    """If all pages have a frame, the rest of the budget holds optimizer state of the parameters used first,
    which the user's own optimizer updates on the device; not with `lock_free`, nor with the optimizer on SSD.
    """
    lock_free: bool = False
    """The host updates asynchronously from the sum of the gradients delivered so far, and training uses the
    newest weights.
    """
    optimizer: Literal["host", "ssd"] = "host"
    """Tier of master weights and moments; from SSD they stream through the host during the native update."""
    optimizer_prefetch: Annotated[int, Field(ge=0, le=64)] = 3
    """Parameters whose state is prefetched from SSD."""
    max_staleness: Annotated[int, Field(ge=1, le=64)] = 4
    """Staleness in steps at which training waits, with `lock_free`; the paper has no bound."""
    resume: Literal["checkpoint", "last_step"] = "checkpoint"
    """After a crash training resumes from the user's own checkpoint, or from the last complete step. The
    latter needs `optimizer: ssd` and excludes `lock_free`: each piece has two slots on SSD, which takes twice
    the space for the same bytes written, and every step ends with a flush.
    """

    def sentence(self) -> str:
        """Return the setting as one clause."""
        state = "optimizer state on SSD, " if self.optimizer == "ssd" else ""
        delay = ", which may be some steps late" if self.lock_free else ""
        return f"keeps {state}pages of the blocks' weights in host memory and updates on the host{delay}"

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.lock_free and self.effects.keeps_steps:
            raise ValueError(
                "no step is complete while updates continue: set resume: checkpoint, or lock_free: false"
            )
        if self.effects.keeps_steps and self.optimizer == "host":
            raise ValueError(
                "the last step is kept on SSD, so the state must be there: set optimizer: ssd, or resume:"
                " checkpoint"
            )
        return self

    @property
    def effects(self) -> Effects:
        return Effects(
            averages="blocks",
            calls="block_hooks",
            moves="page",
            parameters_on="host",
            eager_only=EAGER_ONLY,
            # The least over all plans: a cache may hold all state on the device, and SSD holds all of it.
            host_share=0.0 if self._caches or self.optimizer == "ssd" else 1.0,
            keeps_steps=self.resume == "last_step",
        )

    def refuses(self, facts: Facts) -> Reason | None:
        return other_gathers(facts)

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require blocks that run one after the other and share no parameter; on several ranks `fsdp`, or
        replicas without `lock_free`.
        """
        if (reason := self.refuses(Facts.of(program, target))) is not None:
            return reason
        if self._on_ssd is not None and (reason := no_directory(target)) is not None:
            return reason
        # Both update in the native kernel, never by the user's own optimizer.
        return cannot_run_on_ranks(self, program, target, natively=self.lock_free or self._on_ssd is not None)

    def plan(self, program: Program, target: Target) -> PagesPlan:
        page_bytes = page_bytes_for(program.step) if self.page_mib is None else _bytes_of(self.page_mib)
        # Cached parameters are updated apart from the others, which an optimizer over all at once cannot do.
        parts = target.optimizer is None or not target.optimizer.not_one_by_one
        options = {"scheduled": self.moves == "scheduled", "cache": self._caches and parts}
        return page_plan_of(solve_pages(program, target.hardware, target.budget_bytes, page_bytes, **options))

    def rewrite(self, program: Program, plan: PagesPlan, target: Target) -> Program:
        """Load and evict pages, with the optimizer on the host or on SSD."""
        found = in_pages(
            program, page_plan_from(sizes_in_blocks(program.step), plan, are_sharded(program)), self._on_ssd
        )
        # On SSD `in_pages` has inserted the thread's sweep already.
        in_host = self.lock_free and self._on_ssd is None
        return found.with_step(sweep_in_next_step(found.step)) if in_host else found

    def apply(self, context: Context, plan: PagesPlan) -> None:
        """Move blocks' weights into pages on the host and frames on the device; add hooks that load them."""
        if self._on_ssd is not None:
            # Before anything moves, so that a missing directory leaves the model as it was.
            offload_dir.checked()
        apply_pages(context, self.kind, plan, self.max_staleness if self.lock_free else None, self._on_ssd)

    def explain(self, plan: PagesPlan) -> tuple[str, ...]:
        cached = (f"{plan.cached} parameters are resident with their optimizer state",) if plan.cached else ()
        return (f"{plan.frames} frames of {format_bytes(plan.page_bytes)} on the device", *cached)

    def record(self, target: Target) -> dict[str, Any]:
        page = "solved" if self.page_mib is None else _bytes_of(self.page_mib)
        knobs: dict[str, Any] = {
            "unit": "page",
            "page_bytes": page,
            "moves": self.moves,
            "cache": self._caches,
        }
        knobs |= {"max_staleness": self.max_staleness} if self.lock_free else {}
        knobs |= {"optimizer_prefetch": self.optimizer_prefetch} if self._on_ssd is not None else {}
        knobs |= {"resume": self.resume} if self.effects.keeps_steps else {}
        trigger = "lock_free" if self.lock_free else "end_of_step"
        return {
            "states.offload": {"parameters": "host", "optimizer": self.optimizer, "trigger": trigger, **knobs}
        }

    def exactly(self) -> Exactness:
        return Exactness.LOSSY if self.lock_free else Exactness.REORDERED

    @property
    def _on_ssd(self) -> OnSsd | None:
        return (
            OnSsd(self.optimizer_prefetch, self.effects.keeps_steps, self.lock_free)
            if self.optimizer == "ssd"
            else None
        )

    @property
    def _caches(self) -> bool:
        return self.device_cache and not self.lock_free and self.optimizer == "host"


def _bytes_of(page_mib: float) -> int:
    return max(int(page_mib * MIB) // ALIGNMENT, 1) * ALIGNMENT
