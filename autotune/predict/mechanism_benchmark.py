"""Measure what memtune's own mechanisms cost the host (`memtune/hardware/mechanism_costs.py`).

Small blocks are trained plainly and under each mechanism, in rotation on one thread. Two block sizes separate
the cost of a block from that of each saved tensor and op.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from memtune.activations.capture import capture, shapes_of
from memtune.activations.recompute import ActivationTable
from memtune.activations.schedules import ScheduledRegion
from memtune.device import streams
from memtune.hardware import mechanism_costs
from memtune.program import plain_schedule
from memtune.runtime import autocast_now, copy_to_device_together, to_host_together, transfer

_WIDTH, _BLOCKS, _SIZES, _COPIES = 16, 4, (2, 10), 64
_LEAST_S = 1e-9
"""A cost that is lost in the noise, or negative since a mechanism saves the host time, counts as this."""


class _Block(nn.Module):
    def __init__(self, pairs: int) -> None:
        super().__init__()
        layers = (each for _ in range(pairs) for each in (nn.Linear(_WIDTH, _WIDTH), nn.Tanh()))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Times:
    """Seconds of a step of all blocks by way, and of one forward of them."""

    plain_s: float
    forward_s: float
    full_s: float
    observed_s: float
    moved_s: float
    scheduled_s: float


def measured_costs(device: torch.device, rounds: int = 25) -> dict[str, float]:
    """Return the constants of `mechanism_costs` by name, in seconds of the host."""
    small, large = (_times(pairs, device, rounds) for pairs in _SIZES)
    few, many = _SIZES
    # A pair saves three tensors: a product's input and its weight, and the output of tanh.
    # A step under recompute has one more forward; the rest is hooks.
    blocks = [(each.full_s - each.plain_s - each.forward_s) / _BLOCKS for each in (small, large)]
    # From two sizes: the difference has only what grows with the tensors of a block.
    saved_s = (blocks[1] - blocks[0]) / (3 * (many - few))
    # In both runs each pair runs `t`, `addmm` and `tanh`; the sum is one op more.
    observed_s = (large.observed_s - large.full_s) / (_BLOCKS * 2 * 3 * many)
    moved_s = (large.moved_s - large.plain_s) / (_BLOCKS * (many + 1)) - saved_s
    called = [(each.scheduled_s - each.plain_s) for each in (small, large)]
    gradient_s = (called[1] - called[0]) / (_BLOCKS * 2 * (many - few))
    found = {
        mechanism_costs.RECOMPUTED_BLOCK: blocks[0] - 3 * few * saved_s,
        mechanism_costs.SAVED_TENSOR: saved_s,
        mechanism_costs.OBSERVED_OP: observed_s,
        mechanism_costs.MOVED_TENSOR: moved_s,
        mechanism_costs.SCHEDULED_CALL: called[0] - _BLOCKS * 2 * few * gradient_s,
        mechanism_costs.SCHEDULED_GRADIENT: gradient_s,
        mechanism_costs.GROUPED_COPY: _grouped_copy_s(device, rounds),
    }
    return {name: max(value, _LEAST_S) for name, value in found.items()}


def _times(pairs: int, device: torch.device, rounds: int) -> _Times:
    batch = torch.ones(4, _WIDTH, device=device)

    def model() -> nn.Module:
        return nn.Sequential(*(_Block(pairs) for _ in range(_BLOCKS))).to(device)

    def step(net: nn.Module) -> Callable[[], None]:
        def run() -> None:
            net(batch).sum().backward()
            for each in net.parameters():
                each.grad = None

        return run

    def claimed(claim: Callable[[ActivationTable, int], None]) -> nn.Module:
        net = model()
        table = ActivationTable(net, [str(i) for i in range(_BLOCKS)])
        for i in range(_BLOCKS):
            claim(table, i)
        table.install()
        return net

    plain, scheduled = model(), model()
    tape = capture(
        scheduled, scheduled.forward, shapes_of(((batch,), {})), autocast_now(), lambda i, out: True
    )
    ScheduledRegion(scheduled, plain_schedule(tape.graph), device).install()
    ways = [
        step(plain),
        lambda: plain(batch),
        step(claimed(lambda table, i: table.claim_recompute(i))),
        step(claimed(lambda table, i: table.claim_recompute(i, lambda op: False))),
        step(claimed(lambda table, i: table.claim_move(i, 1.0, 0))),
        step(scheduled),
    ]
    return _Times(*_medians(ways, device, rounds))


def _grouped_copy_s(device: torch.device, rounds: int) -> float:
    """Return the host's time of one of many small copies to the host and back."""
    tensors = [torch.zeros(_WIDTH, device=device) for _ in range(_COPIES)]

    def copies() -> None:
        hosts = to_host_together(tensors)
        transfer.finish_all(hosts)
        copy_to_device_together(tensors, hosts)

    return _medians([copies], device, rounds)[0] / (2 * _COPIES)


def _medians(ways: list[Callable[[], object]], device: torch.device, rounds: int) -> list[float]:
    """Return the median seconds of the host for each way; the ways rotate."""
    found = np.zeros((rounds, len(ways)))
    for way in ways:
        for _ in range(3):
            way()
    for round_ in range(rounds):
        for i, way in enumerate(ways):
            streams.synchronize(device)
            # The thread's own time on a CPU, where other work takes cores away.
            began = time.thread_time() if device.type == "cpu" else time.perf_counter()
            way()
            found[round_, i] = (time.thread_time() if device.type == "cpu" else time.perf_counter()) - began
    return [float(each) for each in np.median(found, axis=0)]
