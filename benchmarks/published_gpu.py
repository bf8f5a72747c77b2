"""Predictions for GPUs against what others measured on them, without a GPU.

    python benchmarks/published_gpu.py [--only ID …] [--json FILE] [--markdown FILE] [--plot FILE]

Cases: `published/gpu_rows.json`, and `cases.json` of the folder that MEMTUNE_GPU_PUBLISHED names (default:
../shared/data/gpu-published next to the checkout), which is skipped with a reason if it is absent. Results
that hold rows of an absent folder are not replaced: the run ends with exit code 2. Each case is predicted as
`memtune plan --config` does, from a model file in `published/gpu_models`. Measured: allocated and reserved
bytes as torch counts them, the device's total as nvidia-smi or NVML shows it, seconds of a step. No case is
removed because its error is large; a case whose measurement is of something else than a training step has the
reason in its row (`excluded`) and is listed apart.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

from published.mended_cases import ATTENTION, CAUSES, MENDED, MISSES
from published_gpu_report import markdown, plot
from published_ranges import derive_all

ROOT = Path(__file__).parents[1]
MODELS, OWN_ROWS = ROOT / "benchmarks/published/gpu_models", ROOT / "benchmarks/published/gpu_rows.json"
FOLDER = "MEMTUNE_GPU_PUBLISHED"
COLUMNS = ("allocated", "reserved", "device", "step")
NAMES = {"alloc": "allocated", "reserved": "reserved", "nvml": "device", "step": "step"}
"""Columns of the folder's cases."""
EXCLUDED = {
    "litgpt-lora-fsdp2": (
        "FSDP1 under no_sync keeps gradients of whole flat parameters, frozen parts included, on every GPU"
        " until the last micro-batch (finetune/lora.py, fabric.no_backward_sync); FSDP2 makes no gradient of"
        " a frozen parameter, so no setting expresses it"
    ),
    "nanogpt-124m-eager": "the same measurement as nanogpt-124m-manual, whose attention is the one that ran",
}
"""Beginning of a case's name → why its measurement is not of the step that the case describes."""


@dataclass(frozen=True)
class Case:
    """One measurement, and how it is expressed."""

    id: str
    source: str
    model: str
    sizes: dict[str, Any]
    config: dict[str, Any]
    gpu_type: str
    gpus: int
    measured: dict[str, float]
    """Column → GiB or seconds."""
    where: str = ""
    """Repository, path and revision of the measurement."""
    excluded: str = ""
    cuda: str = ""
    """Version of CUDA if its context differs from that of today's versions."""
    attention: str = ""
    """Attention kernel if it is not one of torch's, a key of `ATTENTION`."""
    hardware: dict[str, Any] = field(default_factory=dict)
    """Fields of `Hardware` that the source states otherwise than the table's usual node."""
    cause: str = ""
    """Reason why the prediction is off, if it is known and no setting expresses it."""
    first: dict[str, float] = field(default_factory=dict)
    """Column → prediction made before the measurement was read, of rows that were added so."""

    def to_dict(self) -> dict[str, Any]:
        """Return what a result needs: the measurement, without the way in which it is expressed."""
        return {name: value for name, value in asdict(self).items() if name not in _EXPRESSION}


_EXPRESSION = ("sizes", "config", "hardware")


