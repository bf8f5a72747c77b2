"""Recordings of compiled models.

The Step of AOTAutograd's graphs, with the partitioner's choice of saved tensors.

Nothing is modelled: Dynamo, AOTAutograd and its partitioner run on the fake model as in training, and the
recorder observes the graphs op by op. A recording for `aot_eager` is exact. For `inductor`, the graphs are
those that it would receive, with its decompositions and partitioner; for a GPU, chains of generated ops are
fused (`translate/inductor_fusion.py`), for CPU they are counted as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from memtune.autotune.record.recorder import record
from memtune.autotune.record.recording_session import Session, error_line
from memtune.autotune.translate import fused
from memtune.compile import Compiling
from memtune.errors import MemtuneError
from memtune.program import Recording
from memtune.technique import Reason
from memtune.workload import Workload

_MOST_GRAPHS = 64
"""Dynamo's cache limit per code object: its default of 8 falls back to eager after some micro-batches."""


class CompiledRecordings:
    """Recordings of a workload by compile setting, each made when first needed.

    Args:
        workload: The user's model, batch, loss and optimizer.
        translate: Translates a recording to the target's kernels.
        **how: The other arguments of `record`.
    """

    def __init__(
        self,
        workload: Workload,
        translate: Callable[[Recording], Recording] = lambda recording: recording,
        **how: Any,
    ) -> None:
        self._record = partial(record, workload, **how)
        self._workload, self._translate, self._target = workload, translate, how.get("target", "cpu")
        self._known: dict[Compiling, Recording | Reason] = {}

    def __call__(self, compiling: Compiling) -> Recording | Reason:
        """Return the recording under `compiling`, or why the model cannot be compiled so."""
        if compiling not in self._known:
            self._known[compiling] = self.attempt(compiling)
        return self._known[compiling]

    def attempt(
        self, compiling: Compiling | None, change: Callable[[Session], None] | None = None
    ) -> Recording | Reason:
        """Return the recording of the model under `compiling` after `change`, or why there is none."""
        try:
            with recording_graphs() if compiling else nullcontext():
                recording = self._record(compiling=compiling, change=change)
        except MemtuneError as error:
            return Reason(f"{error.what} {error.evidence}".strip(), _fix(compiling))
        except Exception as error:  # of Dynamo, AOTAutograd or user code that only they run
            return Reason(
                f"it cannot be {'compiled' if compiling else 'run'}: {error_line(error, self._workload)}",
                _fix(compiling),
            )
        translated = self._translate(recording)
        if self._target != "cpu" and compiling and compiling.backend == "inductor":
            return fused(translated, whole_model=compiling.scope == "model")
        return translated


def _fix(compiling: Compiling | None) -> str:
    return "execution.compile: false" if compiling else "leave param_dtype out"


@contextmanager
def recording_graphs() -> Iterator[None]:
    """Compile graphs for fixed sizes, with Dynamo's caches cleared before and after.

    It would reuse another model's.
    """
    import torch._dynamo

    torch._dynamo.reset()
    settings = {"automatic_dynamic_shapes": False, "recompile_limit": _MOST_GRAPHS}
    try:
        with torch._dynamo.config.patch(settings):
            yield
    finally:
        torch._dynamo.reset()
