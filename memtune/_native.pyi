"""
memtune's native code: free of torch's ABI, over plain arrays of bytes and seconds.
"""

from typing import Annotated

import numpy
from numpy.typing import NDArray


def version() -> str:
    """
    Version of memtune this module was built from; another one than the package's means: build again.
    """

def order_rows(removed: Annotated[NDArray[numpy.bool_], dict(shape=(None,), order='C', device='cpu', writable=False)], anchor: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], after: Annotated[NDArray[numpy.bool_], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> tuple[Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.int32], dict(shape=(None,))]]:
    """
    New order of rows and insertions: (rows that stay, position by row with -1 for removed ones and one more -1, position or that of the last row before, position or that of the next row). ValueError for an anchor outside [-1, rows].
    """

def sort_uses(op: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], storage: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], mutates: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], n_ops: int) -> tuple[Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.uint8], dict(shape=(None,))]]:
    """
    (op, storage, mutates) sorted by op, uses of one op in their order. ValueError for an op outside the step.
    """

class StepColumns:
    """
    The columns of one step with the seconds of its ops, checked once; ValueError names a bad column.
    """

    def __init__(self, op_phase: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], op_resource: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], op_s: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], op_issue_s: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], bytes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], tier: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], kind: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], producer: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], held_until: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], use_op: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], use_storage: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], use_mutates: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], save_storage: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], save_until: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

class Live:
    """Peaks of one step and sums of its resources."""

    @property
    def peak_bytes(self) -> list[int]:
        """By tier."""

    @property
    def peak_op(self) -> list[int]:
        """First op at the peak of each tier, -1 for a step without ops."""

    @property
    def pool_peak_bytes(self) -> list[int]:
        """On the device: of small requests, of large ones."""

    @property
    def bytes_by_kind(self) -> list[int]:
        """
        On the device at its peak, by kind; the last one holds the temporaries that autograd saved.
        """

    @property
    def busy_s(self) -> list[list[float]]:
        """By resource (the last one is the host issuing ops) and phase."""

class Timeline:
    """What came of scheduling one optimizer step."""

    @property
    def step_s(self) -> float: ...

    @property
    def busy_s(self) -> list[float]:
        """By resource; the last one is the host issuing ops."""

    @property
    def exposed_s(self) -> list[float]:
        """By resource: busy while compute is not."""

def live(columns: StepColumns, rounding_bytes: int = 1, small_bytes: int = 0) -> Live:
    """
    Live bytes of a step by tier and kind, and how long it needs each resource.
    """

def schedule(columns: StepColumns, accumulate: int = 1, host_computes: bool = True) -> Timeline:
    """
    When the ops of one optimizer step run: each resource in program order, after what an op depends on.
    """
