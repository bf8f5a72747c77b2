"""Sharding on real gloo ranks of this machine: five steps against one rank, counted bytes, measured peaks,
quantized training.

Each part starts its ranks once and runs all its cases on them; two neighbouring ranks form a node. Models and
loops are those of the tests.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(1, str(Path(__file__).parents[1] / "tests" / "parallel" / "collectives"))
sys.path.insert(1, str(Path(__file__).parents[1] / "tests" / "parallel" / "sharding"))

import torch
import torch.distributed as dist
from support.gloo import run_ranks
from support.ranks.data_parallel_steps import alone, batches, build, loss, on_this_rank
from support.ring_traffic import Rotation
from support.suites.sharded_suite import peaks
from support.zoo_paths import ZOO
from test_fsdp_comm_hooks import converged
from test_nested_sharding import EVEN, sent
from torch import nn

from memtune import hardware
from memtune.api import apply
from memtune.autotune.record_parallel.sharded_recording import ShardedRecordings
from memtune.autotune.space.candidates import Choice, Rewriter
from memtune.parallel.model.weight_rotation import rotatable
from memtune.parallel.sharding.factors import Bytes, Factors, Schedule, all_factors, by_link, traffic
from memtune.runtime import node_topology
from memtune.technique import Reason, Target
from memtune.testing.drift_check import recording_of
from memtune.workload.workload import Workload

NODE, DEADLINE_S = 2, 3500
STEPS, EXACT, PEAK, LOSS = 200, 1e-6, 0.02, 0.01
_WHOLE = 3 * 4 * (EVEN * EVEN + EVEN)
_SHARD_Q8, _SHARD_Q4 = EVEN * EVEN // 4 + 16 + EVEN, EVEN * EVEN // 8 + 16 + EVEN
"""A rank's part of one of the three layers: integers, four scales of 4 bytes, the bias in float32."""
_LETTERS = ("NII", "NIG", "IIG", "IGG", "INI", "ING")
Case = tuple[str, dict[str, Any], Factors]


def cases(ranks: int) -> list[Case]:
    """Return name, `sharding` of a config and factors of every division of the model state over `ranks`
    ranks.
    """
    over = {"N": 1, "I": NODE, "G": ranks}
    found: list[Case] = [
        ("ddp", {"kind": "ddp"}, Factors(1, 1, 1)),
        ("zero1", {"kind": "zero1"}, Factors(1, 1, ranks)),
        ("zero2", {"kind": "zero2"}, Factors(1, ranks, ranks)),
        ("zero3", {"kind": "zero3"}, Factors(ranks, ranks, ranks)),
        ("fsdp", {"kind": "fsdp"}, Factors(ranks, ranks, ranks)),
    ]
    if ranks > NODE:
        found += [("mics", {"kind": "mics", "group": NODE}, Factors(NODE, NODE, NODE))]
        found += [
            (
                f"paro {each}",
                {"kind": "paro", "strategy": each, "group": NODE},
                Factors(*(over[letter] for letter in each)),
            )
            for each in _LETTERS
        ]
    found += [
        ("amsp {}, {}, {}".format(*astuple(each)), {"kind": "amsp", **each.document()}, each)
        for each in all_factors(ranks)
        if each.optimizer > 1
    ]
    return [(name, {"states": states}, factors) for name, states, factors in found]


def _communications(*, lossy: bool) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {
        "hierarchical": {"kind": "hierarchical"},
        "ho_ring": {"kind": "ho_ring"},
        "ho_ring, both ways": {"kind": "ho_ring", "reductions": True},
        "zeropp hpZ": {"kind": "zeropp"},
    }
    if lossy:
        quantised = {"kind": "zeropp", "hpz": False, "exact_below": 1000}
        found |= {"zeropp qwZ": quantised | {"qwz": True}, "zeropp qgZ": quantised | {"qgz": True}}
    return {
        name: {"states": {"kind": "fsdp"}, "communication": {**how, "ranks_per_node": NODE}}
        for name, how in found.items()
    }


