"""Measuring this machine: real measurements at tiny sizes, kept, found again, and used by predictions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from memtune.autotune.predict import machine_calibration, op_rates
from memtune.errors import EnvironmentFault
from memtune.hardware import calibration_cache
from memtune.hardware.cpu_cores import usable_cores
from memtune.hardware.op_clock import TimedOp
from memtune.hardware.roofline import CLASSES, on_curve, op_costs
from memtune.hardware.spec import Hardware, detect, find, with_measured
from memtune.memory.workspace import WorkspaceTable, op_of
from memtune.program.step import Step


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[calibration_cache.Calibration]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMTUNE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield machine_calibration.calibrate("cpu", tiny=True)


def test_calibrate_measures_every_rate_with_method(found: calibration_cache.Calibration) -> None:
    wanted = {
        "fp32_flops_per_s",
        "bf16_flops_per_s",
        "memory_bytes_per_s",
        "host_to_device_bytes_per_s",
        "host_adam_bytes_per_s",
        "ssd_read_bytes_per_s",
        "ssd_write_bytes_per_s",
        "intra_link_bytes_per_s",
        "intra_link_latency_s",
    }
    assert wanted <= set(found.constants)
    assert all(found.how[name] for name in found.constants)
    assert all(value > 0 for value in found.constants.values())
    assert {"elementwise", "matmul"} <= set(found.curves) <= set(CLASSES)
    assert torch.get_num_threads() >= 1


@pytest.mark.native_ledger
def test_calibrate_fills_workspace_table_of_recordings(
    found: calibration_cache.Calibration,
) -> None:
    table = WorkspaceTable.cached(threads=usable_cores())
    assert any(op_of(key).startswith("aten.") for key in table.nonzero())
    assert found.details["workspace_bytes"] == max(table.nonzero().values())
    assert found.details["workspaces"].startswith(f"{len(table.nonzero())} of {len(table.entries)} ops")


def test_measured_rates_override_table(found: calibration_cache.Calibration) -> None:
    here = detect("cpu")
    assert here.rates_from == f"measured on this machine {found.date}"
    assert here.memory_bytes_per_s == found.constants["memory_bytes_per_s"]
    assert here.sources["memory_bytes_per_s"].startswith("measured on this machine")
    assert here.curves == found.curves
    assert find("h100").rates_from == "table"


def test_calibration_of_other_machine_or_unreadable_is_ignored(
    found: calibration_cache.Calibration, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMTUNE_CACHE", str(tmp_path))
        assert calibration_cache.load("cpu") is None
        path = calibration_cache.save("cpu", found)
        assert calibration_cache.load("cpu") == found
        good = json.loads(path.read_text())
        for broken in (
            "",
            "[]",
            "{}",
            json.dumps({**good, "schema": 99}),
            json.dumps({**good, "machine": "another"}),
            json.dumps({**good, "curves": {"matmul": [[2.0, 1.0], [1.0, 2.0]]}}),
            json.dumps({**good, "constants": {"memory_bytes_per_s": -1}}),
        ):
            path.write_text(broken)
            assert calibration_cache.load("cpu") is None, broken[:40]
        calibration_cache.forget("cpu")
        calibration_cache.forget("cpu")


def test_calibrate_without_cuda_raises_with_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memtune.device.accelerator.device_type", lambda: None)
    with pytest.raises(EnvironmentFault, match="no CUDA device"):
        machine_calibration.calibrate("cuda", tiny=True)


def test_curve_interpolates_and_is_constant_beyond_ends() -> None:
    curve = ((1e-6, 1e-5), (1e-4, 1e-4), (1e-2, 2e-2))
    at = np.array([1e-9, 1e-6, 1e-5, 1e-4, 1e-2, 1.0])
    seconds = on_curve(curve, at)
    assert seconds == pytest.approx([1e-5, 1e-5, 10**-4.5, 1e-4, 2e-2, 2.0])


def test_curves_recover_constant_efficiency() -> None:
    hardware = replace(find("h100"), fp32_flops_per_s=1e12, memory_bytes_per_s=1e12)
    ops = [
        TimedOp("aten.mm.default", "float32", 10.0**k, 1, 2 * 10.0**k / 1e12)
        for k in range(6, 12)
        for _ in range(3)
    ]
    found = op_rates.curves(ops, hardware)
    assert set(found) == {"matmul"}
    assert all(y == pytest.approx(2 * x) for x, y in found["matmul"])


def one_op(name: str, flops: float) -> Step:
    from support.zoo_paths import ZOO

    from memtune.testing.drift_check import recording_of

    step = recording_of(ZOO["tied"]).step
    names = tuple(name for _ in step.names)
    return replace(step, names=names).with_ops(
        flops=np.full(step.ops.n, flops), traffic_bytes=np.zeros(step.ops.n, np.int64)
    )


def test_op_times_follow_measured_curve_of_class() -> None:
    plain: Hardware = replace(detect("cpu"), curves={}, launch_s=1e-5, fp32_flops_per_s=1e11)
    step = one_op("aten.mm.default", 1e6)  # 10 µs at peak
    found = calibration_cache.Calibration(
        "here", "2026-01-01", {}, {}, {"matmul": ((1e-5, 7e-5), (1e-3, 2e-3))}
    )
    here = with_measured(plain, found)
    compute = step.ops.resource == 0
    assert op_costs(step, here).op_s[compute] == pytest.approx(8e-5)
    assert op_costs(step, plain).op_s[compute] == pytest.approx(1e-5 / 0.85 + 1.5e-5)
    assert op_costs(one_op("aten.gelu.default", 0), here).op_s[compute] == pytest.approx(
        1e-5
    )  # no curve: the table