@dataclass(frozen=True)
class Row:
    """One case with its prediction; every figure in GiB or seconds."""

    case: Case
    status: str
    predicted: dict[str, float]
    low: dict[str, float]
    high: dict[str, float]
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain data."""
        return {**asdict(self), "case": self.case.to_dict()}

    def ratio(self, column: str) -> float | None:
        """Return predicted over measured, None if either is missing."""
        measured, predicted = self.case.measured.get(column), self.predicted.get(column)
        return predicted / measured if measured and predicted else None


def cases() -> tuple[list[Case], str]:
    """Return all cases, and why those of the folder are missing ('' if they are there)."""
    own = [Case(**each, cause=CAUSES.get(each["id"], "")) for each in json.loads(OWN_ROWS.read_text())]
    folder = Path(os.environ.get(FOLDER, ROOT / "../shared/data/gpu-published")).resolve()
    path = folder / "cases.json"
    if not path.exists():
        return own, f"there is no {path.name} in {folder} ({FOLDER})"
    return own + [_from_folder(each) for each in json.loads(path.read_text())], ""


def _from_folder(case: dict[str, Any]) -> Case:
    """Return a case of the folder; its environment has the sizes, behind a letter."""
    name = case["id"]
    sizes: dict[str, Any] = {key.partition("_")[2]: value for key, value in case["env"].items()}
    settings, gpu_type, cuda, attention = case["cfg"]["settings"], case["gpu_type"], "", ""
    source = name.partition("-")[0]
    for each in MENDED:
        if name.startswith(each.start):
            sizes |= each.sizes
            settings = each.settings(settings)
            gpu_type, cuda = each.gpu_type or gpu_type, each.cuda or cuda
            attention, source = each.attention or attention, each.of or source
    return Case(
        id=name,
        source=source,
        model=case["model"],
        sizes=sizes,
        config={**case["cfg"], "settings": settings},
        gpu_type=gpu_type,
        gpus=case["gpus"],
        measured={ours: case[theirs] for theirs, ours in NAMES.items() if case.get(theirs)},
        excluded=next((why for start, why in EXCLUDED.items() if name.startswith(start)), ""),
        cuda=cuda,
        attention=attention,
        cause=CAUSES.get(name, ""),
    )


def predict(case: Case) -> Row:
    """Return the case with its prediction, made in a process of its own: model files read their sizes
    once.
    """
    import_module("memtune.autotune.search.plan_report")  # once, not in every fork
    with get_context("fork").Pool(1) as pool:
        return pool.apply(_predict, (case,))


def _predict(case: Case) -> Row:
    os.environ |= {"MEMTUNE_CASE": json.dumps(case.sizes), "MEMTUNE_LEARN": "0"}
    sys.path.insert(0, str(MODELS))
    from memtune.autotune.search.plan_report import plan
    from memtune.autotune.space.search_options import PlanOptions
    from memtune.errors import MemtuneError

    with _as_stated(case), tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(case.config, file)
        file.flush()
        options = PlanOptions(
            workload=str(MODELS / case.model),
            ranks=case.gpus,
            gpu_type=case.gpu_type,
            config=Path(file.name),
        )
        try:
            found = plan(options).config
        except MemtuneError as error:
            return Row(case, "error", {}, {}, {}, str(error.what))
    if found is None or found.peak_allocated_bytes is None or found.step_s is None:
        return Row(case, "unfit", {}, {}, {}, found.reason if found else "")
    ranges = {
        name: tuple(found.details[f"{name}{bound}_bytes"] for bound in ("", "_low", "_high"))
        for name in ("allocated", "reserved", "device")
    }
    more = _more_outside(case)
    ranges["device"] = tuple(map(sum, zip(ranges["device"], more, strict=True)))
    middle, low, high = ({name: each[i] / 2.0**30 for name, each in ranges.items()} for i in range(3))
    step = (found.step_s, found.step_low_s or 0, found.step_high_s or 0)
    for values, seconds in zip((middle, low, high), step, strict=True):
        values["step"] = seconds
    return Row(case, found.status, middle, low, high, found.reason)


def _as_stated(case: Case) -> ExitStack:
    """Return what gives the table's hardware the source's node, and the roofline its attention kernel."""
    from memtune import hardware
    from memtune.hardware import roofline

    machine = replace(hardware.find(case.gpu_type), **case.hardware)
    found = ExitStack()
    found.enter_context(mock.patch.object(hardware, "find", return_value=machine))
    if case.attention:
        kernel = (("_attention", "", ATTENTION[case.attention][machine.architecture]),)
        found.enter_context(mock.patch.object(roofline, "_ATTENTION_ON_GPU", kernel))
    return found


def _more_outside(case: Case) -> tuple[int, int, int]:
    """Return by how much the context of the case's version of CUDA is larger than that of today's."""
    if not case.cuda:
        return 0, 0, 0
    from memtune.hardware import find
    from memtune.hardware.outside_allocator import context

    architecture = find(case.gpu_type).architecture
    then, now = context(architecture, case.cuda), context(architecture)
    return then.n_bytes - now.n_bytes, then.low_bytes - now.low_bytes, then.high_bytes - now.high_bytes


LEVEL = 0.9
"""Share of measurements that an interval should hold."""


def factors(rows: Iterable[Row], column: str) -> tuple[float, float] | None:
    """Return the range of measured over predicted that holds `LEVEL` of `rows`; None for fewer than five.

    It is the median's ratio ± a quantile of the logarithmic residuals (split conformal prediction).
    """
    logs = [-math.log(_ratio(row, column)) for row in rows if row.ratio(column) is not None]
    if len(logs) < 5:
        return None
    middle = statistics.median(logs)
    residuals = sorted(abs(each - middle) for each in logs)
    width = residuals[min(math.ceil((len(logs) + 1) * LEVEL), len(logs)) - 1]
    return math.exp(middle - width), math.exp(middle + width)


def held_by_others(rows: Sequence[Row], column: str) -> float | None:
    """Return the share of measurements within the range that the rows of all other sources give."""
    held: list[bool] = []
    for source in {row.case.source for row in rows}:
        given = factors((row for row in rows if row.case.source != source), column)
        mine = [row for row in rows if row.case.source == source and row.ratio(column) is not None]
        if given is not None:
            held += [given[0] <= 1 / _ratio(row, column) <= given[1] for row in mine]
    return sum(held) / len(held) if held else None


def summary(rows: Iterable[Row]) -> dict[str, Any]:
    """Return by column: number of cases, errors, share within an interval; of steps also ranks and bias by
    source.
    """
    counted = [row for row in rows if not row.case.excluded]
    found: dict[str, Any] = {}
    for column in COLUMNS:
        mine = [row for row in counted if row.ratio(column) is not None]
        if not mine:
            continue
        errors = [abs(_ratio(row, column) - 1) for row in mine]
        inside = [row.low[column] <= row.case.measured[column] <= row.high[column] for row in mine]
        found[column] = {
            "cases": len(mine),
            "median_error": statistics.median(errors),
            "worst_error": max(errors),
            "median_ratio": statistics.median(_ratio(row, column) for row in mine),
            "within_25_percent": sum(each <= 0.25 for each in errors) / len(mine),
            "inside_interval": sum(inside) / len(mine),
            "half_width": statistics.median(
                (row.high[column] - row.low[column]) / 2 / row.predicted[column] for row in mine
            ),
            "factors": factors(mine, column),
            "held_by_others": held_by_others(mine, column),
        }
    steps = [row for row in counted if row.ratio("step") is not None]
    found["sources"] = by_source(steps)
    found["bars"] = [asdict(bar) for bar in bars(found)]
    found["ranges"] = {
        name: {**asdict(each), "factors": each.factors, "held": each.held}
        for name, each in derive_all([row.to_dict() for row in counted]).items()
    }
    return found


def by_source(rows: Sequence[Row]) -> dict[str, Any]:
    """Return by source the ranks' correlation, and the ratios before and after one factor fitted to all other
    sources.
    """
    found = {}
    for source in sorted({row.case.source for row in rows}):
        mine = [row for row in rows if row.case.source == source]
        others = [_ratio(row, "step") for row in rows if row.case.source != source]
        ratio = statistics.median(_ratio(row, "step") for row in mine)
        factor = statistics.median(others) if others else 1.0
        measured, predicted = (
            [get(row) for row in mine] for get in (_measured_step, lambda row: row.predicted["step"])
        )
        found[source] = {
            "cases": len(mine),
            "median_ratio": ratio,
            "median_ratio_with_factor_of_others": ratio / factor,
            "rank_correlation": spearman(measured, predicted) if len(mine) > 2 else None,
            "pairs_in_order": pairs_in_order(measured, predicted),
        }
    return found


APART = 1.05
"""Ratio of two steps from which on their order counts: those of one setting on two days differ by less."""


def pairs_in_order(measured: Sequence[float], predicted: Sequence[float]) -> float | None:
    """Return the share of pairs measured at least `APART` apart that are predicted in the same order."""
    both = sorted(zip(measured, predicted, strict=True))
    right = [b[1] > a[1] for i, a in enumerate(both) for b in both[i + 1 :] if b[0] >= APART * a[0]]
    return sum(right) / len(right) if right else None


@dataclass(frozen=True)
class Bar:
    """One demand on predictions, and the value that they reach."""

    name: str
    limit: float
    reached: float
    is_met: bool
    cause: str = ""
    """Reason why it is missed."""


def bars(found: dict[str, Any]) -> list[Bar]:
    """Return what is asked of the columns of a summary; errors at most, shares and correlations at least."""
    asked = [(column, name, limit) for column, limits in MOST.items() for name, limit in limits.items()]
    made = [
        Bar(f"{column}: {name.replace('_', ' ')} at most", limit, reached, reached <= limit)
        for column, name, limit in asked
        if column in found
        for reached in [found[column][name]]
    ]
    shares = {
        f"{column}: inside interval at least": found[column]["inside_interval"]
        for column in MOST
        if column in found
    }
    if "step" in found:
        shares["step: within 25 percent at least"] = found["step"]["within_25_percent"]
    made += [Bar(name, LEVEL, reached, reached >= LEVEL) for name, reached in shares.items()]
    made += [
        Bar(
            f"step, {source}: rank correlation at least",
            RANKS,
            each["rank_correlation"],
            each["rank_correlation"] >= RANKS,
        )
        for source, each in found["sources"].items()
        if each["rank_correlation"] is not None
    ]
    return [bar if bar.is_met else replace(bar, cause=MISSES.get(bar.name, "")) for bar in made]


MOST = {
    "allocated": {"median_error": 0.03, "worst_error": 0.08, "half_width": 0.1},
    "reserved": {"median_error": 0.05, "worst_error": 0.12, "half_width": 0.1},
    "device": {"median_error": 0.05, "half_width": 0.1},
}
"""Column of memory → most of an error or of an interval's half-width, median over rows."""
RANKS = 0.95
"""Least rank correlation of steps within a source."""


