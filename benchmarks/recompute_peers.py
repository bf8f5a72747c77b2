"""torch's own activation techniques, recorded as they run: the rows that `recompute_budget.py` compares with
`planned`.

torch's `checkpoint` wraps every block of the live model, and a step is recorded on fake tensors, so peak and
recompute are torch's own and no pass of memtune is involved.

- `torch full`: `checkpoint(use_reentrant=False)`.
- `torch selective`: with `create_selective_checkpoint_contexts`, saving outputs of matrix products,
convolutions and attention.
- `torch auto-SAC`: the integer program of `torch.distributed._tools.sac_ilp` for one module: save the block's
ops whose recompute takes longest, within a share of the bytes that all its ops make; random ops all or none,
in-place ops with their targets. torch solves it with pulp over the roofline times of `SACEstimator`; here
scipy solves it over memtune's op times, since pulp is no dependency and the estimator's times are those of
GPUs. All blocks get the same share.
- `torch memory_budget`: the min-cut partitioner of AOTAutograd under `activation_memory_budget`, over
compiled blocks; recorded from its graphs as `aot_eager` runs them, op by op.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from memtune.autotune.record.compiled import CompiledRecordings
from memtune.autotune.record.recorder import step_of
from memtune.autotune.record.recording_session import Trace, start_session
from memtune.compile.regions import Compiling
from memtune.hardware.roofline import op_costs
from memtune.hardware.spec import Hardware
from memtune.memory.workspace import WorkspaceTable
from memtune.program.op_addresses import OpAddress, calls_of
from memtune.program.step import Step
from memtune.search_spaces.recompute._block_planner.call_selection import Block, block_graphs
from memtune.search_spaces.recompute._block_planner.fits import is_matmul_or_attention
from memtune.search_spaces.recompute.memory_budget import MemoryBudget
from memtune.technique import Reason
from memtune.workload.workload import Workload

PARTS = (0.2, 0.4, 0.6, 0.8)
"""Of the bytes that a block's ops make, saved by auto-SAC."""

BUDGETS = (0.75, 0.5, 0.25, 0.0)
"""Shares of what compiled graphs save anyway, given to the partitioner."""

Saves = Callable[[OpAddress], bool]


def torch_steps(
    workload: Workload, rung: str, plain: Step, hardware: Hardware, batch: int
) -> Iterator[tuple[str, Step]]:
    """Return the recorded step of each peer by name; `plain` is the step without any."""
    recorded = partial(_recorded, workload, rung, batch)
    blocks = block_graphs(plain)
    yield "torch full", recorded([None] * len(blocks))
    yield "torch selective", recorded([_by_name] * len(blocks))
    op_s = op_costs(plain, hardware).op_s
    for part in PARTS:
        yield (
            f"torch auto-SAC({part})",
            recorded([auto_sac(plain, block, op_s, part).__contains__ for block in blocks]),
        )


def compiled_steps(workload: Workload, batch: int) -> Iterator[tuple[str, Step]]:
    """Return the recorded step under each of the partitioner's budgets; empty if the blocks cannot be
    compiled.
    """
    recordings = CompiledRecordings(workload, sizes={batch}, workspace=WorkspaceTable.cached(threads=1))
    for budget in BUDGETS:
        partitioning = MemoryBudget(budget=budget).partitioning()
        found = recordings(Compiling("blocks", "aot_eager", tuple(sorted(partitioning.items()))))
        if isinstance(found, Reason):
            print(f"torch memory_budget({budget}): {found}", file=sys.stderr)
            return
        yield f"torch memory_budget({budget})", found.at(batch)


def _by_name(call: OpAddress) -> bool:
    return is_matmul_or_attention(call[0])


def _recorded(workload: Workload, rung: str, batch: int, saves: list[Saves | None]) -> Step:
    session = start_session(workload, rung)
    for name, keeps in zip(session.blocks, saves, strict=True):
        block = session.model.get_submodule(name)
        more: dict[str, Any] = {} if keeps is None else {"context_fn": partial(_contexts, keeps)}
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **more)
    session.warm_up(batch)
    trace = session.traced(batch)
    assert isinstance(trace, Trace), trace
    return step_of(trace, WorkspaceTable.cached(threads=1))


def _contexts(saves: Saves) -> Any:
    """Return the contexts of one run of a region; ops are identified by name and by the count of that name so
    far.
    """
    seen: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(op)
        call = name, seen[context.is_recompute][name]
        seen[context.is_recompute][name] += 1
        return CheckpointPolicy.MUST_SAVE if saves(call) else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def auto_sac(step: Step, block: Block, op_s: Any, part: float) -> frozenset[OpAddress]:
    """Return the calls of `block` whose outputs are saved, within `part` of the bytes that its ops make."""
    ops = np.asarray([op for op in block.ops if block.makes[op]], np.int32)
    call_of = {op: call for op, _, call in calls_of(step, np.asarray(block.ops, np.int32))}
    n_bytes = np.asarray([step.storages.bytes[block.makes[op]].sum() for op in ops], float)
    random = np.flatnonzero(step.ops.rng[ops])
    together = [np.eye(len(ops))[a] - np.eye(len(ops))[b] for a, b in pairwise(random)]
    written = [not block.spoiled.isdisjoint({op}) for op in ops.tolist()]
    rows = [LinearConstraint(n_bytes[None], -np.inf, part * n_bytes.sum())]
    rows += [LinearConstraint(np.stack(together), 0, 0)] if together else []
    found = milp(
        -op_s[ops] - 1e-12,
        constraints=rows,
        integrality=np.ones(len(ops)),
        bounds=Bounds(0, np.where(written, 0, 1)),
        options={"time_limit": 10, "mip_rel_gap": 0.05},
    )
    return frozenset(call_of[op] for op, chosen in zip(ops.tolist(), found.x, strict=True) if chosen > 0.5)
