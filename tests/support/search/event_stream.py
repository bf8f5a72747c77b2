"""A realistic search as events, for tests of the display; `python event_stream.py tui LOG` shows it."""

import sys
import time

from memtune.autotune.search.control import Control
from memtune.autotune.search.search_events import (
    BestChanged,
    Calibrated,
    CandidatesScored,
    EventLog,
    Note,
    Paused,
    Recorded,
    Resumed,
    SearchFinished,
    SearchStarted,
    TrialCancelled,
    TrialFinished,
    TrialProgress,
    TrialPruned,
    TrialStarted,
)
from memtune.executors.base import TrialResult

MIB = 2**20
BUDGET_BYTES = 600 * MIB
# number, role, name, status, peak MiB, samples/s, summary
TRIALS = [
    (0, "baseline", "plain", "oom", 600, None, "all left as they are"),
    (1, "baseline", "full recompute", "ok", 388, 12.1, "recompute full"),
    (2, "baseline", "plain fsdp", "oom", 600, None, "sharding.states fsdp"),
    (3, "search", "", "ok", 512, 16.4, "recompute selective · fsdp · micro-batch 4"),
    (4, "search", "", "ok", 571, 18.9, "recompute every_nth(2) · fsdp · micro-batch 8"),
    (5, "audit", "", "oom", 600, None, "fsdp · copy_out(0.25) · micro-batch 16"),
    (
        6,
        "search",
        "",
        "ok",
        430,
        14.2,
        "recompute selective · optimizer_cpu · copy_out(0.5) · expandable_segments",
    ),
    (7, "search", "", "crash", None, None, "recompute full · optimizer_cpu · micro-batch 2"),
    (8, "search", "", "ok", 455, 15.0, "recompute full · fsdp · micro-batch 8"),
    (9, "confirm", "", "ok", 571, 18.8, "recompute every_nth(2) · fsdp · micro-batch 8"),
]
SETTINGS = {
    "execution": {"micro_batch": 8, "accumulate": 2},
    "recompute": {"kind": "every_nth", "n": 2},
    "sharding": {"states": {"kind": "fsdp", "degree": 2}},
}
REASONS = {
    "oom": "aten::addmm asked for 24 MiB with 590 MiB of 600 MiB live",
    "crash": "rank 1: RuntimeError: shapes differ",
}
MEMORY_BY_KIND = {
    "parameters": 60 * MIB,
    "gradients": 60 * MIB,
    "optimizer": 120 * MIB,
    "activations": 300 * MIB,
}


def opening() -> list:
    return [
        SearchStarted(
            study="gpt-7f3a",
            workload="examples/gpt.py",
            device="cpu",
            ranks=2,
            hardware="CPU core",
            budget_bytes=BUDGET_BYTES,
            max_trials=10,
            time_limit_s=300.0,
            n_parameters=30_000_000,
            parameter_bytes=120_000_000,
            global_batch=32,
        ),
        Recorded(rung="all fake", record_s=2.1, n_ops=1234, blocks=6, plain_peak_bytes=812 * MIB),
        CandidatesScored(n_candidates=214, n_merged=30, n_pruned=2, n_unfit=4, score_s=0.2),
        *(
            TrialPruned(
                number=100 + i,
                settings=SETTINGS,
                summary="fsdp · micro-batch 32",
                predicted_peak_bytes=(900 + i) * MIB,
                peak_low_bytes=(850 + i) * MIB,
                budget_bytes=BUDGET_BYTES,
                reason="activations of 6 blocks",
            )
            for i in range(2)
        ),
    ]


def trial_events(row: tuple) -> list:
    number, role, name, status, peak, rate, summary = row
    common = {
        "number": number,
        "role": role,
        "name": name,
        "settings": SETTINGS,
        "summary": summary,
        "predicted_peak_bytes": int((peak or 400) * 1.03 * MIB),
        "predicted_step_s": 32 / (rate or 15) * 0.94,
    }
    result = TrialResult(
        number=number,
        status=status,
        wall_s=4.2,
        reason=REASONS.get(status, ""),
        log_tail="\n".join(f"log line {i}" for i in range(40)) if status == "crash" else "",
        peak_allocated_bytes=peak * MIB if peak else None,
        step_s=32 / rate if rate else None,
        step_s_all=[32 / rate, 32 / rate * 1.02] if rate else [],
        samples_per_s=rate,
        losses=[4.3, 4.2, 4.1] if rate else [],
        memory_by_kind=MEMORY_BY_KIND if rate else {},
    )
    events = [TrialStarted(**common), TrialProgress(number=number, stage="building", device_bytes=60 * MIB)]
    events += [
        TrialProgress(number=number, stage=f"step {i}/4", device_bytes=(peak or 300) * MIB * (6 + i) // 10)
        for i in (1, 2, 3, 4)
    ]
    events.append(TrialFinished(**common, result=result))
    if status == "ok" and role != "confirm" and rate in (12.1, 16.4, 18.9):
        events.append(BestChanged(number=number, summary=summary, samples_per_s=rate, peak_bytes=peak * MIB))
        events.append(Calibrated(peak_error=0.031, step_error=0.068, n_trials=number))
    if status == "oom" and role == "baseline":
        events.append(Note(text=f"#{number} out of memory as predicted; 14 similar candidates pruned"))
    return events


def closing() -> list:
    return [SearchFinished(status="done", out="tuned.yaml", best_number=4, confirmed=True)]


def all_events() -> list:
    return opening() + [event for row in TRIALS for event in trial_events(row)] + closing()


def search(path: str, control: Control, pause_s: float = 0.12) -> str:
    """Write the search into a log, and follow requests of `control` as a real search does."""
    control.begin()
    with EventLog(path) as log:
        paused, best = False, None
        for event in opening() + [event for row in TRIALS for event in trial_events(row)]:
            while control.paused:
                if not paused:
                    log.write(Paused())
                paused = True
                time.sleep(0.02)
            if paused:
                log.write(Resumed())
                paused = False
            if control.stopping:
                log.write(TrialCancelled(number=getattr(event, "number", 0), reason="the search was stopped"))
                log.write(
                    SearchFinished(
                        status="stopped", out="tuned.yaml" if best is not None else None, best_number=best
                    )
                )
                return "stopped"
            log.write(event)
            best = event.number if isinstance(event, BestChanged) else best
            time.sleep(pause_s)
        for event in closing():
            log.write(event)
    return "done"


if __name__ == "__main__":
    how, path = sys.argv[1:3]
    pause_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.12
    control = Control()
    if how == "tui":
        from memtune.autotune.ui.tui import with_tui as show
    else:
        from memtune.autotune.ui.line_printer import with_lines as show
    print("result:", show(lambda: search(path, control, pause_s), path, control))
    print("exit:", control.exit_code)
    sys.exit(control.exit_code)
