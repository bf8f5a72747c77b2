"""Host seconds of memtune's own mechanisms: constants of `Hardware` that `memtune doctor --calibrate`
measures (`autotune/predict/mechanism_benchmark.py`), and their defaults.

The simulator adds them to the host's time of a step (`autotune/predict/python_work.py`), and a planner to the
seconds of recomputed and moved tensors, so that a finer plan is chosen only where it pays for its hooks.
Defaults are multiples of the time in which the host issues an op, as measured on a 2-core server by
`benchmarks/overhead.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

RECOMPUTED_BLOCK: Final = "recomputed_block_s"
SAVED_TENSOR: Final = "saved_tensor_s"
OBSERVED_OP: Final = "observed_op_s"
MOVED_TENSOR: Final = "moved_tensor_s"
SCHEDULED_CALL: Final = "scheduled_call_s"
SCHEDULED_GRADIENT: Final = "scheduled_gradient_s"
GROUPED_COPY: Final = "grouped_copy_s"

_TIMES_AN_OP: Final[Mapping[str, float]] = {
    RECOMPUTED_BLOCK: 45.0,
    SAVED_TENSOR: 2.0,
    OBSERVED_OP: 1.7,
    MOVED_TENSOR: 20.0,
    SCHEDULED_CALL: 30.0,
    SCHEDULED_GRADIENT: 0.5,
    GROUPED_COPY: 1.0,
}


def defaults(op_s: float) -> dict[str, tuple[Any, str]]:
    """Return value and source of each constant on a host that issues an op in `op_s` seconds."""
    how = "times an op's issue, as a 2-core server showed (benchmarks/overhead.py)"
    return {name: (factor * op_s, f"{factor:g} {how}") for name, factor in _TIMES_AN_OP.items()}
