"""Measure how long ops take on a device: train small models with a clock around every op, by class and size.

The result for each op class is a curve from the time at peak rates to the measured time, which includes
efficiency and overhead at every size. Time of a step outside of its kernels is that of Python, autograd and
the dispatcher, and becomes the launch cost of an op.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import memtune.activations.offload.compression  # noqa: F401  (defines torch.ops.memtune.compress)
from memtune.device import streams
from memtune.hardware import CLASSES, Curve, Hardware, OpClock, TimedOp, clock_of, half_decade, op_class

_SHORTEST_S = 2e-7
_FEWEST = 2
"""Fewest observations for a point of a curve."""


@dataclass(frozen=True)
class Probe:
    """A small model to train on a batch of floats of `shape`."""

    model: nn.Module
    shape: tuple[int, ...]
    size: int
    """0 for a model with almost no compute."""


class _Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        mixed: Tensor = x + self.mlp(x)
        return mixed


class _Tokens(nn.Module):
    def __init__(self, vocabulary: int, dim: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, dim)

    def forward(self, x: Tensor) -> Tensor:  # (B, T) floats in [0, 1)
        rows = self.table((x * (self.table.num_embeddings - 1)).long())
        return nn.functional.log_softmax(rows, dim=-1)


class _Recurrent(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(dim, dim, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        return self.lstm(x)[0]  # type: ignore[no-any-return]


class _Compressed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        packed = torch.ops.memtune.compress(x.flatten(), 8, 256, 0)
        return self.scale * torch.ops.memtune.decompress(packed, x.numel(), x.dtype, 8, 256)  # type: ignore[no-any-return]


def probes(largest: int = 2) -> Iterator[Probe]:
    """Yield models of every op class in growing sizes, up to `largest`: 0 (tiny), 1, 2, and on a GPU 3."""
    for size in range(largest + 1):
        dim, length = (32, 128, 512, 2048)[size], (16, 64, 256, 1024)[size]
        yield Probe(nn.Sequential(_Block(dim), _Block(dim)), (2, length, dim), size)
        channels, pixels = (8, 16, 48, 128)[size], (8, 16, 32, 56)[size]
        layers = [
            (nn.Conv2d(3 if not i else channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
            for i in range(2)
        ]
        yield Probe(nn.Sequential(*itertools.chain(*layers)), (4, 3, pixels, pixels), size)
        yield Probe(_Tokens((100, 1000, 8000, 32000)[size], (16, 64, 128, 1024)[size]), (2, length), size)
        yield Probe(nn.Sequential(_Compressed(), _Compressed()), (2, length, dim), size)
        if size < 2:
            yield Probe(_Recurrent(dim), (2, length, dim), size)


def floor_s(device: torch.device) -> float:
    """Return the overhead of clock, dispatcher and Python for an op: the median of tiny elementwise ops."""
    observed, _ = observe(next(probes(0)), device)
    return statistics.median(each.seconds for each in observed if op_class(each.name) == "elementwise")


def observe(
    probe: Probe, device: torch.device, *, repeats: int = 3, floor: float = 0.0
) -> tuple[list[TimedOp], float]:
    """Train `probe` with and without the clock.

    Return its ops' times and the remaining time of a step per op.

    `floor` (see `floor_s`) is subtracted from every op: it is launch cost, not kernel time, and is added to
    the remainder.
    """
    model = probe.model.to(device).train()
    batch = torch.rand(probe.shape, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        with torch.enable_grad():
            model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        streams.synchronize(device)

    step()
    plain = statistics.median(_timed(step, clock_of(device)) for _ in range(repeats))
    runs: list[list[TimedOp]] = []
    for _ in range(repeats):
        with OpClock(device) as clock:
            step()
        runs.append(clock.observed)
    if len({len(run) for run in runs}) > 1:  # an op that runs only sometimes
        return runs[0], 0.0
    # The same op of every run: its median leaves out what interrupted one of them.
    observed = [
        replace(same[0], seconds=max(statistics.median(each.seconds for each in same) - floor, _SHORTEST_S))
        for same in zip(*runs, strict=True)
    ]
    rest = plain - sum(each.seconds for each in observed)
    return observed, max(rest, 0.0) / max(len(observed), 1)


def _timed(run: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    run()
    return clock() - start


def curves(observed: list[TimedOp], hardware: Hardware) -> dict[str, Curve]:
    """Return a curve for each observed class, over time at `hardware`'s peak rates.

    Medians of half decades, made monotonic.
    """
    points: dict[str, dict[int, list[tuple[float, float]]]] = {name: {} for name in CLASSES}
    for each in observed:
        at_peak = max(
            each.flops / hardware.matmul_flops_per_s(each.dtype),
            each.traffic_bytes / hardware.memory_bytes_per_s,
        )
        if at_peak > 0 and each.seconds > 0:
            where = half_decade(at_peak)
            points[op_class(each.name, is_update=each.is_update)].setdefault(where, []).append(
                (at_peak, each.seconds)
            )
    found = {name: _rising(bins) for name, bins in points.items()}
    return {name: curve for name, curve in found.items() if curve}


def _rising(bins: dict[int, list[tuple[float, float]]]) -> Curve:
    curve: list[tuple[float, float]] = []
    for where in sorted(bins):
        # A single op may have been interrupted.
        if len(bins[where]) < _FEWEST:
            continue
        x, y = (statistics.median(values) for values in zip(*bins[where], strict=True))
        # A larger op of a class takes no less time, whatever noise shows.
        curve.append((x, max(y, curve[-1][1] if curve else 0.0)))
    return tuple(curve)
