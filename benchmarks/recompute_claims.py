"""Claims of papers on recompute, checked against memtune: saved bytes, runs of attention, Checkmate's optimum
and rounding.

    python benchmarks/recompute_claims.py [--graphs 60] [--json FILE] [--markdown FILE]

- Korthikanti et al. 2023, table 2 with t = 1: bytes that a block of a GPT saves, counted on a recorded step.
- `attention_output`, `attention_boundary`: forward ops of attention in one real training step on this CPU,
counted by a dispatch mode, and the number of attentions in the model; `full` shows that the count can detect
a recompute.
- `balanced` (Yuan): the kept share of a LLaMA block's saved bytes.
- Checkmate: cost of the integer program and of its rounding over the optimum of an exhaustive search, on
random graphs of at most eight nodes; the rounding also on chains, where the integer program itself proves the
optimum.

No figure depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from predict import sources
from predict_grid import MODELS
from reference.exhaustive import exhaustive_cost
from torch.utils._python_dispatch import TorchDispatchMode

from memtune.activations.schedules.checkmate_planner import Problem, solve_exactly, solve_rounded
from memtune.api import apply
from memtune.search_spaces import find
from memtune.search_spaces.recompute._block_planner.fits import is_attention
from memtune.technique import Technique
from memtune.testing import rewritten
from memtune.testing.drift_check import plain_program, target_of
from memtune.testing.training import build, config_of

PAPERS = Path(__file__).parents[1] / "tests" / "support" / "models" / "recompute"
SEQ, BATCH, DIM, HEADS = 64, 2, 256, 4
"""Of `PAPERS/korthikanti.py` at the micro-batch of recordings."""
BYTES_ERROR, BALANCED, BALANCED_ERROR, ROUNDING = 0.02, 0.60, 0.05, 1.10


def _technique(kind: str, **knobs: Any) -> Technique:
    return find("recompute", kind)(kind=kind, **knobs)


def saved_bytes() -> list[dict[str, Any]]:
    """Return a block's saved bytes and the paper's formula."""
    path, unit = PAPERS / "korthikanti.py", SEQ * BATCH * DIM
    forms: tuple[tuple[str, tuple[Technique, ...], float], ...] = (
        ("none: sbh(34 + 5as/h)", (), 34 + 5 * HEADS * SEQ / DIM),
        ("selective: 34 sbh", (_technique("selective", scope="core_attention"),), 34),
        ("full: 2 sbh", (_technique("full"),), 2),
    )
    steps = [(name, rewritten(path, *techniques), round(factor * unit)) for name, techniques, factor in forms]
    return [
        {"form": name, "block": block, "ours": step.saved_bytes(block), "paper": paper}
        for name, step, paper in steps
        for block in range(len(step.blocks))
    ]


class _Attentions(TorchDispatchMode):
    """Mode that counts attention's forward ops."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += is_attention(func)
        return func(*args, **(kwargs or {}))


def attentions(model: Path, *techniques: Technique) -> int:
    """Return the runs of attention's forward in the second training step under `techniques`; the first step
    captures.
    """
    workload, module, optimizer = build(model)
    apply(module, optimizer, config_of(model, *techniques), strict=False)
    workload.loss(module, workload.make_batch(2)).backward()
    counter = _Attentions()
    with counter:
        workload.loss(module, workload.make_batch(2)).backward()
    return counter.count


def attention_runs() -> list[dict[str, Any]]:
    """Return by model and technique the runs of attention's forward, or why the technique is refused."""
    found = []
    for model in MODELS:
        once = attentions(model)
        for kind in ("full", "attention_output", "attention_boundary") if once else ():
            technique = _technique(kind)
            reason = technique.fits(plain_program(model), target_of(technique))
            runs = attentions(model, technique) if reason is None else None
            found.append(
                {
                    "model": model.stem,
                    "technique": kind,
                    "attentions": once,
                    "runs": runs,
                    "refused": str(reason or ""),
                }
            )
            print(found[-1], file=sys.stderr, flush=True)
    return found


def balanced() -> list[float]:
    """Return the share of each block's saved bytes that `balanced` keeps, for a LLaMA in the proportions of
    7B.
    """
    path = PAPERS / "llama_7b_block.py"
    plain, mine = rewritten(path), rewritten(path, _technique("balanced"))
    return [
        round(mine.saved_bytes(block) / plain.saved_bytes(block), 4) for block in range(len(plain.blocks))
    ]