def _measured_step(row: Row) -> float:
    return row.case.measured["step"]


def _ratio(row: Row, column: str) -> float:
    return row.predicted[column] / row.case.measured[column]


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation; equal values share the mean of their ranks."""
    return statistics.correlation(_ranks(first), _ranks(second))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(each) + (ordered.count(each) - 1) / 2 for each in values]


def _is_missing(case: Case, row: Row | None) -> bool:
    """Return whether a measurement of `case` has no prediction and no reason for it."""
    return row is None or bool(set(case.measured) - set(row.predicted) and not row.reason)


def _rows_of_absent(outputs: Sequence[Path], every: Sequence[Case]) -> list[str]:
    """Return the rows of the results at `outputs` that are no case of this run."""
    known = {case.id for case in every}
    documents = dict.fromkeys(path.with_suffix(".json") for path in outputs)
    return [row.case.id for path in documents for row in _read(path) if row.case.id not in known]


def main(arguments: Sequence[str] | None = None, *, say: Callable[[str], None] = print) -> int:
    """Predict, compare, write; return 0, or 2 if results would lose the rows of an absent folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="cases to predict; the others keep their results in --json")
    for name in ("--json", "--markdown", "--plot"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args(arguments)
    every, missing = cases()
    outputs = [path for path in (args.json, args.markdown, args.plot) if path]
    if missing and (lost := _rows_of_absent(outputs, every)):
        say(
            f"{len(lost)} rows of {outputs[0].with_suffix('.json')} would be lost: {missing}. Set {FOLDER}"
            " to the folder that holds cases.json, or write to other files"
        )
        return 2
    if missing:
        say(f"skipped: {missing}")
    kept = {row.case.id: row for row in _read(args.json)} if args.only is not None and args.json else {}
    rows = []
    for case in every:
        if args.only is None or case.id in args.only:
            rows.append(predict(case))
            say(line(rows[-1]))
            if args.json:  # what is done is kept if the run is stopped
                kept[case.id] = rows[-1]
                _write(args.json, kept.values(), missing)
        elif case.id in kept:
            rows.append(kept[case.id])
    found = summary(rows)
    for column in COLUMNS:
        if column in found:
            each = found[column]
            say(
                f"{column}: {each['cases']} cases, median {each['median_error']:.1%} off, worst"
                f" {each['worst_error']:.1%}, {each['inside_interval']:.0%} inside the interval"
            )
    if args.json:
        _write(args.json, rows, missing)
    if args.plot:
        args.plot.write_text(plot(rows))
    if args.markdown:
        there = {row.case.id: row for row in rows}
        left = [case.id for case in every if _is_missing(case, there.get(case.id))]
        args.markdown.write_text(markdown(rows, found, args.plot.name if args.plot else "", left))
    return 0


def _write(path: Path, rows: Iterable[Row], missing: str) -> None:
    rows = list(rows)
    document = {"rows": [row.to_dict() for row in rows], "summary": summary(rows), "skipped": missing}
    path.write_text(json.dumps(document, indent=1) + "\n")


def _read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    document = json.loads(path.read_text())
    return [Row(**{**each, "case": Case(**each["case"], sizes={}, config={})}) for each in document["rows"]]


def line(row: Row) -> str:
    """Return one case as a line: measured, predicted, error by column."""
    parts = [f"{row.case.id} {row.status}"]
    for column in COLUMNS:
        ratio = row.ratio(column)
        if ratio is not None and math.isfinite(ratio):
            measured, predicted = row.case.measured[column], row.predicted[column]
            parts.append(f"{column} {measured:.3g} predicted {predicted:.3g} ({ratio - 1:+.1%})")
    return "; ".join(parts) + (f"; {row.reason}" if row.status in ("unfit", "error") else "")


if __name__ == "__main__":
    raise SystemExit(main())
