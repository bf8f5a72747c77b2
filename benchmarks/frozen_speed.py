"""Cost of recompute decided op by op, against the plain model: online, frozen after warm-up, and as a
schedule planned before the run.

    python benchmarks/frozen_speed.py [--sizes 0.05,0.5,1] [--json FILE] [--markdown FILE]

A GPT of six blocks (attention, layer norm, GELU, no dropout) is trained without an optimizer, in sizes at
which the mean op of forward and backward takes about 0.05, 0.5 and 1 ms. The modes are timed in rotation, in
CPU seconds of this process, which other work on the machine does not change. Compared are medians of the
ratios to the plain model of the same round. Views do not count as ops.

- `mode`: a dispatch mode that does nothing; the least that any Python code pays to see every op.
- `online`: `dtr` decides while the model runs, under a dispatch mode, and has nothing to evict.
- `warmed up`: the decisions of `online`, frozen.
- `frozen`: the plain order as a frozen schedule.
- `warmed up, tight`: the decisions of `dtr` at 80 % of the bytes, frozen; its time includes recomputed ops.
- `online, tight`: the same decided while it runs; its cost is compared with `warmed up, tight`, which runs
the same ops.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from clock_results import header, options, write
from overhead_clock import measure, paired
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from memtune.activations.capture.region_capture import capture, shapes_of
from memtune.activations.eviction.evicting_region import OnlineRegion, OnlineSettings
from memtune.activations.eviction.op_metadata import Costs
from memtune.activations.eviction.policy import DTR
from memtune.activations.schedules.scheduled_region import ScheduledRegion
from memtune.hardware.cpu_cores import cpu_threads
from memtune.program.op_schedule import plain_schedule
from memtune.runtime.rng_state import autocast_now

CPU = torch.device("cpu")
SIZES = {"0.05": (64, 8, 32), "0.5": (256, 8, 64), "1": (384, 8, 96)}
"""Width, batch and sequence by the milliseconds that a mean op takes, about."""
LAYERS, HEADS, VOCAB = 6, 4, 256
WAYS = (
    "plain",
    "mode",
    "online",
    "warmed up",
    "frozen",
    "warmed up, tight",
    "online, tight",
)
REFERENCE = {"online, tight": "warmed up, tight"}
"""The mode with which a mode is compared, if not the plain model."""
COSTS = Costs(1e11, 1e10, 5e-6)


class Block(nn.Module):
    """Attention and MLP, with a norm before each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # (batch, sequence, width)
        """Run one block."""
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.ln_1(x)).chunk(3, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        found: Tensor = x + self.mlp(self.ln_2(x))
        return found


def gpt(width: int) -> nn.Module:
    """Return embedding, blocks and head, with the same weights each time."""
    torch.manual_seed(0)
    blocks = (Block(width) for _ in range(LAYERS))
    return nn.Sequential(
        nn.Embedding(VOCAB, width), *blocks, nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)
    )


class Nothing(TorchDispatchMode):
    """Mode that runs every op unchanged and counts those that are no views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += not func.is_view
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Row:
    """One mode at one size."""

    size: str
    way: str
    ops: int
    plain_us_per_op: float
    ratio: float
    """Median of step time over the plain step's in the same round."""
    us_per_op: float
    """Additional time over the mode's reference (`REFERENCE`), per op of the plain model."""
    replays: int
    """Number of ops recomputed in each step."""


def _step(net: nn.Module, tokens: Tensor) -> Callable[[], None]:
    def run() -> None:
        functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()).backward()
        net.zero_grad(set_to_none=True)

    return run


def _online(width: int, budget_bytes: int, freeze_after: int = 0) -> tuple[nn.Module, OnlineRegion]:
    net = gpt(width)
    settings = OnlineSettings(
        replace(DTR, in_place=True, forget=True),
        budget_bytes,
        COSTS,
        freeze_after=freeze_after,
    )
    region = OnlineRegion(net, torch.optim.SGD(net.parameters()), settings, CPU)
    region.install()
    return net, region


def measured(size: str, rounds: int) -> list[Row]:
    """Time all modes at one size, in rotation."""
    width, batch, sequence = SIZES[size]
    tokens = torch.randint(VOCAB, (batch, sequence))
    plain, frozen = gpt(width), gpt(width)
    free, region = _online(width, 1 << 40)
    _step(free, tokens)()
    tight_bytes = region.runs.peak_bytes * 8 // 10
    tight, tight_region = _online(width, tight_bytes)
    warm, warm_region = _online(width, 1 << 40, 1)
    warm_tight, warm_tight_region = _online(width, tight_bytes, 1)
    tape = capture(frozen, frozen.forward, shapes_of(((tokens,), {})), autocast_now(), lambda i, out: True)
    schedule = ScheduledRegion(frozen, plain_schedule(tape.graph), CPU)
    schedule.install()
    nothing = Nothing()

    def under_mode() -> None:
        nothing.ops = 0
        with nothing:
            _step(plain, tokens)()

    nets = {
        "online": free,
        "online, tight": tight,
        "warmed up": warm,
        "warmed up, tight": warm_tight,
        "frozen": frozen,
    }
    ways = {
        "plain": _step(plain, tokens),
        "mode": under_mode,
        **{name: _step(net, tokens) for name, net in nets.items()},
    }
    times = measure(ways, rounds, steps=1, warmup=2)  # captures, code, caches
    assert schedule.runs.plain == 0
    for each in (warm_region, warm_tight_region):
        assert each.frozen_steps >= rounds, each.why_online
    replays = tight_region.runs.replays // tight_region.runs.steps
    op_s = float(times["plain"].min()) / nothing.ops
    ratios = {name: paired(times, name, "plain").ratio for name in WAYS}
    costs = {name: 1e6 * op_s * (ratios[name] - ratios[REFERENCE.get(name, "plain")]) for name in WAYS}
    again = {name: replays if name.endswith("tight") else 0 for name in WAYS}
    return [Row(size, name, nothing.ops, 1e6 * op_s, ratios[name], costs[name], again[name]) for name in WAYS]


def markdown(command: str, found: dict[str, Any], rows: list[Row]) -> str:
    """Return the page of results."""
    lines = [
        "# Cost of deciding op by op",
        "",
        f"`{command}` on {found['machine']['cpu']}, one thread, {found['rounds']} rounds, the ways in turn.",
        (
            "Ratios are medians of CPU time over the plain step's of the same round. `over` is what a way"
            " adds for each op of the"
        ),
        "plain step; for `online, tight` over `warmed up, tight`, which recomputes the same ops.",
        "",
        "| mean op | ops | way | ratio to plain | over, µs an op | over, part of a step | ops again |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.way != "plain":
            share = row.us_per_op / row.plain_us_per_op
            again = row.replays or ""
            lines.append(
                f"| {row.plain_us_per_op / 1e3:.3f} ms | {row.ops} | {row.way} | {row.ratio:.3f} |"
                f" {row.us_per_op:.1f} | {share:+.1%} | {again} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print and write the results."""
    parser = options(__doc__, rounds=15)
    parser.add_argument("--sizes", default=",".join(SIZES), help="of these, with commas between")
    asked = parser.parse_args()
    with cpu_threads(1):
        rows = []
        for size in asked.sizes.split(","):
            rows += measured(size, asked.rounds)
            print(f"{size} ms: done", file=sys.stderr, flush=True)
    found = header("make bench-recompute", asked)
    text = markdown(found["command"], found, rows)
    print(text)
    write(asked, found, text, rows=rows)


if __name__ == "__main__":
    main()
