"""The native host optimizer against torch's fused AdamW (and DeepSpeed's CPUAdam where installed), and
against memory bandwidth.

Every round times every contestant once, after an untimed call of the same one, so that threads of the
previous contestant (OpenMP's spin for a while) are idle. Ratios are medians over rounds of the ratios within
a round.

Weights, gradients and moments are allocated as each contestant does it: the native update and the streams use
large pages where the system provides them. A second native row runs in the peers' memory and compares the
loops alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import memtune.offload.optimizer.native_update  # noqa: F401  (defines torch.ops.memtune.host_update_)
from memtune import _native
from memtune.runtime.transfer import in_huge_pages

ADAMW = [1e-3, 0.9, 0.999, 1e-8, 1e-2]
BYTES = {
    "native": 28,
    "native, in the peers' memory": 28,
    "native, bf16 in and out": 28,
    "native, bf16 in and out, bf16 moments": 20,
    "native, bf16 in and out, int8 moments": 16,
    "torch fused": 28,
    "torch fused + casts": 40,
    "deepspeed": 28,
    "deepspeed + casts": 40,
    "stream: triad": 16,
    "stream: triad in place": 12,
    "stream: copy": 12,
    "stream: read": 8,
}
"""Per parameter, read and written; a line that is only written is read first, which the streams count."""


def _without_deepspeed() -> str:
    """Return why DeepSpeed is not compared, '' if it is; it compiles its Adam at first use."""
    if importlib.util.find_spec("deepspeed") is None:
        return "not installed: not compared"
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(8))])
    except (ImportError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}: not compared"
    return ""


WITHOUT_DEEPSPEED = _without_deepspeed()


def contestants(numel: int) -> dict[str, Callable[[], None]]:
    """Return one call per contestant, an optimizer step or a stream; peers share memory, and so do the
    others, to fit more parameters.
    """
    torch.manual_seed(0)
    weight, gradient = torch.randn(numel), torch.randn(numel).mul_(0.01)
    first, second, step = torch.zeros(numel), torch.zeros(numel), torch.zeros(())
    found = in_large_pages(weight, gradient, step)
    found["native, in the peers' memory"] = native(weight, gradient, None, first, second, step)
    parameter = torch.nn.Parameter(weight)
    parameter.grad, narrow = gradient, gradient.bfloat16()
    peers: dict[str, torch.optim.Optimizer] = {"torch fused": torch.optim.AdamW([parameter], fused=True)}
    peers["torch fused"].state[parameter] = {"step": torch.zeros(()), "exp_avg": first, "exp_avg_sq": second}
    if WITHOUT_DEEPSPEED == "":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        peers["deepspeed"] = DeepSpeedCPUAdam([parameter])
        peers["deepspeed"].state[parameter] = {"step": 0, "exp_avg": first, "exp_avg_sq": second}
    for name, peer in peers.items():
        found[name] = stepping(peer)
        found[f"{name} + casts"] = casting(peer, parameter, narrow)
    return found


def in_large_pages(
    weight: torch.Tensor, gradient: torch.Tensor, step: torch.Tensor
) -> dict[str, Callable[[], None]]:
    """Return native updates of copies of these tensors, for each format of gradients and moments, and the
    streams, in memory allocated as memtune does.
    """

    def like(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return in_huge_pages(torch.empty(x.shape, dtype=dtype)).copy_(x)

    master, down, narrow = like(weight), like(gradient), like(gradient, torch.bfloat16)
    first, second = like(weight).zero_(), like(weight).zero_()
    low_first, low_second = (like(weight, torch.bfloat16).zero_() for _ in range(2))
    # The same memory: its values do not matter for the time.
    first_codes, second_codes = (each.view(torch.uint8)[: weight.numel()] for each in (low_first, low_second))
    first_scales, second_scales = (torch.zeros(-(-weight.numel() // _native.MOMENT_BLOCK)) for _ in range(2))
    found = {"native": native(master, down, None, first, second, step)}
    found["native, bf16 in and out"] = native(master, narrow, narrow, first, second, step)
    found["native, bf16 in and out, bf16 moments"] = native(
        master, narrow, narrow, low_first, low_second, step, moments="bfloat16"
    )
    found["native, bf16 in and out, int8 moments"] = native(
        master,
        narrow,
        narrow,
        first_codes,
        second_codes,
        step,
        moments="int8",
        scales=(first_scales, second_scales),
    )
    found["stream: triad"] = lambda: void(torch.add(first, second, alpha=2.0, out=down))
    found["stream: triad in place"] = lambda: void(first.add_(second, alpha=2.0))
    found["stream: copy"] = lambda: void(down.copy_(first))
    found["stream: read"] = lambda: void(torch.dot(first, second))
    return found


def native(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    out: torch.Tensor | None,
    first: torch.Tensor,
    second: torch.Tensor,
    step: torch.Tensor,
    moments: str = "float32",
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Callable[[], None]:
    """Run one native update."""
    first_scales, second_scales = scales or (None, None)
    given = (
        "adamw",
        moments,
        weight,
        gradient,
        out,
        first,
        second,
        first_scales,
        second_scales,
        step,
        ADAMW,
        False,
        0,
    )
    return lambda: torch.ops.memtune.host_update_(*given)


def stepping(peer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a call of a peer's step."""
    return lambda: void(peer.step())


