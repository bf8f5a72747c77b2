"""Which stages the host leaves to the next step's forward, where stages come and go whole
(`memtune.offload.core.deferred_updates_plan`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from memtune.hardware import Hardware
from memtune.offload.core import BlockTimes, deferred_blocks
from memtune.offload.layer_major import Span
from memtune.offload.parameters import native_update_bytes
from memtune.program import Program, Step, columns_of, remembered
from memtune.search_spaces.offload.states._common.pack_technique import block_bytes
from memtune.technique import Reason

_SHARES = (0.25, 0.33, 0.5, 0.67)
F64 = npt.NDArray[np.float64]


def no_such_block(late: Sequence[int] | None, program: Program) -> Reason | None:
    """Why the blocks of `program` cannot be updated as late as that."""
    if late and max(late) >= len(program.step.blocks):
        return Reason(
            f"there is no block {max(late)} to update late, blocks count from 0", "no late, to have it solved"
        )
    return None


def late_in_stages(
    program: Program,
    hardware: Hardware,
    stages: Sequence[Span],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
) -> tuple[int, ...]:
    """The blocks whose updates the host does not come to in a rank's backward, where it takes `stages` one
    after the other.

    Args:
        program: Before the rewrite; of one rank, or of ranks that load, send down and update at the same
            time.
        hardware: Its links and host.
        stages: Of the rank, in forward order.
        forward_s: Of each block, all micro-batches of the step.
        backward_s: The same; the forward before it not counted.
    """
    sizes, local = block_bytes(program.step), hardware.local_ranks(program.ranks)
    sharing = min(local, hardware.gpus_per_pcie_root) if hardware.device == "cuda" else 1
    forward, backward = (_of_stages(each, stages) for each in (forward_s, backward_s))
    up, down = sharing / hardware.host_to_device_bytes_per_s, sharing / hardware.device_to_host_bytes_per_s
    times = BlockTimes(
        forward_s=forward.tolist(),
        backward_s=(forward + backward).tolist(),
        outside_s=0.0,
        load_s=(_of_stages(sizes.weights, stages) * up).tolist(),
        down_s=(_of_stages(sizes.gradients, stages) * down).tolist(),
        update_s=_of_stages(_update_s(program.step, hardware) * local, stages).tolist(),
    )
    late = deferred_blocks(times, _SHARES)
    return tuple(block for stage in sorted(late) for block in range(*stages[stage]))


def _of_stages(column: Sequence[float] | F64, stages: Sequence[Span]) -> F64:
    return np.array([sum(column[first:end]) for first, end in stages], np.float64)


@remembered
def _update_s(step: Step, hardware: Hardware) -> F64:
    """(blocks,) seconds that the whole host takes for each block."""
    columns = columns_of(step.parameters)
    mine = (columns.block >= 0) & (columns.gradient >= 0)
    found: F64 = (
        np.bincount(columns.block[mine], native_update_bytes(step)[mine], len(step.blocks))
        / hardware.host_adam_bytes_per_s
    )
    return found