def _rotations(*degrees: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for degree in degrees:
        rtp = {"kind": "rtp", "degree": degree, "in_place": False}
        found |= {
            f"rtp of {degree}": {"parallel": rtp},
            f"rtp of {degree}, in place": {"parallel": {**rtp, "in_place": True}},
        }
    return found


def _divided_rotations() -> dict[str, dict[str, Any]]:
    """Return rings of two ranks, with states sharded between the rings."""
    ring = {"kind": "rtp", "degree": 2, "in_place": False}
    return {
        f"rtp of 2, {kind}": {"parallel": ring, "states": {"kind": kind}}
        for kind in ("ddp", "zero1", "zero2", "zero3")
    }


def _config(sharding: dict[str, Any], layers: Callable[[int], list[str]]) -> dict[str, Any]:
    """Return the config; `layers` are those whose weights can rotate over that many ranks, for the plan of
    `rtp`.
    """
    degree = sharding.get("parallel", {}).get("degree", 0)
    plan = {"sharding.parallel": {"degree": degree, "layers": layers(degree)}} if degree else {}
    return {"settings": {"sharding": sharding}, "plan": plan}


# -- five steps ----------------------------------------------------------------------------------------------


def _largest(ours: dict[Any, Any], wanted: dict[Any, Any]) -> float:
    assert ours.keys() == wanted.keys()
    return max(float((ours[key] - wanted[key]).abs().max()) for key in wanted)


def _rotatable(model: nn.Module, degree: int) -> list[str]:
    return rotatable(model, degree)[0]


def _five_steps(asked: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    os.environ["LOCAL_WORLD_SIZE"] = str(NODE)
    plain = {clip: alone(*build(), batches, clip) for clip in (0.0, 0.05)}
    rows = []
    for name, sharding in asked.items():
        for parts, clip in ((parts, clip) for parts in (1, 4) for clip in plain):
            model, optimizer = build()
            config = _config(sharding, partial(_rotatable, model))
            tuned = apply(model, optimizer, config, loss=loss, strict=False)
            ours, wanted = on_this_rank(model, optimizer, tuned, batches, parts, clip), plain[clip]
            losses = torch.tensor(ours["losses"], dtype=torch.float64)
            dist.all_reduce(losses)
            off = (
                (losses / dist.get_world_size() - torch.tensor(wanted["losses"], dtype=torch.float64))
                .abs()
                .max()
            )
            found = {"weights": _largest(ours["weights"], wanted["weights"]), "losses": float(off)}
            found["momenta"] = _largest(ours["momenta"], wanted["momenta"])
            rows.append({"technique": name, "accumulate": parts, "clipping": clip, **found})
            node_topology.declare(None)
    return rows


def exact(wanted: Callable[[str], bool]) -> list[dict[str, Any]]:
    """Return the largest difference from one rank after five steps, over all ranks, per technique,
    accumulation and clipping.

    Args:
        wanted: Predicate on a technique's name; others are not run. The other parts take it too.
    """
    rows = []
    for ranks in (2, 4):
        asked = {name: sharding for name, sharding, _ in cases(ranks)} | _rotations(
            2
        )  # the rows of some layers are seven
        if ranks > NODE:
            asked |= _communications(lossy=False) | _divided_rotations()
        asked = {name: sharding for name, sharding in asked.items() if wanted(name)}
        if not asked:
            continue
        for each in zip(*run_ranks(_five_steps, ranks, asked, deadline_s=DEADLINE_S), strict=True):
            worst = {key: max(row[key] for row in each) for key in ("weights", "momenta", "losses")}
            rows.append({"ranks": ranks, **each[0], **worst, "within": max(worst.values()) <= EXACT})
    return rows


def exact_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Format a line per technique and number of ranks: the worst over accumulation and clipping."""
    out = [
        (
            "Largest difference from one rank after 5 steps, over accumulation 1 and 4 and clipping off and"
            f" on ({len(rows)} runs, {sum(not row['within'] for row in rows)} beyond {EXACT:g}, of losses"
            " above 1 relatively)."
        ),
        "",
        "| technique | ranks | weights | momenta | losses |",
        "|---|---|---|---|---|",
    ]
    for name, ranks in dict.fromkeys((row["technique"], row["ranks"]) for row in rows):
        mine = [row for row in rows if (row["technique"], row["ranks"]) == (name, ranks)]
        worst = (max(row[state] for row in mine) for state in ("weights", "momenta", "losses"))
        out.append(f"| {name} | {ranks} | " + " | ".join(f"{each:.1e}" for each in worst) + " |")
    return out


# -- bytes ---------------------------------------------------------------------------------------------------


def _formulas(parts: int) -> dict[str, tuple[float, float]]:
    """Return bytes inside a node and between two nodes of two ranks, per step of `parts` micro-batches, for
    each way to communicate.
    """
    flat, inside, between = _WHOLE * 3 / 4, _WHOLE / 2, _WHOLE / 4
    by_node = (2 * parts * inside, parts * (2 * between + flat))
    return {
        "hierarchical": by_node,
        "ho_ring": by_node,
        "ho_ring, both ways": (3 * parts * inside, 3 * parts * between),
        "zeropp hpZ": (parts * inside, 2 * parts * flat),
        "zeropp qwZ": (0, parts * (2 * 3 * 3 * _SHARD_Q8 + flat)),
        "zeropp qgZ": (parts * 3 * 2 * _SHARD_Q4, parts * (2 * flat + 3 * _SHARD_Q4)),
        **{name: _rotated(how["parallel"], parts) for name, how in _rotations(2, 4).items()},
    }


def _rotated(how: dict[str, Any], parts: int) -> tuple[float, float]:
    weights, biases = 3 * 4 * EVEN * EVEN, 3 * 4 * EVEN
    first = weights / 3  # whose input needs no gradient
    rotation = Rotation(how["degree"], how["in_place"], weights, weights - first, weights, weights, biases)
    found = by_link(rotation.hops(Schedule(4, NODE, parts)), NODE)
    return found.intra_bytes, found.inter_bytes


def _counted(asked: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    os.environ["LOCAL_WORLD_SIZE"] = str(NODE)
    return [
        {
            "technique": name,
            "accumulate": parts,
            "counted": sent(_config(sharding, lambda degree: ["0.0", "1.0", "2.0"]), parts),
        }
        for name, sharding in asked.items()
        for parts in (1, 4)
    ]


def bytes_sent(wanted: Callable[[str], bool]) -> list[dict[str, Any]]:
    """Return the bytes that a rank receives per step on each class of link, and the formula; four ranks on
    two nodes.
    """
    found = cases(4)
    asked = {name: sharding for name, sharding, _ in found} | _communications(lossy=True) | _rotations(2, 4)
    asked = {name: sharding for name, sharding in asked.items() if wanted(name)}
    factors = {name: each for name, _, each in found}
    rows: list[dict[str, Any]] = []
    if not asked:
        return rows
    for each in zip(*run_ranks(_counted, 4, asked, deadline_s=DEADLINE_S), strict=True):
        name, parts = each[0]["technique"], each[0]["accumulate"]
        if name in factors:
            sum_of = traffic(factors[name], Bytes(_WHOLE, _WHOLE, 0), Schedule(4, NODE, parts))
            formula = (sum_of.intra_bytes, sum_of.inter_bytes)
        else:
            formula = _formulas(parts)[name]
        flags = 6 * 4 * 8 * parts  # divided by hops: a number for each of six parameters, in few messages
        counted = [
            tuple(row["counted"].get(link, 0) for link in ("intra_link", "inter_link")) for row in each
        ]
        within = all(
            0 <= ours - wants <= flags for row in counted for ours, wants in zip(row, formula, strict=True)
        )
        rows.append(
            {
                "technique": name,
                "accumulate": parts,
                "counted": list(max(counted)),
                "formula": list(formula),
                "within": within,
            }
        )
    return rows


def bytes_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Format a line per technique and accumulation."""
    out = [
        (
            f"Per rank and step, four ranks on two nodes, a model of {_WHOLE:,} bytes; equal up to padding"
            " and flags."
        ),
        "",
        "| technique | micro-batches | inside nodes | formula | between nodes | formula | equal |",
        "|---" * 7 + "|",
    ]
    for row in rows:
        pairs = " | ".join(
            f"{ours:,} | {wants:,.0f}" for ours, wants in zip(row["counted"], row["formula"], strict=True)
        )
        out.append(
            f"| {row['technique']} | {row['accumulate']} | {pairs} | {'yes' if row['within'] else 'no'} |"
        )
    return out


# -- peaks ---------------------------------------------------------------------------------------------------

OTHER_TECHNIQUES: dict[str, dict[str, Any]] = {
    "alone": {},
    "full": {"recompute": {"kind": "full"}},
    "selective": {"recompute": {"kind": "selective"}},
    "copy_out": {"offload": {"activations": {"kind": "copy_out"}}},
}


def peak(only: Callable[[str], bool]) -> list[dict[str, Any]]:
    """Return the native ledger's peak on four ranks and that of the rewritten program, alone and combined
    with techniques that change peaks.
    """
    plain = recording_of(ZOO["gpt"])
    cut = ShardedRecordings(Workload.load(ZOO["gpt"]), plain)
    rewriter = Rewriter(plain, Target(hardware.detect("cpu"), 4, sharded=cut))
    few = ("zero1", "zero2", "zero3", "mics", "paro IIG", "paro ING", "amsp 2, 4, 4")
    asked = {name: sharding for name, sharding, _ in cases(4) if name in few} | _communications(lossy=False)
    asked |= _rotations(4) | _divided_rotations()
    asked = {name: sharding for name, sharding in asked.items() if only(name)}
    rows = []
    for parts in (1, 2) if asked else ():
        settings, plans, wanted = {}, {}, {}
        for (name, sharding), (together_with, more) in (
            (a, b) for a in asked.items() for b in OTHER_TECHNIQUES.items()
        ):
            document = {"execution": {"micro_batch": 2, "accumulate": parts}, "sharding": sharding, **more}
            made = rewriter.candidate(Choice.from_document(document))
            if isinstance(made, Reason):
                rows.append(
                    {
                        "technique": name,
                        "beside": together_with,
                        "accumulate": parts,
                        "refused": str(made),
                    }
                )
                continue
            settings[name, together_with] = {
                key: value for key, value in document.items() if key != "execution"
            }
            plans[name, together_with] = {slot: plan.document() for slot, plan in made.plans.items()}
            wanted[name, together_with] = made.program.step.peak_bytes()
        measured = run_ranks(peaks, 4, str(ZOO["gpt"]), settings, parts, plans, deadline_s=DEADLINE_S)
        for key, predicted in wanted.items():
            most = max(each for rank in measured for each in rank[key][1])
            off = most / predicted - 1
            rows.append(
                {
                    "technique": key[0],
                    "beside": key[1],
                    "accumulate": parts,
                    "measured": most,
                    "predicted": predicted,
                    "off": off,
                    "within": abs(off) <= PEAK,
                }
            )
    return rows


def peak_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Format a line per technique: the relative error of the prediction, for each combination."""
    ran = [row for row in rows if "off" in row]
    out = [
        (
            f"Measured over predicted peak, less 1, the worse of 1 and 2 micro-batches ({len(ran)} runs, "
            f"{sum(not row['within'] for row in ran)} beyond {PEAK:.0%})."
        ),
        "",
        "| technique | " + " | ".join(OTHER_TECHNIQUES) + " |",
        "|---" * (1 + len(OTHER_TECHNIQUES)) + "|",
    ]
    for name in dict.fromkeys(row["technique"] for row in rows):
        worst = [
            [row["off"] for row in ran if (row["technique"], row["beside"]) == (name, together_with)]
            for together_with in OTHER_TECHNIQUES
        ]
        cells = (f"{max(each, key=abs):+.3%}" if each else "refused" for each in worst)
        out.append(f"| {name} | {' | '.join(cells)} |")
    refused = {row["refused"]: row["technique"] for row in rows if "refused" in row}
    return out + [""] + [f"- refused: {name}: {reason}" for reason, name in refused.items()]


# -- what quantising costs -----------------------------------------------------------------------------------


def quantised(wanted: Callable[[str], bool]) -> list[dict[str, Any]]:
    """Return the loss of a small GPT after 200 steps on four ranks, exact and with all of ZeRO++'s
    quantization.
    """
    found = run_ranks(converged, 4, str(ZOO["gpt"]), STEPS, deadline_s=DEADLINE_S)[0]
    off = found["lossy"] / found["exact"] - 1
    return [{"technique": "zeropp", "steps": STEPS, **found, "off": off, "within": abs(off) <= LOSS}]


def quantised_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Format the two losses."""
    return [
        f"{row['steps']} steps, hpZ, qwZ (8 bits) and qgZ (4 bits): mean loss {row['lossy']:.4f} against"
        f" {row['exact']:.4f} exact ({row['off']:+.2%}), from {row['exact first']:.4f} at first."
        for row in rows
    ]
