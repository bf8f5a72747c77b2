"""Pass that adds the temporaries of `compression` where plain torch converts: on devices without Triton."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from memtune.program import Compression, Edit, Kind, Step


def add_plain_scratch(
    step: Step, hop: Compression, scratch_bytes: Callable[[int, int, Compression], tuple[int, int]]
) -> Step:
    """Return `step` with a workspace for each op that packs or unpacks by `hop`.

    Args:
        step: After `activation_offload_pass`.
        hop: Of all its compressed storages.
        scratch_bytes: `compression.plain_scratch_bytes`, which needs torch.
    """
    storages, uses = step.storages, step.uses
    name_of = np.asarray([step.names[i] for i in step.ops.name])
    in_pack, in_unpack = (name_of[uses.op] == name for name in (hop.pack, hop.unpack))
    source_of = dict(zip(uses.op[in_pack].tolist(), uses.storage[in_pack].tolist(), strict=True))
    ops, n_bytes = list[int](), list[int]()
    for column, mine in enumerate((in_pack, in_unpack)):
        for op, read in zip(uses.op[mine].tolist(), uses.storage[mine].tolist(), strict=True):
            # A packed storage has no type: that of the one which its pack read.
            source = source_of[op if column == 0 else int(storages.producer[read])]
            width = int(storages.float_bytes[source])
            ops.append(op)
            n_bytes.append(scratch_bytes(int(storages.bytes[source]) // width, width, hop)[column])
    edit = Edit(step)
    edit.add_storages(np.asarray(n_bytes, np.int64), producer=np.asarray(ops, np.int32), kind=Kind.WORKSPACE)
    return edit.done()
