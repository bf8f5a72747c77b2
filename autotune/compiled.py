"""Recordings of compiled models: the Step comes from AOTAutograd's graphs, with the partitioner's own choice of what is saved.

Nothing is modelled here: Dynamo, AOTAutograd and its partitioner run on the fake model as they do in training, and the recorder
watches the graphs run op by op. So what is recorded for `aot_eager` is what happens. For `inductor` the graphs are those that it
would be given, with its decompositions and its way to partition; that its kernels fuse ops is not modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from memtune.autotune.record import record, why
from memtune.errors import MemtuneError
from memtune.hardware import Device
from memtune.program import Recording
from memtune.runtime.compiled import Compiling
from memtune.runtime.workspace import WorkspaceTable
from memtune.technique import Reason
from memtune.workload import Workload

_MOST_GRAPHS = 64
"""Of one piece of code: micro-batches and recordings beyond Dynamo's own limit of 8 would be eager."""


class CompiledRecordings:
    """A workload's recordings by how it is compiled, each made when it is first asked for.

    Args:
        workload: The user's model, batch, loss and optimizer.
        sizes: Micro-batches that will be used.
        between: As in `record`.
        workspace: Where the scratch of CPU kernels is looked up.
        target: Where the step is to run.
        translate: Makes a recording that of the target's kernels.
    """

    def __init__(
        self,
        workload: Workload,
        sizes: Iterable[int] = (),
        between: Iterable[int] = (),
        workspace: WorkspaceTable | None = None,
        target: Device = "cpu",
        translate: Callable[[Recording], Recording] = lambda recording: recording,
    ) -> None:
        self._record = partial(record, workload, sizes=set(sizes), between=set(between), workspace=workspace, target=target)
        self._workload, self._translate = workload, translate
        self._known: dict[Compiling, Recording | Reason] = {}

    def __call__(self, compiling: Compiling) -> Recording | Reason:
        """The recording under `compiling`, or why the model cannot be compiled so."""
        if compiling not in self._known:
            self._known[compiling] = self._made(compiling)
        return self._known[compiling]

    def _made(self, compiling: Compiling) -> Recording | Reason:
        try:
            with recording_graphs():
                recording = self._record(compiling=compiling)
        except MemtuneError as error:
            return Reason(f"{error.what} {error.evidence}".strip(), "execution.compile: false")
        except Exception as error:  # of Dynamo, AOTAutograd or user code that only they run
            return Reason(f"it cannot be compiled: {why(error, self._workload)}", "execution.compile: false")
        return self._translate(recording)


@contextmanager
def recording_graphs() -> Iterator[None]:
    """Inside, graphs are made of fixed sizes; before and after, Dynamo knows none: it would go on with those of another model."""
    import torch._dynamo

    torch._dynamo.reset()
    settings = {"automatic_dynamic_shapes": False, "recompile_limit": _MOST_GRAPHS}
    try:
        with torch._dynamo.config.patch(settings):
            yield
    finally:
        torch._dynamo.reset()
