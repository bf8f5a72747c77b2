"""Drift test: a technique's real `apply`, recorded, against its `rewrite` of the plain recording.

On CPU fake tensors are recorded. On an accelerator it is a real step there, against the passes on the
recording that is translated for that device; besides, the peak that its allocator counts.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memtune import hardware
from memtune._replaced import replaced
from memtune.api import apply
from memtune.autotune.predict import AllocatorSettings, event_stream, replay
from memtune.autotune.record import Trace, record, start_session
from memtune.autotune.search import traced_under
from memtune.autotune.translate import translate
from memtune.config import Settings, TunedConfig
from memtune.device import platform_of, streams
from memtune.memory import Ledger
from memtune.offload.optimizer import DeferredUpdates, HostOptimizer
from memtune.program import Kind, Program, RankClass, Recording, Resource, Step, Tier
from memtune.search_spaces import PASS_ORDER
from memtune.search_spaces.execution import Execution
from memtune.technique import Plan, Target, Technique
from memtune.testing.training import SEED, build, config_of, device_under_test, one_step
from memtune.workload import Workload

_LINKS = (
    *(Resource.HOST_TO_DEVICE, Resource.DEVICE_TO_HOST, Resource.INTRA_LINK, Resource.INTER_LINK),
    *(Resource.SSD_READ, Resource.SSD_WRITE),
)


@cache
def recording_of(path: Path, device: str = "cpu") -> Recording:
    """Return the plain recording of the workload in `path` for `device`, cached in this process."""
    if device != "cpu":
        return translate(record(Workload.load(path), target=device), hardware.detect(device))
    return record(Workload.load(path))


def plain_program(path: Path, micro_batch: int = 2, device: str = "cpu") -> Program:
    """Return the workload in `path` as a program of one rank."""
    # Always the same one: planners cache by the step.
    return _plain_program(path, micro_batch, device)


@cache
def _plain_program(path: Path, micro_batch: int, device: str) -> Program:
    return fresh_program(path, micro_batch, device)


def fresh_program(path: Path, micro_batch: int = 2, device: str = "cpu") -> Program:
    """Return a program equal to `plain_program`, for which planners have cached nothing."""
    return Program((RankClass(1, recording_of(path, device).at(micro_batch)),), micro_batch)


@contextmanager
def fresh_programs() -> Iterator[None]:
    """Keep results that planners cache inside and outside apart: inside, a mechanism may be patched."""
    _plain_program.cache_clear()
    try:
        yield
    finally:
        _plain_program.cache_clear()


def target_of(*techniques: Technique, device: str = "cpu") -> Target:
    """Return the target: one rank on this machine's CPU, or on its `device`, with `techniques`."""
    return Target(hardware.detect(device), chosen={each.slot: each for each in techniques})


def in_order(techniques: tuple[Technique, ...]) -> list[Technique]:
    """Return `techniques` in the order of `apply`."""
    return sorted(techniques, key=lambda each: PASS_ORDER.index(each.slot))


def planned(
    path: Path, *techniques: Technique, micro_batch: int = 2, device: str = "cpu"
) -> tuple[Program, dict[str, Plan]]:
    """Return the program under `techniques`, and their plans."""
    program, plans = plain_program(path, micro_batch, device), dict[str, Plan]()
    target = target_of(*techniques, device=device)
    for technique in in_order(techniques):
        plans[technique.slot] = technique.plan(program, target)
        program = technique.rewrite(program, plans[technique.slot], target)
        program.step.validate()
    return program, plans


def rewritten(path: Path, *techniques: Technique, micro_batch: int = 2) -> Step:
    """Return the step that the passes predict."""
    return planned(path, *techniques, micro_batch=micro_batch)[0].step


def recorded(path: Path, *techniques: Technique, micro_batch: int = 2) -> Step:
    """Return the recorded step of the really applied techniques, on the rung of the plain recording."""
    _, plans = planned(path, *techniques, micro_batch=micro_batch)
    return _recorded_with(plans, path, *techniques, micro_batch=micro_batch)


def _recorded_with(plans: dict[str, Plan], path: Path, *techniques: Technique, micro_batch: int) -> Step:
    device = device_under_test()
    is_host = platform_of(device).is_host
    session = start_session(Workload.load(path), recording_of(path).rung if is_host else "real-step", device)
    settings = Settings.of(Execution(), {each.slot: each for each in techniques})
    # Writes into views: autograd replays the views of fake tensors, and those of real ones only if told to.
    views = nullcontext() if is_host else torch.autograd.grad_mode._force_original_view_tracking(True)
    with views, _updates_in_line():
        trace = traced_under(session, TunedConfig(settings=settings, plan=plans), micro_batch)
    assert isinstance(trace, Trace), f"{trace}: against real ranks instead"
    return trace.step


