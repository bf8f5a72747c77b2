"""Replicas average gradients of what stays on the device where they are, one by one as they land (`runtime.host_parameters`)."""

from __future__ import annotations

import numpy as np

from memtune.edit import Edit
from memtune.parameters import columns_of
from memtune.passes.stays import Mask
from memtune.passes.stream import Landings
from memtune.program import Phase, Resource, Step


def averaged_there(step: Step, stays: Mask, ranks: int) -> Step:
    """`step` with an average of the gradient of each of the parameters `stays`, in each micro-batch: of the sum up to then.

    Args:
        step: One that `passes.stream.not_in_layers` has nothing to say about.
        stays: (parameters,) parameters of blocks.
        ranks: That have all weights; with one there is nothing to average.
    """
    landings = Landings.of(step)
    mine = np.flatnonzero(stays[landings.parameter])
    if ranks == 1 or not len(mine):
        return step
    edit, after = Edit(step), landings.after[mine]
    ops = edit.add_ops(
        "memtune.all_reduce_.default", after=after, phase=Phase.BACKWARD, resource=Resource.INTRA_LINK,
        traffic_bytes=landings.n_bytes[mine], call=step.op_call[after], group=ranks,
    )  # fmt: skip
    edit.add_uses(ops, columns_of(step.parameters).gradient[landings.parameter[mine]], mutates=True)
    if after[-1] == np.flatnonzero(step.op_phase < Phase.BOUNDARY)[-1]:
        edit.hold_to_the_end_of_backward(int(ops[-1]))
    return edit.done()
