"""The simulator against the published speed-up of orchestrated swaps: four replicas on one channel.

    python benchmarks/orchestration.py [--json FILE]

Constants are those of `published/orchestration.py`, recorded before the first comparison; nothing is fitted.
Each row is a micro-batch and a number of micro-batches per step; the ratio is step time with `mode: none`
over that with the mode, at equal bytes on every link. `ratio_of_a_micro_batch` is the ratio of one more
micro-batch's time, which excludes the end of the step: gradient offload, host update, weight reload.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from pathlib import Path
from typing import Any

from published import orchestration as paper

from memtune.autotune.predict.prediction import Prediction
from memtune.autotune.predict.simulation import simulate
from memtune.autotune.record.recorder import record
from memtune.autotune.space.candidates import Choice, Rewriter
from memtune.autotune.translate.translation import translate
from memtune.technique import Reason, Target
from memtune.workload.workload import Workload

MODEL = Path(__file__).parents[1] / "examples" / "gpt.py"

WHY = (
    "Whole steps are below the published mean, single micro-batches are not: one more micro-batch is up to "
    "1.41 (token) and 1.32 (disjoint) times as fast; the published 1.32 to 1.38 lie in between. The rest of "
    "the step is memtune's own: the optimizer is on the host, so 1.3 s per step go into gradient offload, "
    "update and weight reload, equally fast in all modes, while the paper's large-model support updates on "
    "the GPU and swaps there as well. With 16 micro-batches that is a fifth of the step. No constant was "
    "changed. A remaining difference: memtune swaps the weights of one block in four, in one direction; the "
    "paper's tensors include activations and move both ways. Where a micro-batch computes for longer than "
    "four copies take, nothing is exposed and no mode can gain."
)
"""Written after the first comparison; nothing was changed since."""


def predicted(mode: str, micro_batch: int, accumulate: int, rewriter: Rewriter) -> Prediction:
    """Return the step of the four ranks.

    Raises:
        ValueError: The technique does not fit.
    """
    states = {"kind": "orchestrated", "mode": mode, "stride": paper.STRIDE, "window": paper.WINDOW}
    execution = {"micro_batch": micro_batch, "accumulate": accumulate}
    settings = {
        "execution": execution,
        "sharding": {"states": {"kind": "ddp"}},
        "offload": {"states": states},
    }
    found = rewriter.candidate(Choice.from_document(settings))
    if isinstance(found, Reason):
        raise ValueError(f"{mode}: {found}")
    return simulate(found.program, paper.HARDWARE, level="events")


def rows() -> list[dict[str, Any]]:
    """Return a row per micro-batch and number of micro-batches between gradient exchanges."""
    shape, found = paper.SHAPE, []
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
    recording = record(Workload.load(MODEL), sizes=set(paper.MICRO_BATCHES), target="cuda")
    rewriter = Rewriter(
        translate(recording, paper.HARDWARE), Target(paper.HARDWARE, paper.RANKS), validate=False
    )
    few: dict[str, Prediction] = {}
    for micro_batch, accumulate in itertools.product(paper.MICRO_BATCHES, paper.ACCUMULATE):
        steps = {
            mode: predicted(mode, micro_batch, accumulate, rewriter) for mode in ("none", "disjoint", "token")
        }
        ratios = {mode: round(steps["none"].step_s / steps[mode].step_s, 3) for mode in ("disjoint", "token")}
        up_s = {mode: round(each.exposed_s.get("host_to_device", 0.0), 4) for mode, each in steps.items()}
        found.append(
            {
                "micro_batch": micro_batch,
                "accumulate": accumulate,
                "step_s": {mode: round(each.step_s, 4) for mode, each in steps.items()},
                "waited_for_weights_s": up_s,
                "ratio": ratios,
            }
        )
        if accumulate == min(paper.ACCUMULATE):
            few = steps
        else:
            more_s = {mode: each.step_s - few[mode].step_s for mode, each in steps.items()}
            found[-1]["ratio_of_a_micro_batch"] = {
                mode: round(more_s["none"] / more_s[mode], 3) for mode in ratios
            }
    return found


def main() -> None:
    """Print the curve, and write it as JSON if requested."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    asked, found = parser.parse_args(), rows()
    print(f"published: {paper.PUBLISHED[0]} to {paper.PUBLISHED[1]}")
    for row in found:
        print(row)
    if asked.json:
        document = {
            "schema": 1,
            "published": list(paper.PUBLISHED),
            "sources": paper.SOURCES,
            "why": WHY,
            "rows": found,
        }
        asked.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
