"""The simulator against published ratios of sharded training: one recording a shape, one rewritten program a
setting.

Hardware, shapes and settings are those of `published/`, written down before they were first compared; nothing
is fitted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from published import amsp, mics, paro, zeropp
from published.paper import Claim, Paper, Shape, Sharding

from memtune.autotune.predict.simulation import Prediction, simulate
from memtune.autotune.record.recorder import record
from memtune.autotune.space.candidates import Choice, Rewriter
from memtune.autotune.translate.translation import translate
from memtune.hardware.spec import Hardware
from memtune.program.step import Recording
from memtune.technique import Reason, Target
from memtune.workload.workload import Workload

PAPERS = (mics.PAPER, zeropp.PAPER, paro.PAPER, amsp.PAPER)
MODEL = Path(__file__).parent / "published" / "gpt16.py"
WITHIN = 0.20
"""Of the published ratio."""
WHY = {
    "MiCS": (
        "What the baseline hides decides it. The simulated ZeRO-3 is memtune's: gathers run ahead on streams"
        " of their own and cross nodes at the full 100 Gb/s, so links that are busy for 42 s cost 4 s. With"
        " nothing hidden the same busy times give 2.38, within 20 %: the paper's baseline, DeepSpeed of 2022,"
        " lies at that end, and the paper counts the waiting between streams that it removed from DeepSpeed"
        " among its gains (fm). The rest is bandwidth, of which ZeRO-3's messages over 16 nodes got a part"
        " only (fm). How badly another system overlaps is no constant of the hardware, and choosing it now"
        " would be fitting."
    ),
    "PaRO": (
        "Inside the published range on the network that was written down first; on faster ones ZeRO-3's"
        " gathers hide behind compute and the ratio goes to 1, so the range is met only where the paper's"
        " nodes share about 100 to 200 Gb/s."
    ),
    "AMSP": (
        "As with MiCS, what the baseline hides decides it. On this network 4,096 tokens a GPU compute longer"
        " than either baseline communicates; with all of that hidden nothing is left to win, with none of it"
        " the ratios are 1.44 and 1.36, within 20 %. At 1,024 GPUs the published baselines lose more than"
        " bandwidth and latency account for (contention, stragglers, collectives that their implementations"
        " expose), which is not modelled. Below 1 is memtune's own: its boundary hops run after backward, not"
        " beside it, which costs (1, 1, 8) 0.14 s here; without that it would be 1.01 and 1.10."
    ),
}
"""What explains a ratio that is not the published one, written after the first comparison; nothing was
changed since.
"""
_recorded: dict[tuple[Shape, int], Recording] = {}


def recording(shape: Shape, micro_batch: int) -> Recording:
    """A step of the GPT of this shape; blocks that are equal are recorded a few times and repeated."""
    key = shape, micro_batch
    if key not in _recorded:
        sizes = {
            "LAYERS": shape.layers,
            "DIM": shape.dim,
            "HEADS": shape.heads,
            "SEQ": shape.seq,
            "VOCAB": shape.vocab,
        }
        os.environ.update(
            {f"MEMTUNE_GPT_{name}": str(value) for name, value in {**sizes, "TIED": 0, "BF16": 0}.items()}
        )
        _recorded[key] = record(Workload.load(MODEL), sizes={micro_batch}, target="cuda")
    return _recorded[key]


def predicted(claim: Claim, sharding: Sharding, hardware: Hardware) -> Prediction:
    """The step of one rank of the claim under `sharding`, events and overlap included.

    Raises:
        ValueError: The techniques do not fit.
    """
    step = translate(recording(claim.shape, claim.micro_batch), hardware)
    rewriter = Rewriter(step, Target(hardware, claim.nodes * hardware.gpus_per_node), validate=False)
    recompute = {"recompute": {"kind": "full"}} if claim.recompute else {}
    execution = {"micro_batch": claim.micro_batch, "accumulate": claim.accumulate}
    found = rewriter.candidate(
        Choice.from_document({"execution": execution, "sharding": sharding, **recompute})
    )
    if isinstance(found, Reason):
        raise ValueError(f"{claim.name}: {sharding}: {found}")
    return simulate(found.program, hardware, level="events")


def ratio(claim: Claim, hardware: Hardware) -> tuple[float, Prediction, Prediction]:
    """Throughput of the claim's faster setting over that of the other, and both predictions."""
    fast, slow = predicted(claim, claim.fast, hardware), predicted(claim, claim.slow, hardware)
    return slow.step_s / fast.step_s, fast, slow


