"""Stages whose updates are deferred to the next step's forward, if stages are loaded and freed as a whole.

`memtune.offload.core.deferred_updates_plan` has the rule.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from memtune.hardware import Hardware
from memtune.offload.core import BlockTimes, deferred_blocks
from memtune.offload.layer_major import Span
from memtune.offload.parameters import native_update_bytes
from memtune.program import Program, Step, columns_of, memoized
from memtune.search_spaces.offload.states._common.block_sizes import block_bytes

_SHARES = (0.25, 0.33, 0.5, 0.67)
"""Shares of the stages to defer, evenly spread, that are tried as well."""
F64 = npt.NDArray[np.float64]


def deferred_in_stages(
    program: Program,
    hardware: Hardware,
    stages: Sequence[Span],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
) -> tuple[int, ...]:
    """Return the blocks whose updates the host cannot finish in a rank's backward, which runs `stages` one by
    one.

    Args:
        program: The program before the rewrite, of one rank or of ranks that load, offload and update at the
            same time.
        hardware: Hardware with its links and host.
        stages: Stages of the rank, in forward order.
        forward_s: Seconds of each block, of all micro-batches of the step.
        backward_s: The same for backward, without the forward that recomputes it.
    """
    sizes, local = block_bytes(program.step), hardware.local_ranks(program.ranks)
    sharing = min(local, hardware.gpus_per_pcie_root) if hardware.device != "cpu" else 1
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
    deferred = deferred_blocks(times, _SHARES)
    return tuple(block for stage in sorted(deferred) for block in range(*stages[stage]))


def _of_stages(column: Sequence[float] | F64, stages: Sequence[Span]) -> F64:
    return np.array([sum(column[first:end]) for first, end in stages], np.float64)


@memoized
def _update_s(step: Step, hardware: Hardware) -> F64:
    """Return (blocks,) seconds of the host's update of each block, with all host cores."""
    columns = columns_of(step.parameters)
    mine = (columns.block >= 0) & (columns.gradient >= 0)
    found: F64 = (
        np.bincount(columns.block[mine], native_update_bytes(step)[mine], len(step.blocks))
        / hardware.host_adam_bytes_per_s
    )
    return found
