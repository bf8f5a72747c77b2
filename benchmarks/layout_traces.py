"""Training steps of real models: planned layouts against the most live bytes and against the caching
allocator's model.

    python benchmarks/layout_traces.py --json out.json --markdown out.md
    python benchmarks/layout_traces.py --write-traces benchmarks/traces   # the rows of MIXED named in
        WRITTEN, as CSV

`steady`: a step that repeats, its buffers laid out on a circle. `varying`: steps of different micro-batches
alternate, as with batches of varying length, laid out on a line. `mixed`: the same under recompute, offload
or sharding (two streams), with large batches. No GPU is involved: reserved bytes are those of memtune's
allocator model; gmlake and pools use its own allocator in simulation.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from buffer_layout import Buffers, fault, lay_out

from memtune import hardware
from memtune.autotune.predict.caching_allocator import (
    Action,
    AllocatorEvents,
    AllocatorSettings,
    event_stream,
    replay,
)
from memtune.autotune.record.recorder import record
from memtune.autotune.space.candidates import Choice, Rewriter
from memtune.autotune.translate.translation import translate
from memtune.memory.arena_settings import ArenaSettings
from memtune.program.step import Program, Recording, Step
from memtune.search_spaces import find
from memtune.search_spaces.execution import Execution
from memtune.technique import Target
from memtune.workload.workload import Workload

MODELS = Path(__file__).parent / "predict_models"
NAMES = ("gpt", "llama", "lora", "resnet", "unet", "vit")
BATCH, VARYING, SEED = 16, 8, 0
ALIGNMENT_BYTES = 512
LAYOUT_S = 1.0
ALLOCATORS = {
    "native": AllocatorSettings(),
    "expandable_segments": AllocatorSettings(expandable_segments=True),
    "pools": AllocatorSettings(arena=ArenaSettings(kind="lifetime_pools", pools=True)),
    "gmlake": AllocatorSettings(arena=ArenaSettings(kind="gmlake")),
    "gmlake_20": AllocatorSettings(arena=ArenaSettings(kind="gmlake", arena_below_mb=20)),
    "gmlake_64": AllocatorSettings(arena=ArenaSettings(kind="gmlake", arena_below_mb=64)),
}
GMLAKE = tuple(name for name in ALLOCATORS if name.startswith("gmlake"))
"""With the values of the knob that a search tries; it takes the best by the same replay."""
FULL, COPY_OUT = {"recompute": {"kind": "full"}}, {"offload.activations": {"kind": "copy_out"}}
MIXED: tuple[tuple[str, str, dict[str, dict[str, Any]], int, int], ...] = (
    ("gpt", "full recompute", FULL, 1, 256),
    ("gpt", "copied out", COPY_OUT, 1, 256),
    ("llama", "full recompute", FULL, 1, 256),
    ("llama", "ZeRO-3 on 8 GPUs", {"sharding.states": {"kind": "fsdp"}}, 8, 256),
    ("lora", "full recompute", FULL, 1, 256),
    ("lora", "copied out", COPY_OUT, 1, 256),
    ("vit", "full recompute", FULL, 1, 256),
    ("vit", "copied out", COPY_OUT, 1, 256),
)
"""Model, name, techniques by slot, ranks, largest micro-batch."""
WRITTEN = (("gpt", "copied out"), ("llama", "full recompute"), ("lora", "copied out"), ("vit", "copied out"))
HEADER = "id,lower,upper,size,stream"


def steps_under(
    recording: Recording, techniques: dict[str, dict[str, Any]], ranks: int, batches: list[int]
) -> list[Step]:
    """Return the recorded step at each of the batches under these techniques."""
    rewriter = Rewriter(recording, Target(hardware.find("h100-80g"), ranks=ranks))
    chosen = {slot: find(slot, knobs["kind"])(**knobs) for slot, knobs in techniques.items()}
    programs = [rewriter.program(Choice.of(Execution(micro_batch=batch), chosen)) for batch in batches]
    for program in programs:
        assert isinstance(program, Program), program
    return [program.step for program in programs if isinstance(program, Program)]


def varying_events(steps: list[Step]) -> AllocatorEvents:
    """Return the events of these steps, one after the other."""
    parts, first, n_events, n_ops = [], [], 0, 0
    for number, step in enumerate(steps):
        events = event_stream(step, number + 1)
        rows = slice(int(events.step[number]), None)
        shift = n_ops - number * max(step.ops.n, 1)
        columns = (
            events.action,
            events.storage,
            events.bytes,
            events.stream,
            events.op + shift,
            events.ready_op + shift,
        )
        parts.append(np.stack([column[rows].astype(np.int64) for column in columns]))
        first.append(n_events)
        n_events, n_ops = n_events + parts[-1].shape[1], n_ops + max(step.ops.n, 1)
    return AllocatorEvents.from_columns(np.concatenate(parts, axis=1), np.array(first, np.int64))


def lifetimes(events: AllocatorEvents) -> list[tuple[int, int, int]]:
    """Return (allocation, free, bytes) of events; a buffer that is never freed ends with the trace."""
    alive: dict[int, tuple[int, int]] = {}
    rows = []
    for at, (action, storage, n_bytes) in enumerate(
        zip(events.action, events.storage, events.bytes, strict=True)
    ):
        if action == Action.ALLOC:
            alive[int(storage)] = (at, int(n_bytes))
        else:
            begin, size = alive.pop(int(storage))
            rows.append((begin, at, size))
    return rows + [(begin, len(events), size) for begin, size in alive.values()]


def mixed_events(
    recording: Recording, techniques: dict[str, dict[str, Any]], ranks: int, largest: int
) -> AllocatorEvents:
    """Return eight steps of a quarter of `largest` samples up to all of them, under these techniques."""
    batches = np.random.default_rng(SEED).integers(largest // 4, largest + 1, VARYING).tolist()
    return varying_events(steps_under(recording, techniques, ranks, batches))


def write_trace(events: AllocatorEvents, path: Path) -> None:
    """Write a row per buffer in MiniMalloc's format, with its stream; times count events."""
    stream = {}
    for at, (action, one) in enumerate(zip(events.action, events.stream, strict=True)):
        if action == Action.ALLOC:
            stream[at] = int(one)
    rows = sorted(lifetimes(events))
    lines = [f"{i},{begin},{end},{size},{stream[begin]}" for i, (begin, end, size) in enumerate(rows)]
    path.write_text("\n".join([HEADER, *lines]) + "\n")