def _side(prediction: Prediction) -> dict[str, Any]:
    exposed = {name: round(seconds, 3) for name, seconds in prediction.exposed_s.items() if seconds > 5e-4}
    busy = {name: round(seconds, 3) for name, seconds in prediction.busy_s.items() if seconds > 5e-4}
    return {"step_s": round(prediction.step_s, 3), "busy_s": busy, "exposed_s": exposed}


def compared(paper: Paper) -> list[dict[str, Any]]:
    """A row per claim: our ratio beside the published one, what each side waits for, and the ratio on other
    networks.
    """
    rows = []
    for claim in paper.claims:
        ours, fast, slow = ratio(claim, paper.hardware)
        low, high = claim.published
        inside = low * (1 - WITHIN) <= ours <= high * (1 + WITHIN)
        others = {
            gbit: round(ratio(claim, _with_network(paper.hardware, gbit))[0], 2)
            for gbit in paper.other_networks_gbit_per_s
        }
        rows.append(
            {
                "paper": paper.name,
                "claim": claim.name,
                "published": list(claim.published),
                "ours": round(ours, 2),
                "within": inside,
                "source": claim.source,
                "hardware": dict(paper.sources),
                "fast": _side(fast),
                "slow": _side(slow),
                "by_network_gbit_per_s": others,
            }
        )
    return rows


def all_compared(wanted: Callable[[str], bool]) -> list[dict[str, Any]]:
    """All claims of the papers that are wanted."""
    return [row for paper in PAPERS if wanted(paper.name) for row in compared(paper)]


def without_overlap(row: Mapping[str, Any]) -> float:
    """The ratio if the slower side hid nothing of what its links do: the other end of what is possible."""
    slow = row["slow"]
    hidden_s = sum(
        busy - slow["exposed_s"].get(name, 0.0)
        for name, busy in slow["busy_s"].items()
        if name.endswith("link")
    )
    return float((slow["step_s"] + hidden_s) / row["fast"]["step_s"])


def _with_network(hardware: Hardware, gbit_per_s: int) -> Hardware:
    return replace(hardware, inter_link_bytes_per_s=gbit_per_s * 1e9 / 8 / hardware.gpus_per_node)


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as Markdown."""
    out = [
        (
            "A ring over several nodes is shown as `intra_link`, at the rate of its slowest link. (fm): from"
            " memory of the paper."
        ),
        "",
    ]
    out += [
        "| paper | setting | published | simulated | within 20 % | the slower one hiding nothing |",
        "|---" * 6 + "|",
    ]
    for row in rows:
        published = " to ".join(f"{each:g}" for each in dict.fromkeys(row["published"]))
        within = "yes" if row["within"] else "no"
        out.append(
            f"| {row['paper']} | {row['claim']} | {published} | {row['ours']:.2f} | {within} |"
            f" {without_overlap(row):.2f} |"
        )
    for row in rows:
        out += ["", f"{row['claim']}. {row['source']}.", ""]
        out += [f"- {name}: {source}" for name, source in row["hardware"].items()]
        for side in ("fast", "slow"):
            waits = ", ".join(
                f"{name} {seconds:g} s"
                for name, seconds in row[side]["exposed_s"].items()
                if name != "compute"
            )
            out.append(f"- {side}: {row[side]['step_s']:g} s a step, waiting for {waits}")
        if row["by_network_gbit_per_s"]:
            out.append(
                "- by network: "
                + ", ".join(f"{k} Gb/s {v:.2f}" for k, v in row["by_network_gbit_per_s"].items())
            )
        out += [f"- why: {WHY[row['paper']]}"] if row["paper"] in WHY else []
    return out
