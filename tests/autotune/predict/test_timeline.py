"""Timelines of simulated steps agree with the predictions of the same simulation."""

from __future__ import annotations

import pytest
from support.search import prepared_search

from memtune.autotune.predict import step_timeline
from memtune.autotune.predict.python_work import PythonWork
from memtune.autotune.predict.simulation import simulate
from memtune.autotune.space.candidates import Choice

SETTINGS = [
    {},
    {"offload": {"activations": {"kind": "copy_out", "ratio": 0.7}}},
    {"recompute": {"kind": "full"}, "offload": {"states": {"kind": "optimizer_cpu"}}},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "copy_out", "full and optimizer_cpu"])
def test_timeline_has_the_peak_the_end_and_the_busy_times_of_the_prediction(settings):
    rewriter = prepared_search.rewriter()
    choice = Choice.from_document({"execution": {"micro_batch": 2}, **settings})
    program = rewriter.candidate(choice).program
    hardware = rewriter.target.hardware
    predicted = simulate(program, hardware, level="events")
    found = step_timeline(program, hardware, PythonWork())
    rounding = hardware.allocation_rounding_bytes * program.step.storages.n
    assert (
        predicted.peak_allocated_bytes - rounding <= found.device.peak_bytes <= predicted.peak_allocated_bytes
    )
    assert found.device.time_s == sorted(found.device.time_s)
    spans = [span for each in found.streams.values() for span in each]
    assert max(stop for _, _, stop in spans) <= predicted.step_s * 1.000001
    for name, seconds in predicted.busy_s.items():
        if name == "host_issue":
            continue
        ran = sum(stop - start for _, start, stop in found.streams[name])
        assert ran >= seconds * 0.99
        assert all(
            a[2] <= b[1] + 1e-12 for a, b in zip(found.streams[name], found.streams[name][1:], strict=False)
        )
    phases = [phase for phase, _, _ in found.streams["compute"]]
    assert phases[0] == "forward"
    assert (found.host.peak_bytes > 2**12) == ("offload" in settings)
    assert phases[-1] == ("optimizer" if "offload" not in settings else phases[-1])