@contextmanager
def _updates_in_line() -> Iterator[None]:
    """Run host updates of real tensors as those of fake ones: without a thread, which no recorder sees, the
    deferred ones in the micro-batch that they overlap with.
    """
    made, run = DeferredUpdates.__init__, HostOptimizer._run_updates

    def starts_in_step(self: DeferredUpdates, blocks: Any, **_: bool) -> None:
        made(self, blocks, is_fake=True)

    def runs_here(self: HostOptimizer, gradients: Any, futures: Any) -> None:
        run(self, gradients, None)

    with (
        replaced(DeferredUpdates, __init__=starts_in_step),
        replaced(HostOptimizer, _run_updates=runs_here),
    ):
        yield


def drift(path: Path, *techniques: Technique, micro_batch: int = 2) -> str:
    """Return the first difference between prediction and recording on the device under test, '' for none."""
    device = device_under_test()
    is_host = platform_of(device).is_host
    program, plans = planned(path, *techniques, micro_batch=micro_batch, device=device.type)
    predicted = program.step
    if not is_host:
        # Temporaries inside a kernel, which no dispatch mode sees: `peak_drift` has them.
        inside = predicted.storages.kind == Kind.WORKSPACE
        predicted = predicted.with_storages(bytes=np.where(inside, 0, predicted.storages.bytes))
    real = _recorded_with(plans, path, *techniques, micro_batch=micro_batch)
    return compare(predicted, real)


def depends_on_data(path: Path) -> bool:
    """Return whether sizes follow computed values (a router's choices), so that each batch has its peak."""
    return recording_of(path).rung == "real-step"


BLOCK_BYTES = 512
"""Granularity of the caching allocators of torch's accelerators."""


def peak_drift(path: Path, technique: Technique) -> str:
    """Return predicted and measured peak of allocated bytes on the device under test if they are more than
    four blocks apart, else ''.
    """
    device = device_under_test()
    program, _ = planned(path, technique, device=device.type)
    predicted = peak_allocated_bytes(program.step, device.type)
    measured = max(_measured_peaks(path, config_of(path, technique, device=device.type), device))
    is_equal = abs(measured - predicted) <= 4 * BLOCK_BYTES
    return "" if is_equal else f"peak of {predicted} bytes, measured {measured}"


def peak_allocated_bytes(step: Step, device: str) -> int:
    """Return the bytes allocated at the peak of steady steps, on an accelerator in its allocator's blocks."""
    if device == "cpu":
        return step.peak_bytes()
    return replay(event_stream(step, 4), AllocatorSettings(), None).step_allocated_bytes[-1]


def _measured_peaks(path: Path, config: Mapping[str, Any], device: torch.device) -> list[int]:
    gc.collect()  # models before are in cycles
    found = []
    with Ledger.open(device) as ledger:
        empty = ledger.live_bytes()
        workload, model, optimizer = build(path, device)
        tuned = apply(model, optimizer, config, strict=False)
        for step in range(4):
            streams.synchronize(device)
            ledger.reset_peak()
            one_step(workload, model, optimizer, tuned, seed=SEED + step, micro_batches=1)
            streams.synchronize(device)
            found.append(ledger.peak_allocated_bytes() - empty)
    return found[2:]  # optimizer state is allocated in the first, its buffers in the second


def compare(predicted: Step, real: Step) -> str:
    """Return the first difference in ops, live bytes of any tier at an op, or link bytes; '' for none."""
    one, other = ([step.names[i] for i in step.ops.name] for step in (predicted, real))
    for op, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return f"op {op} of {len(one)} is {mine}, recorded {theirs}"
    if len(one) != len(other):
        return f"{len(one)} ops, recorded {len(other)}"
    for tier in Tier:
        live, recorded_live = (step.live_bytes(tier) for step in (predicted, real))
        if not np.array_equal(live, recorded_live):
            op = int(np.flatnonzero(live != recorded_live)[0])
            where = f"{tier.name} at op {op} ({one[op]})"
            bytes_text = f"{live[op]} bytes, recorded {recorded_live[op]}"
            return f"{where}: {bytes_text}: {_identity(predicted, real, op)}"
    for link in _LINKS:
        mine_bytes, their_bytes = (
            int(s.ops.traffic_bytes[s.ops.resource == link].sum()) for s in (predicted, real)
        )
        if mine_bytes != their_bytes:
            return f"{mine_bytes} bytes on {link.name}, recorded {their_bytes}"
    return ""


def _identity(predicted: Step, real: Step, op: int) -> str:
    """Describe the storages that only one of the two steps holds at `op`: bytes and producer."""

    def live(step: Step) -> set[tuple[int, int, str]]:
        rows = np.flatnonzero((step.storages.producer <= op) & (step.freed_after >= op))
        return {
            (int(step.storages.bytes[i]), int(step.storages.producer[i]), Kind(step.storages.kind[i]).name)
            for i in rows
        }

    mine, theirs = live(predicted), live(real)
    return f"only predicted {sorted(mine - theirs)[:4]}, only recorded {sorted(theirs - mine)[:4]}"
