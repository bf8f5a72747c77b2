"""The simulator against Smart-Infinity's published speed-ups over ZeRO-Infinity, by number of drives.

    python benchmarks/smart_infinity.py [--json FILE]

Constants are those of `published/smart_infinity.py`, recorded before the first comparison; nothing is fitted.
Both steps are memtune's own techniques: `zero_infinity` over one striped file, and `smart_infinity` with an
updater per drive. A second step of the latter offloads gradients in backward (`gradients: backward`), for its
time and peak.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from published import smart_infinity as paper

from memtune.autotune.predict.prediction import Prediction
from memtune.autotune.predict.simulation import simulate
from memtune.autotune.record.recorder import record
from memtune.autotune.space.candidates import Choice, Rewriter
from memtune.autotune.translate.translation import translate
from memtune.hardware.spec import Hardware
from memtune.program.step import Recording
from memtune.ssd import offload_dir
from memtune.technique import Reason, Target
from memtune.units import GIB
from memtune.workload.workload import Workload

MODEL = Path(__file__).parent / "published" / "gpt16.py"

WHY = (
    "Inside the published range with 6 drives, 2 % above it with 10. With one drive the paper is slightly "
    "slower, since its FPGA updates more slowly than a server's processor, and here slightly faster: the "
    "model of an updater has only its own memory's rate. Gradients, which the paper's baseline writes to SSD"
    " as well, stay in host memory here, in both."
)
"""Written after the first comparison; nothing was changed since."""


def predicted(recording: Recording, hardware: Hardware, states: dict[str, Any]) -> Prediction:
    """Return the step with the optimizer's state on SSD.

    Raises:
        ValueError: The technique does not fit.
    """
    rewriter = Rewriter(translate(recording, hardware), Target(hardware, 1), validate=False)
    execution = {"micro_batch": paper.MICRO_BATCH, "accumulate": 1}
    settings = {
        "execution": execution,
        "recompute": {"kind": "full"},
        "offload": {"states": {"update": "master", **states}},
    }
    found = rewriter.candidate(Choice.from_document(settings))
    if isinstance(found, Reason):
        raise ValueError(f"{states['kind']}: {found}")
    return simulate(found.program, hardware, level="events")


def rows() -> list[dict[str, Any]]:
    """Return a row per number of drives."""
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
    recording = record(Workload.load(MODEL), sizes={paper.MICRO_BATCH}, target="cuda")
    for drives in paper.DRIVES:
        slow = predicted(recording, paper.baseline(drives), {"kind": "zero_infinity"})
        fast = predicted(recording, paper.smart(drives), {"kind": "smart_infinity", "domains": drives})
        backward = {"kind": "smart_infinity", "domains": drives, "gradients": "backward"}
        early = predicted(recording, paper.smart(drives), backward)
        found.append(
            {
                "drives": drives,
                "zero_infinity_s": round(slow.step_s, 2),
                "smart_infinity_s": round(fast.step_s, 2),
                "ratio": round(slow.step_s / fast.step_s, 3),
                "published": paper.PUBLISHED.get(drives),
                "gradients_in_backward_s": round(early.step_s, 2),
                "peak_gib": {
                    name: round(each.peak_allocated_bytes / GIB, 2)
                    for name, each in (("step", fast), ("backward", early))
                },
            }
        )
    return found


def main() -> None:
    """Print the curve, and write it as JSON if requested."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ[offload_dir.VARIABLE] = folder  # looked at, not written to
        found = rows()
    for row in found:
        print(row)
    if asked.json:
        document = {"schema": 1, "sources": paper.SOURCES, "why": WHY, "rows": found}
        asked.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