def checkmate(graphs: int) -> dict[str, Any]:
    """Return figures for random graphs within a random budget, and for chains."""
    random, exact, rounding, none = np.random.default_rng(7), [], [], 0
    for _ in range(graphs):
        problem = _graph(random)
        best, found, rounded = exhaustive_cost(problem), solve_exactly(problem), solve_rounded(problem)
        assert (best is None) == (found is None)
        if best is None or found is None:
            none += 1
            continue
        exact.append(found.cost_s / best)
        rounding += [rounded.cost_s / best] if rounded.over_bytes <= 0 else []
    chains = []
    for length, budget in ((9, 5), (9, 6), (9, 7), (9, 9), (9, 12), (7, 4), (8, 5)):
        proven, rounded = solve_exactly(_chain(length, budget)), solve_rounded(_chain(length, budget))
        assert proven is not None
        assert proven.proven
        chains.append(
            {"forward nodes": length, "budget": budget, "ratio": round(rounded.cost_s / proven.cost_s, 4)}
        )
    return {
        "graphs": graphs,
        "without a schedule": none,
        "exact over exhaustive, worst": max(exact, default=None),
        "rounded within the budget": len(rounding),
        "rounded over exhaustive, worst": round(max(rounding, default=0.0), 4),
        "chains": chains,
    }


def _graph(random: np.random.Generator) -> Problem:
    n = int(random.integers(2, 9))
    reads = tuple(
        tuple(sorted({int(each) for each in random.integers(0, i, random.integers(1, 3))})) if i else ()
        for i in range(n)
    )
    cost, n_bytes, scratch = random.integers(1, 5, n), random.integers(1, 5, n), random.integers(0, 4, n)
    budget = int(random.integers(6, 6 + 2 * n))
    return Problem(
        tuple(map(float, cost)), tuple(map(int, n_bytes)), reads, (budget,) * n, tuple(map(int, scratch))
    )


def _chain(length: int, budget: int) -> Problem:
    """Return forward nodes of one byte in a row and their backward; each backward node reads the previous
    gradient and its forward's input.
    """
    forward = [(i - 1,) if i else () for i in range(length)]
    back = [
        tuple(sorted({*((i - 1,) if i else ()), 2 * length - 2 - i} - {length - 1}))
        for i in reversed(range(length))
    ]
    back[0] = (length - 2,)
    return Problem((1.0,) * 2 * length, (1,) * 2 * length, (*forward, *back), (budget,) * 2 * length)


def wrong(found: dict[str, Any]) -> list[str]:
    """Return the claims that do not hold."""
    names = []
    names += ["saved bytes"] * any(
        abs(row["ours"] / row["paper"] - 1) > BYTES_ERROR for row in found["saved_bytes"]
    )
    once = [row for row in found["attention"] if row["technique"] != "full" and row["runs"] is not None]
    names += ["attention runs"] * (not once or any(row["runs"] != row["attentions"] for row in once))
    names += ["balanced"] * any(abs(part - BALANCED) > BALANCED_ERROR for part in found["balanced"])
    solver = found["checkmate"]
    names += ["checkmate"] * (solver["exact over exhaustive, worst"] != 1)
    ratios = [solver["rounded over exhaustive, worst"], *(each["ratio"] for each in solver["chains"])]
    return names + ["rounding"] * (max(ratios) > ROUNDING)


def markdown(found: dict[str, Any]) -> str:
    """Return the page."""
    lines = [
        "# Recompute: what the papers say",
        "",
        f"`{found['command']}`; no figure depends on the machine.",
        "",
    ]
    lines += ["| saved by a block | ours | paper | difference |", "|---|---|---|---|"]
    for row in found["saved_bytes"]:
        lines.append(
            f"| {row['form']} | {row['ours']} | {row['paper']} | {row['ours'] / row['paper'] - 1:+.2%} |"
        )
    lines += [
        "",
        "| model | technique | attentions | runs of its forward in a real step |",
        "|---|---|---|---|",
    ]
    for row in found["attention"]:
        runs = f"refused: {row['refused']}" if row["runs"] is None else row["runs"]
        lines.append(f"| {row['model']} | {row['technique']} | {row['attentions']} | {runs} |")
    lines += [
        "",
        f"`balanced` keeps of each LLaMA block: {', '.join(f'{part:.3f}' for part in found['balanced'])}.",
        "",
    ]
    lines += [
        f"- checkmate, {name}: {value}" for name, value in found["checkmate"].items() if name != "chains"
    ]
    ratios = ", ".join(f"{each['ratio']:.3f}" for each in found["checkmate"]["chains"])
    return "\n".join([*lines, f"- checkmate, rounded over exact on chains: {ratios}"]) + "\n"


def main() -> int:
    """Count, print and write; return exit code 1 if a claim does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--graphs", type=int, default=60, help="random graphs for Checkmate")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for all figures")
    parser.add_argument("--markdown", type=Path, help="file for the tables")
    asked = parser.parse_args()
    found = {
        "schema": 1,
        "command": "python benchmarks/recompute_claims.py",
        "sources": sources(),
        "saved_bytes": saved_bytes(),
        "attention": attention_runs(),
        "balanced": balanced(),
        "checkmate": checkmate(asked.graphs),
    }
    print(markdown(found))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    if asked.markdown:
        asked.markdown.write_text(markdown(found))
    broken = wrong(found)
    print(f"does not hold: {', '.join(broken)}" if broken else "all hold", file=sys.stderr)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
