"""Our simulator against the DTR artifact's own, on its own logs (`MEMTUNE_DTR_LOGS` says where they are)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memtune.activations.eviction.policy import (
    Policy,
    TraceWriter,
    coop_options,
    dtr_options,
    megtaichi_options,
    replay,
)

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LOGS = os.environ.get("MEMTUNE_DTR_LOGS")
RATIOS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
HEURISTICS = {
    "closure": Policy(neighbours="closure"),
    "classes": Policy(),
    "own": Policy(neighbours="own"),
    "lru": Policy(neighbours="nothing", by_size=False),
    "size": Policy(neighbours="nothing", by_staleness=False),
    "msps": Policy(neighbours="ancestors", by_staleness=False),
}

# Slowdown by ratio of the artifact's unmodified simulator (commit eff53cc4, eager eviction); None where it
# fails.
CURVES = {
    "resnet32-56": (
        10_061_179_152,
        {
            "closure": (1.0021, 1.0131, 1.0248, 1.0463, 1.0737, 1.1068, 1.1404, 1.1782, 1.3711, 2.2229),
            "classes": (1.0021, 1.0131, 1.0248, 1.0463, 1.0737, 1.1068, 1.1404, 1.1786, 1.3322, None),
            "own": (1.0021, 1.0131, 1.0413, 1.0675, 1.1333, 1.1965, 2.9855, 4.1249, None, None),
            "lru": (1.0025, 1.0323, 1.0672, 1.0952, 1.1301, None, None, None, None, None),
            "size": (1.0021, 1.0299, 1.0646, 1.0925, 1.2336, 1.4516, 1.7384, 2.0830, None, None),
            "msps": (1.0021, 1.0127, 1.0244, 1.0371, 1.0631, 1.1062, 1.1456, 1.2087, 1.4306, None),
        },
    ),
    "transformer-10": (
        9_864_405_000,
        {
            "closure": (1.0015, 1.0090, 1.0199, 1.0314, 1.0442, 1.0584, 1.0832, 1.1234, 1.3517, None),
            "classes": (1.0015, 1.0090, 1.0199, 1.0314, 1.0442, 1.0584, 1.0914, 1.1238, 1.5449, None),
            "own": (1.0015, 1.0097, 1.0219, 1.0373, 1.0601, 1.1121, 1.1610, 1.5049, 1.6417, None),
            "lru": (1.0000, 1.0334, 1.0649, 1.0985, 1.1337, 2.7649, 3.1361, 3.8242, None, None),
            "size": (1.0025, 1.0162, 1.0283, 1.0461, 1.0533, 1.0655, 1.0803, 1.1347, None, None),
            "msps": (1.0015, 1.0089, 1.0180, 1.0353, 1.0477, 1.0666, 1.0886, 1.1125, 1.3326, None),
        },
    ),
}


@pytest.mark.skipif(not LOGS, reason="MEMTUNE_DTR_LOGS does not say where the DTR artifact's logs are")
@pytest.mark.parametrize("log", CURVES)
def test_curves_equal_those_of_artifact(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the digits that are known, at every budget."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import dtr_logs

    trace = dtr_logs.load(log)
    base_bytes, curves = CURVES[log]
    base = replay(trace, Policy(release="banish"))
    assert base.peak_bytes == base_bytes
    for heuristic, curve in curves.items():
        for ratio, wanted in zip(RATIOS, curve, strict=True):
            budget = int(base_bytes * ratio)
            done = replay(trace, HEURISTICS[heuristic], budget, settle=True, cost_limit=5 * base.first_cost)
            got = done.slowdown if done.outcome == "done" else None
            assert got == (None if wanted is None else pytest.approx(wanted, abs=6e-5)), (
                f"{heuristic} at {ratio}"
            )


@pytest.mark.skipif(not LOGS, reason="MEMTUNE_DTR_LOGS does not say where the DTR artifact's logs are")
@pytest.mark.parametrize("log", CURVES)
def test_best_option_of_dtr_is_as_cheap_as_every_curve(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It need not run where none of the heuristics stays within the budget."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import dtr_logs

    trace = dtr_logs.load(log)
    base_bytes, curves = CURVES[log]
    limit = 5 * replay(trace, Policy(release="banish")).first_cost
    for at, ratio in enumerate(RATIOS):
        known = [curve[at] for curve in curves.values() if curve[at] is not None]
        if known:
            budget = int(base_bytes * ratio)
            _, done = dtr_logs.replay_cheapest(trace, dtr_options(), budget, settle=True, cost_limit=limit)
            assert done.slowdown <= min(known) + 6e-5, f"at {ratio}"


@pytest.mark.skipif(not LOGS, reason="MEMTUNE_DTR_LOGS does not say where the DTR artifact's logs are")
def test_options_of_coop_and_megtaichi_on_the_unet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the U-Net's peak was near thrashing for megtaichi's one score, and Coop left 6 % of holes."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import dtr_logs

    if "unet-6" not in dtr_logs.names():
        pytest.skip("the folder has no log of the U-Net")
    trace = dtr_logs.load("unet-6")
    base = replay(trace, Policy(release="banish"))
    half, limit = base.peak_bytes // 2, 5 * base.first_cost
    megtaichi, coop = (
        dtr_logs.replay_cheapest(trace, options, half, settle=True, cost_limit=limit)[1]
        for options in (megtaichi_options(), coop_options())
    )
    assert megtaichi.slowdown < 1.26
    assert coop.slowdown < 1.26
    assert coop.fragmentation <= 0.05


def test_replay_cheapest_returns_the_lowest_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import dtr_logs

    writer = TraceWriter()
    saved = [writer.constant(1)]
    for _ in range(64):
        saved += writer.call(1, saved[-1:], [(1, -1)])
    (gradient,) = writer.call(1, saved[-1:], [(1, -1)])
    for activation in reversed(saved[1:]):
        writer.release(activation)
        (gradient,) = writer.call(1, [gradient, activation], [(1, -1)])
    trace, options = writer.done(), dtr_options()
    alone = {each.option: replay(trace, each, 12, cost_limit=1000) for each in options}
    costs = {name: done.replay_cost for name, done in alone.items() if done.outcome == "done"}
    found, done = dtr_logs.replay_cheapest(trace, options, 12, cost_limit=1000)
    assert len(set(costs.values())) > 1
    assert found.option == min(costs, key=costs.__getitem__)
    assert done.replay_cost == costs[found.option]
