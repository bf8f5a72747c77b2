"""`pytest --on-device DEVICE` runs suites of techniques and tests marked `any_device`, on an accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

CHECKS = (
    "test_trains_as_the_plain_model",
    "test_rewrite_equals_the_recording_of_apply",
    "test_failed_apply_leaves_no_trace",
    "test_audit_finds_technique_not_in_effect",
    "test_suite_fails_under",
    "test_five_steps_are_bitwise_equal_to_update_in_place",
)
"""Tests of a suite that use a device."""
NOT_PREDICTED = {
    "listed": (
        "the optimizer's state of placeholders, for experts that get tokens, and their norms are not counted:"
        " 12 values of 4 bytes and one of 228, which are 3 % in blocks"
    ),
}
"""Models whose peaks there are others, and the reason."""
NOTHING_RECOMPUTED = ("test_planned.py",)
"""Planners that recompute nothing of `gpt` there, where the optimizer's step has the peak: defects that only
this model shows do not show.
"""
NOTHING_DRAWN_AGAIN = ("test_balanced.py", "test_checkmate.py", "test_dtr.py", "test_lohan.py")
"""Planners that recompute no random draw of it there."""
OTHER_TESTS = {
    "allocator": "installed before the device starts: test_other_allocators.py",
    "test_pipeline.py": "has loops of its own on the CPU: test_techniques.py",
}
"""Suites that others run on the device."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--on-device",
        metavar="DEVICE",
        help="run suites of techniques and tests marked any_device alone, on this device type (sim)",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave what trains."""
    if config.getoption("--on-device") is None:
        return
    left = [item for item in items if _trains(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in left])
    items[:] = left


def _trains(item: Any) -> bool:
    from memtune.testing import TechniqueSuite

    if item.get_closest_marker("any_device"):
        return True
    if not (isinstance(item, pytest.Function) and item.cls and issubclass(item.cls, TechniqueSuite)):
        return False
    values, parts = item.callspec.params if hasattr(item, "callspec") else {}, item.path.parts
    is_of_drift = "mutation" in values and values["mutation"].shown_by == "drift"
    is_of_drift = is_of_drift or item.originalname == "test_rewrite_equals_the_recording_of_apply"
    if not OTHER_TESTS.keys().isdisjoint(parts):
        return False
    if is_of_drift and values.get("model") in NOT_PREDICTED:
        return False
    if "mutation" in values and values["mutation"].needs == "gpt" and item.path.name in NOTHING_RECOMPUTED:
        return False
    is_of_draws = "mutation" in values and values["mutation"].name == "the random state is not restored"
    if is_of_draws and item.path.name in NOTHING_DRAWN_AGAIN:
        return False
    return item.originalname in CHECKS


@pytest.fixture(autouse=True)
def _on_accelerator(request: pytest.FixtureRequest) -> Iterator[None]:
    name = request.config.getoption("--on-device")
    if name is None:
        yield
        return
    import gc

    import torch

    from memtune.testing import on_device

    if name == "sim":
        from support.simulated_device import races, start
        from support.simulated_ranks import CAPACITY_BYTES

        start(2, CAPACITY_BYTES)
        races()
    # Where there are two, not the current one: all that memtune does must find that of the model.
    here = torch.device(name, torch.accelerator.device_count() - 1)
    with on_device(here):
        yield
    torch.accelerator.synchronize(here)
    if name == "sim":
        assert races() == []
    gc.collect()  # a model in cycles keeps its memory on the device
