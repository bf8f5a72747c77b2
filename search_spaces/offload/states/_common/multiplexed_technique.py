"""Rules, pass and apply of techniques that run stages of blocks on several ranks by rotation.

The runtime is in `offload.multiplexed.multiplexed_stages`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Field, model_validator

from memtune import refusals
from memtune.errors import ApplyError
from memtune.hardware import Hardware, op_costs
from memtune.offload.layer_major import BoundaryTier, Span, StageLayout, parts_of
from memtune.offload.multiplexed import BlockBytes, BlockCosts, Partitions, cross_mapping, multiplexed_steps
from memtune.offload.optimizer import Native, optimizer_on_host
from memtune.parallel.pipeline import Chain, chain_of
from memtune.program import (
    F64,
    Program,
    RankClass,
    Resource,
    Step,
    accumulate_gradients,
    idle_share,
    memoized,
)
from memtune.runtime import Context
from memtune.search_spaces.offload.states._common.block_sizes import block_bytes
from memtune.search_spaces.offload.states._common.pack_technique import cannot_run_packs, within_budget
from memtune.technique import Plan, Reason, Target, Technique
from memtune.units import format_bytes
from memtune.workload import require_structures


def cannot_run_stages(
    technique: Technique, program: Program, target: Target, count: int | None
) -> Reason | None:
    """Return why blocks cannot be divided into stages (`count`, None: any number) over the ranks."""
    if (reason := cannot_run_packs(technique, program, target, alone=False)) is not None:
        return reason
    if count is not None and count % target.ranks:
        return Reason(f"{count} stages are no multiple of {target.ranks} ranks", "a multiple of the ranks")
    step, least = program.step, count or target.ranks
    if len(step.blocks) < least:
        return refusals.few_blocks_for_stages(len(step.blocks), least, "fewer ranks")
    chain = chain_of(step)
    if isinstance(chain, str):
        return refusals.no_chain(chain, "offload: {states: {kind: optimizer_cpu}}")
    if len(chain.cuts) < least - 1:
        return Reason(
            f"the blocks can be cut in {len(chain.cuts)} places for {least} stages: {chain.obstacle}",
            "fewer ranks",
        )
    return None


def partitions(
    program: Program, hardware: Hardware, *, prefetch: bool, crossed: bool, boundaries: BoundaryTier = "host"
) -> Partitions:
    """Return all partitions of the blocks into stages on the ranks of `program`."""
    sizes, ranks, chain = block_bytes(program.step), program.ranks, chain_in(program)
    count = program.accumulate * ranks
    # With one rank per root no mapping has less contention than the plain order.
    per_root = hardware.gpus_per_pcie_root if crossed else 1
    return Partitions(
        costs_of(program.step, hardware),
        BlockBytes(sizes.weights, sizes.gradients, sizes.saved),
        chain.cuts,
        count,
        lambda stages: cross_mapping(stages, ranks, per_root),
        prefetch,
        # A stage's inputs are kept for backward, of all micro-batches at once.
        count * chain.passed_bytes * (boundaries == "device"),
    )


def chain_in(program: Program) -> Chain:
    """Return the chain of the blocks of `program`, which `cannot_run_stages` has accepted."""
    chain = chain_of(program.step)
    assert isinstance(chain, Chain), "fits refuses others"
    return chain


@memoized
def costs_of(step: Step, hardware: Hardware) -> BlockCosts:
    """Return the costs of each block in one micro-batch."""
    sizes, seconds, parts = block_bytes(step), op_costs(step, hardware).op_s, parts_of(step)
    forward, backward = (
        [float(np.sum(seconds[rows])) for rows in blocks] for blocks in (parts.forward, parts.backward)
    )
    chain = chain_of(step)
    assert isinstance(chain, Chain), "fits refuses others"
    up, down = hardware.host_to_device_bytes_per_s, hardware.device_to_host_bytes_per_s
    load = [n_bytes / up for n_bytes in sizes.weights]
    # Activations between ranks pass through the hosts: down from one device, up to the other.
    return BlockCosts(forward, backward, load, chain.passed_bytes / down + chain.passed_bytes / up)


@memoized
def on_ranks(
    program: Program, layout: StageLayout, hardware: Hardware, boundaries: BoundaryTier = "host"
) -> Program:
    """Return the step of each rank with all micro-batches of all ranks, the rank of highest peak first."""
    ranks, count = program.ranks, program.accumulate * program.ranks
    steps = _rank_steps(program, layout, hardware, boundaries)
    classes = [RankClass(1, each, (rank,)) for rank, each in enumerate(steps)]
    # The first class is the one that `Program.step` shows.
    classes.sort(key=lambda each: each.step.peak_bytes(), reverse=True)
    idle = idle_share(ranks, len(layout.stages) // ranks, count)
    return Program(
        tuple(classes), program.micro_batch, 1, program.notes, sharers=ranks, unrolled=count, idle=idle
    )


@memoized
def _rank_steps(
    program: Program, layout: StageLayout, hardware: Hardware, boundaries: BoundaryTier
) -> tuple[Step, ...]:
    """Return the step of each rank."""
    # A stage sees the micro-batches of all ranks, so gradients are sums even where each rank has only one.
    step = program.step if program.accumulate > 1 else accumulate_gradients(program.step)
    ranks, count = program.ranks, program.accumulate * program.ranks
    link = Resource.INTER_LINK if hardware.local_ranks(ranks) == 1 else Resource.INTRA_LINK
    return tuple(
        optimizer_on_host(each, Native()) for each in multiplexed_steps(step, layout, count, link, boundaries)
    )


def solve_within(
    program: Program,
    hardware: Hardware,
    budget_bytes: int | None,
    boundaries: BoundaryTier,
    solve: Callable[[F64], StageLayout | None],
    all_of_them: Partitions,
) -> StageLayout | None:
    """Return the layout of `solve` whose passes keep every rank within the budget; None if there is none."""
    if budget_bytes is None:
        return solve(np.full(program.ranks, np.inf))

    def peaks(layout: StageLayout) -> F64:
        return np.array(
            [float(each.peak_bytes()) for each in _rank_steps(program, layout, hardware, boundaries)]
        )

    return within_budget(solve, all_of_them.needed, peaks, budget_bytes, program.ranks)


class StagesPlan(Plan):
    """Stages of neighbouring blocks, distributed over several ranks."""

    outputs: tuple[str, ...] = ()
    """(blocks,) structure of each block's output (`memtune.workload.output_structure`); none if every block
    returns a tensor.
    """
    spans: tuple[Span, ...]
    """(stages,) first block of each stage, and the one after its last."""
    ranks: tuple[Annotated[int, Field(ge=0)], ...]
    """(stages,) rank that holds each stage."""
    first: tuple[str, ...]
    """Parameters that are used before the first block."""
    last: tuple[str, ...]
    """Parameters that are used after the last block."""
    moved_bytes: Annotated[int, Field(ge=0)]
    """Bytes of weights reloaded and gradients offloaded per step, over all ranks."""

    @model_validator(mode="after")
    def _is_a_chain(self) -> Self:
        self.layout()
        require_structures(self.outputs, self.spans[-1][1])
        return self

    def layout(self, **settings: Any) -> StageLayout:
        """Return the stages on their ranks, with other `settings` of `StageLayout`."""
        return StageLayout(self.spans, self.ranks, **settings)

    def explain(self) -> tuple[str, ...]:
        """Return the number of stages and ranks, and the bytes per step."""
        places = ", ".join(map(str, self.ranks[: len(set(self.ranks))]))
        return (
            f"{len(self.ranks)} stages, round-robin on ranks {places}, over all micro-batches of all ranks",
            f"{format_bytes(self.moved_bytes)} of weights and gradients copied per step, over all ranks",
        )


def stages_plan_fields(program: Program, layout: StageLayout) -> dict[str, Any]:
    """Return the fields of a `StagesPlan` for `layout`."""
    chain, sizes = chain_in(program), block_bytes(program.step)
    return {
        "outputs": chain.outputs,
        "spans": layout.stages,
        "ranks": layout.ranks,
        "first": chain.first,
        "last": chain.last,
        "moved_bytes": moved_bytes(layout, sizes.weights, sizes.gradients),
    }


def moved_bytes(layout: StageLayout, weights: Sequence[int], gradients: Sequence[int]) -> int:
    """Return the bytes of weights loaded and gradients offloaded in one step, over all ranks.

    2|W| + |gradients|, less the last stage of each rank, which is resident between its forward and its
    backward.
    """
    resident = [layout.stages_of(rank)[-1] for rank in set(layout.ranks)]
    return (
        2 * sum(weights)
        + sum(gradients)
        - sum(sum(weights[slice(*layout.stages[stage])]) for stage in resident)
    )


def apply_stages(
    context: Context, plan: Plan, kind: str, *, prefetch: bool, boundaries: BoundaryTier = "host"
) -> None:
    """Keep only this rank's stages, on its host, and have `Tuned.step` run them.

    Raises:
        ApplyError: The plan is for one rank, or for another model, or as
            `offload.multiplexed.multiplexed_stages` raises.
    """
    from memtune.offload.multiplexed import apply_multiplexed_stages

    if not isinstance(plan, StagesPlan):
        raise wrong_ranks_error(context, kind)
    layout = plan.layout(prefetch=prefetch)
    apply_multiplexed_stages(
        context, layout, frozenset(plan.first), frozenset(plan.last), kind, boundaries, plan.outputs
    )


def wrong_ranks_error(context: Context, kind: str) -> ApplyError:
    """Return the error for a plan that is for one rank if there are several, or the other way round."""
    many = context.placement.world_size > 1
    return refusals.plan_of_other_model(
        f"offload.states: {{kind: {kind}}}", f"It was made for {'one rank' if many else 'several ranks'}."
    )