def void(value: object) -> None:
    """Ignore `value`."""


def casting(
    peer: torch.optim.Optimizer, parameter: torch.nn.Parameter, narrow: torch.Tensor
) -> Callable[[], None]:
    """Return a peer's step from a bfloat16 gradient to a bfloat16 weight, through existing buffers."""

    def step() -> None:
        assert parameter.grad is not None
        parameter.grad.copy_(narrow)
        peer.step()
        narrow.copy_(parameter.detach())

    return step


def measure(numel: int, rounds: int) -> dict[str, Any]:
    """Return seconds and bytes per second of every contestant, and the ratios compared with aims."""
    calls = contestants(numel)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(rounds + 1):
        for name, call in calls.items():
            call()
            start = time.perf_counter()
            call()
            if round_:
                seconds[name].append(time.perf_counter() - start)
    rows = {
        name: {
            "median_s": statistics.median(s),
            "least_s": min(s),
            "gb_per_s": BYTES[name] * numel / statistics.median(s) / 1e9,
        }
        for name, s in seconds.items()
    }
    return {"parameters": numel, "rounds": rounds, "rows": rows, "ratios": ratios(seconds)}


def ratios(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians over rounds, with quartiles."""

    def of(slow: str, fast: str, bytes_ratio: float = 1.0) -> dict[str, float]:
        each = [bytes_ratio * one / other for one, other in zip(seconds[slow], seconds[fast], strict=True)]
        low, middle, high = statistics.quantiles(each, n=4)
        return {"median": middle, "low": low, "high": high}

    found = {}
    for peer in ("torch fused", "deepspeed"):
        if peer in seconds:
            found[f"float32 against {peer} (aim 1.0)"] = of(peer, "native")
            found[f"float32 against {peer}, in its memory"] = of(peer, "native, in the peers' memory")
            found[f"bf16 in and out against {peer} + casts (aim 1.4)"] = of(
                f"{peer} + casts", "native, bf16 in and out"
            )
    streams = [name for name in seconds if name.startswith("stream")]
    fastest = min(streams, key=lambda name: statistics.median(seconds[name]) / BYTES[name])
    for name in ("native", "native, bf16 in and out"):
        found[f"bandwidth of {name} to {fastest} (aim 0.8)"] = of(fastest, name, BYTES[name] / BYTES[fastest])
    return found


def main() -> None:
    """Print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=int, nargs="+", default=[50, 500])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    machine = {
        "isa": _native.optimizer_isa(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "load": os.getloadavg(),
    }
    machine["deepspeed"] = WITHOUT_DEEPSPEED or "compared"
    results = []
    for millions in given.millions:
        found = measure(millions * 10**6, given.rounds)
        results.append(found)
        for name, row in found["rows"].items():
            print(f"{millions:>4}M  {name:<40} {row['median_s'] * 1e3:9.1f} ms  {row['gb_per_s']:6.1f} GB/s")
        for name, ratio in found["ratios"].items():
            print(
                f"{millions:>4}M  {name:<60} {ratio['median']:.2f}  ({ratio['low']:.2f} to"
                f" {ratio['high']:.2f})",
                flush=True,
            )
        if given.json:
            given.json.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
