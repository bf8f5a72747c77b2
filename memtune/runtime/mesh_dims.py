"""Tensors that several dims of a mesh divide by rows, one inside the other, and the collectives that torch makes of them.

A norm over all of them, and a gather, is one collective per dim. torch says once per mesh that flattening the dims would make it
one; for gathers that would be wrong here: rows that the ranks do not divide evenly lie elsewhere in a flat division (five rows
over two times two ranks are 2, 1, 1, 1 nested and 2, 2, 1, 0 flat), and torch 2.13's flat gather takes them to be there. A norm's
sums are of one number, in one order on all ranks.
"""

from __future__ import annotations

from itertools import combinations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _redistribute


def dim_by_dim(mesh: DeviceMesh) -> None:
    """Tell torch that collectives over several dims of `mesh` go dim by dim on purpose."""
    said: set[tuple[int, tuple[int, ...], str]] | None = getattr(_redistribute, "_warned_flatten_issues", None)
    if said is None:  # torch 2.11 has nothing to say
        return
    for count in range(2, mesh.ndim + 1):
        said.update((hash(mesh), dims, "no_flattened_mesh") for dims in combinations(range(mesh.ndim), count))