def read_trace(path: Path) -> tuple[AllocatorEvents, Buffers]:
    """Return a file of `write_trace` as events in order and as buffers to lay out."""
    rows = np.loadtxt(path, np.int64, delimiter=",", skiprows=1)
    last = int(rows[:, 2].max())
    moments = [(int(lower), Action.ALLOC, i) for i, lower, *_ in rows.tolist()]
    moments += [(int(upper), Action.FREE, i) for i, _, upper, *_ in rows.tolist() if upper < last]
    moments.sort()
    number = np.arange(len(moments))
    storage = np.array([i for _, _, i in moments])
    action = np.array([int(action) for _, action, _ in moments])
    n_bytes = np.where(action == Action.ALLOC, rows[storage, 3], 0)
    columns = np.stack([action, storage, n_bytes, rows[storage, 4], number, number])
    events = AllocatorEvents.from_columns(columns.astype(np.int64), np.array([0], np.int64))
    return events, Buffers.of(rows[:, 1:4].tolist(), alignment_bytes=ALIGNMENT_BYTES)


def on_a_circle(events: AllocatorEvents) -> Buffers:
    """Return the second of three equal steps: its allocations, and the bytes that are always live."""
    first, last = int(events.step[1]), int(events.step[2])
    period, rows = last - first, []
    for begin, end, size in lifetimes(events):
        if first <= begin < last:
            rows.append((begin - first, min(end, begin + period) - first, size))
        elif begin < first and end == len(events):
            rows.append((0, period, size))
    return Buffers.of(rows, alignment_bytes=ALIGNMENT_BYTES, period=period)


def row(name: str, kind: str, events: AllocatorEvents, buffers: Buffers) -> dict[str, Any]:
    """Return one trace's figures under the allocator's model and laid out."""
    layout = lay_out(buffers, heuristic_s=LAYOUT_S)
    assert not fault(buffers, layout)
    made: dict[str, Any] = {"model": name, "steps": kind, "buffers": len(buffers)}
    for allocator, settings in ALLOCATORS.items():
        result = replay(events, settings, None)
        made[allocator] = result.peak_reserved_bytes / result.peak_allocated_bytes
    made |= {
        "live_bytes": layout.lower_bound_bytes,
        "planned": layout.height_bytes / layout.lower_bound_bytes,
    }
    return made


def plot(buffers: Buffers, path: Path) -> None:
    """Draw a layout: time to the right (one circle), offset upwards, a rectangle per buffer."""
    layout = lay_out(buffers, heuristic_s=LAYOUT_S)
    width, height, period = 1000, 500, buffers.period or int(buffers.end.max())
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        ' shape-rendering="crispEdges">'
    ]
    for row in range(len(buffers)):
        start, end = int(buffers.start[row]), int(buffers.end[row])
        top = int(layout.offset_bytes[row] + buffers.size_bytes[row])
        y, tall = (
            height * (1 - top / layout.height_bytes),
            height * int(buffers.size_bytes[row]) / layout.height_bytes,
        )
        colour = f"hsl({row * 137 % 360},55%,65%)"
        for begin, finish in ((start, min(end, period)), (0, end - period)):
            if finish > begin:
                x, wide = width * begin / period, width * (finish - begin) / period
                lines.append(
                    f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}" fill="{colour}"/>'
                )
    path.write_text("\n".join([*lines, "</svg>"]) + "\n")


