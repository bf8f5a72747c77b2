"""Compare a translated step's region with the runtime's capture of the model written with CUDA's ops."""

from __future__ import annotations

from pathlib import Path

from memtune.activations.capture.region_capture import capture, shapes_of
from memtune.activations.schedules.region_pass import region_of
from memtune.program.step import Step
from memtune.workload.workload import Workload


def assert_same_graph(step: Step, path: Path) -> None:
    """Check that the model's region of `step` equals a capture of the model in `path`."""
    workload = Workload.load(path)
    model, batch = workload.build_model(), workload.make_batch(2)
    arguments = shapes_of((batch if isinstance(batch, tuple) else (batch,), {}))
    live = capture(model, model.forward, arguments, [], lambda _, tensor: tensor.is_floating_point()).graph
    region = region_of(step)
    assert not isinstance(region, str), region
    ours = region.graph
    for column in ("names", "makes", "reads", "writes"):
        assert getattr(ours, column) == getattr(live, column), column
    assert (ours.n_forward, ours.random, ours.once, ours.sha256) == (
        live.n_forward,
        live.random,
        live.once,
        live.sha256,
    )