def recorded(name: str) -> Recording:
    """Return a model recorded for a modelled H100."""
    return translate(record(Workload.load(MODELS / f"{name}.py"), target="cuda"), hardware.find("h100-80g"))


def write_traces(folder: Path) -> None:
    """Write the rows of `WRITTEN`."""
    folder.mkdir(parents=True, exist_ok=True)
    for model, kind, techniques, ranks, largest in MIXED:
        if (model, kind) in WRITTEN:
            events = mixed_events(recorded(model), techniques, ranks, largest)
            write_trace(events, folder / f"{model}-{kind.replace(' ', '-')}.csv")


def model_rows(name: str, plot_to: Path | None = None) -> list[dict[str, Any]]:
    """Return all traces of a model on a modelled H100."""
    recording = recorded(name)
    steady = event_stream(recording.at(BATCH), 3)
    batches = np.random.default_rng(SEED).integers(2, BATCH + 1, VARYING).tolist()
    varying = varying_events([recording.at(batch) for batch in batches])
    circle = on_a_circle(steady)
    if plot_to is not None:
        plot(circle, plot_to)
    made = [row(name, "steady", steady, circle)]
    made.append(
        row(name, "varying", varying, Buffers.of(lifetimes(varying), alignment_bytes=ALIGNMENT_BYTES))
    )
    for model, kind, techniques, ranks, largest in MIXED:
        if model == name:
            events = mixed_events(recording, techniques, ranks, largest)
            buffers = Buffers.of(lifetimes(events), alignment_bytes=ALIGNMENT_BYTES)
            made.append(row(name, f"mixed: {kind}, {largest // 4} to {largest}", events, buffers))
    return made


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table."""
    lines = [
        "# Layouts of training steps (model only)",
        "",
        (
            "Made by `make bench-layout`: models of `benchmarks/predict_models`, recorded without a GPU and"
            f" translated to an H100; steady: micro-batch {BATCH}; varying: {VARYING} steps of 2 to {BATCH}"
            f" samples (seed {SEED});"
        ),
        f"mixed: {VARYING} steps of as many samples as the row says, under a technique.",
        (
            "All but planned: peak reserved / peak allocated bytes, no GPU behind it: native and expandable"
            " are memtune's model of"
        ),
        (
            "torch's allocator, pools and gmlake are its own over books. Pools are learned in the first three"
            " steps, which serve all"
        ),
        (
            "requests from one arena: the steady rows, three steps long, show no more. Planned: height of the"
            " layout / most"
        ),
        (
            "live bytes, on a circle where the step repeats. Stitched memory comes in pages of 2 MiB and"
            " shares none with the arena"
        ),
        (
            "of small requests. A model whose tensors have few MiB loses up to a page on each, which is most"
            " of what gmlake holds"
        ),
        (
            "above 1.10 there. `20` and `64` (its `arena_below_mb`) let requests below so many MiB share"
            " pages: little"
        ),
        (
            "rounding, but holes where large requests of changing sizes follow, which is what stitching is"
            " for. `best gmlake`: the"
        ),
        "knob as a search chooses it, by this very replay.",
        "",
        (
            "| model | steps | buffers | live MiB | native | expandable | pools | gmlake | 20 | 64 | best"
            " gmlake | planned |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in rows:
        best = min(each[allocator] for allocator in GMLAKE)
        ratios = " | ".join(f"{each[allocator]:.3f}" for allocator in ALLOCATORS)
        lines.append(
            f"| {each['model']} | {each['steps']} | {each['buffers']} | {each['live_bytes'] / 2**20:.0f} |"
            f" {ratios} | {best:.3f} | {each['planned']:.4f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--plot", type=Path, help="draw the layout of the first model's steady step (SVG)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--write-traces", type=Path, metavar="FOLDER")
    asked = parser.parse_args()
    if asked.write_traces:
        write_traces(asked.write_traces)
        return
    rows = []
    for name in asked.models:
        rows += model_rows(name, asked.plot if name == asked.models[0] else None)
        print(*(each for each in rows if each["model"] == name), sep="\n", file=sys.stderr, flush=True)
    print(markdown(rows))
    if asked.json:
        asked.json.write_text(json.dumps({"schema": 1, "rows": rows}, indent=1) + "\n")
    if asked.markdown:
        asked.markdown.write_text(markdown(rows))


if __name__ == "__main__":
    main()
