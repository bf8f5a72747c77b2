"""Offload on one GPU: copies against bare ones, overlapped activation offload, a 7B fine-tune under 40 GiB,
the largest model.

    python benchmarks/gpu_offload.py                       # CUDA: all four; 10 minutes and more
    python benchmarks/gpu_offload.py link hidden           # the short ones
    python benchmarks/gpu_offload.py --resume fine-tune    # continue with the families that have not run
    python benchmarks/gpu_offload.py --device cpu          # the same code paths on CPU, with the tiny GPT
    python benchmarks/gpu_offload.py --predict h200        # only predictions, for a GPU of the table

Bars: copies reach 0.90 of a bare pinned copy's rate. Offloaded activations cost at most 1.03 of a step while
their copies take no longer than forward computes. The fastest family has 1.3 times the tokens per second of
DeepSpeed's ZeRO-Offload, where that is installed. The largest model has 0.90 of the parameters that card,
host and SSD together hold at 16 bytes each: weight and gradient in bf16; weight and two moments in fp32.
Predictions are made before each trial and stored together with its measurements, in
`benchmarks/results/<device name>/offload.json`. A budget is a cap on torch's allocator; the SSD is
MEMTUNE_OFFLOAD_DIR's.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu import REHEARSALS, ROOT, device_name, measured_before

import memtune.runtime.seam
from memtune import hardware
from memtune.autotune.record.recorder import record
from memtune.autotune.search.trials import run_trial
from memtune.autotune.space.candidates import Choice, Rewriter
from memtune.autotune.space.scoring import Scorer
from memtune.autotune.translate.translation import translate
from memtune.config.tuned_config import TunedConfig, load_config
from memtune.device import streams
from memtune.hardware.spec import Hardware
from memtune.offload.optimizer import host_capacity
from memtune.program.step import Recording
from memtune.runtime import transfer
from memtune.ssd import offload_dir
from memtune.technique import Reason, Target
from memtune.workload.workload import Workload

WORKLOAD = ROOT / "benchmarks" / "gpt_bf16.py"
GIB, CAP_GIB, BYTES_A_PARAMETER = 1 << 30, 40, 16
LINK_BAR, HIDDEN_BAR, PEER_BAR, LARGEST_BAR = 0.90, 1.03, 1.3, 0.90
FULL: dict[str, Any] = {"recompute": {"kind": "full"}}
MASTER = {"update": "master"}
FAMILIES: dict[str, dict[str, Any]] = {
    "zero_offload": {"offload": {"states": {"kind": "zero_offload", **MASTER}}},
    "optimizer_cpu": {"offload": {"states": {"kind": "optimizer_cpu", **MASTER}}},
    "patrickstar": {"offload": {"states": {"kind": "patrickstar"}}},
    "elixir": {"offload": {"states": {"kind": "elixir"}}},
    "zero_infinity": {"offload": {"states": {"kind": "zero_infinity", **MASTER}}},
}
LARGEST = {
    "chunks on card and host": {"offload": {"states": {"kind": "patrickstar"}}},
    "moments on SSD": {"offload": {"states": {"kind": "zero_infinity", **MASTER}}},
}
RATIOS = (0.125, 0.25, 0.5)
Row = dict[str, Any]


def rates(device: torch.device, n_bytes: int) -> list[Row]:
    """Return the rates of both directions: memtune's copies against bare ones between the same pinned and
    device memory.
    """
    host = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=transfer.pins(device))
    there = torch.empty(n_bytes, dtype=torch.uint8, device=device)
    ops = torch.ops.memtune

    def down() -> None:
        ops.copy_to_host_(host, there)
        transfer.finish(host)

    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "host_to_device": (
            lambda: ops.copy_to_device_(there, host),
            lambda: there.copy_(host, non_blocking=True),
        ),
        "device_to_host": (down, lambda: host.copy_(there, non_blocking=True)),
    }
    return [
        {
            "case": f"link {name}",
            "status": "ok",
            "bytes_per_s": (ours := _rate(mine, n_bytes, device)),
            "bare_bytes_per_s": (bare := _rate(plain, n_bytes, device)),
            "ratio": ours / bare,
            "bar": LINK_BAR,
        }
        for name, (mine, plain) in pairs.items()
    ]


def _rate(copy: Callable[[], object], n_bytes: int, device: torch.device) -> float:
    def timed() -> float:
        began = time.perf_counter()
        for _ in range(4):
            copy()
        streams.synchronize(device)
        return time.perf_counter() - began

    timed()
    return 4 * n_bytes / statistics.median(timed() for _ in range(5))


@functools.lru_cache(maxsize=1)
def _recording(micro_batch: int, machine: Hardware, sized: tuple[tuple[str, str], ...]) -> Recording:
    """Return the recording of the model that the environment `sized` selects."""
    return translate(record(Workload.load(WORKLOAD), sizes={micro_batch}, target=machine.device), machine)


def predicted(settings: Row, machine: Hardware, budget_bytes: int | None) -> tuple[Row, TunedConfig | None]:
    """Return the simulator's figures of `settings` with their config and plans, or why they do not fit."""
    sized = tuple(
        sorted((name, value) for name, value in os.environ.items() if name.startswith("MEMTUNE_GPT_"))
    )
    recording = _recording(settings["execution"]["micro_batch"], machine, sized)
    target = Target(machine, 1, budget_bytes)
    scorer, choice = Scorer(Rewriter(recording, target)), Choice.from_document(settings)
    scored, found = scorer.score(choice, level="events"), scorer.rewriter.candidate(choice)
    if isinstance(scored, Reason) or isinstance(found, Reason):
        return {"status": "unfit", "reason": str(scored if isinstance(scored, Reason) else found)}, None
    said = scored.prediction
    names = (
        "peak_allocated_bytes",
        "host_peak_bytes",
        "ssd_peak_bytes",
        "step_s",
        "samples_per_s",
        "busy_s",
        "exposed_s",
    )
    row = {"status": "predicted", "predicted": {name: getattr(said, name) for name in names}}
    return row, load_config({"settings": settings}).model_copy(update={"plan": dict(found.plans)})


def tried(row: Row, config: TunedConfig, device: str, budget_bytes: int | None, steps: int) -> Row:
    """Return `row` with the figures of a trial of `config` in a fresh process."""
    result = run_trial(
        str(WORKLOAD),
        config,
        device=device,
        executor="local",
        budget_bytes=budget_bytes,
        steps=steps,
        warmup_steps=1,
        deadline_s=480,
    )
    names = ("peak_allocated_bytes", "host_peak_bytes", "step_s", "samples_per_s", "link_bytes")
    measured = {name: getattr(result, name) for name in names}
    return {**row, "status": result.status, "reason": result.reason, "measured": measured}


def sequence(size: str) -> int:
    """Return the tokens per sample of examples/gpt.py."""
    return {"tiny": 64, "7b": 2048}[size]


class Bench:
    """The checks on one device; each yields its rows and receives those that have run before."""

    def __init__(self, device: str, machine: Hardware, *, runs: bool) -> None:
        self.device, self.machine, self.runs = device, machine, runs
        self.tiny = device in REHEARSALS

    def sized(self, size: str, **more: object) -> str:
        """Set the environment so that examples/gpt.py has this size, here and in trials; the tiny one on
        CPU.
        """
        size = "tiny" if self.tiny else size
        os.environ |= {"MEMTUNE_GPT_SIZE": size, "MEMTUNE_GPT_BF16": "0"}
        os.environ |= {f"MEMTUNE_GPT_{name}": str(value) for name, value in more.items()}
        return size

    def one(
        self, case: str, slots: Row, micro_batch: int, budget_bytes: int | None = None, steps: int = 3
    ) -> Row:
        """Return a prediction and, unless this run only predicts, a trial."""
        settings = {"execution": {"micro_batch": micro_batch}, **slots}
        row, config = predicted(settings, self.machine, budget_bytes)
        row = {"case": case, "settings": settings, **row}
        return (
            tried(row, config, self.device, budget_bytes, steps) if self.runs and config is not None else row
        )

    def link(self) -> list[Row]:
        """Yield rates of copies; they have no prediction."""
        return rates(torch.device(self.device), (16 << 20) if self.tiny else (512 << 20)) if self.runs else []

    def hidden(self) -> list[Row]:
        """Yield step times with activations on the host over those without."""
        self.sized("7b", LAYERS=16)
        rows = [self.one("hidden plain", {}, 4, steps=8)]
        for ratio in RATIOS:
            moved = {"kind": "pipelined", "ratio": ratio, "min_bytes": 0 if self.tiny else 1 << 20}
            rows.append(self.one(f"hidden ratio {ratio}", {"offload": {"activations": moved}}, 4, steps=8))
        del os.environ["MEMTUNE_GPT_LAYERS"]
        return rows

    def fine_tune(self, known: frozenset[str]) -> list[Row]:
        """Yield families of offload techniques under the cap, and DeepSpeed's ZeRO-Offload under the same."""
        size, rows = self.sized("7b"), []
        cap = (8 << 20) if self.tiny else CAP_GIB * GIB
        for name, slots in FAMILIES.items():
            case = f"fine-tune {name}"
            row = {"case": case} if case in known else self.one(case, {**slots, **FULL}, 4, cap)
            rows.append({**row, "tokens_a_sample": sequence(size)})
        compared = self.runs and not self.tiny and "fine-tune deepspeed" not in known
        return [*rows, *([deepspeed(cap, sequence(size))] if compared else [])]

    def largest(self, known: frozenset[str]) -> list[Row]:
        """Yield the deepest model that each technique is predicted to train; the largest of them is
        trained.
        """
        card = self.machine.usable_bytes(1) if not self.tiny else 64 << 20
        host, ssd = host_capacity.available_bytes() or 0, offload_dir.free_bytes() or 0
        limit = (card + host + ssd) // BYTES_A_PARAMETER
        best: tuple[int, str] = (0, "")
        for name, slots in LARGEST.items():
            best = max(best, (self._deepest(slots, card, host, ssd), name))
        layers, name = best
        self.sized("7b", LAYERS=max(layers, 1))
        case = f"largest {layers} layers, {name}"
        row = (
            {"case": case}
            if case in known or not layers
            else self.one(case, {**LARGEST[name], **FULL}, 1, card, steps=1)
        )
        held = {"card_bytes": card, "host_bytes": host, "ssd_bytes": ssd, "limit_parameters": limit}
        parameters = _parameters() if layers else 0
        del os.environ["MEMTUNE_GPT_LAYERS"]
        return [{**row, **held, "parameters": parameters, "share": parameters / limit, "bar": LARGEST_BAR}]

    def _deepest(self, slots: Row, card: int, host: int, ssd: int) -> int:
        """Return the largest number of layers that fits by the prediction; 0 if none does or there is no
        SSD.
        """
        low, high = 0, 9 if self.tiny else 257
        while high - low > 1:
            layers = (low + high) // 2
            self.sized("7b", LAYERS=layers)
            row, _ = predicted({"execution": {"micro_batch": 1}, **slots, **FULL}, self.machine, card)
            said = row.get("predicted")
            holds = said is not None and (
                max(said["peak_allocated_bytes"], 2 * _parameters())
                <= card  # whole on the card before it is divided
                and said["host_peak_bytes"] <= host
                and said["ssd_peak_bytes"] <= ssd
            )
            low, high = (layers, high) if holds else (low, layers)
        return low


def _parameters() -> int:
    with torch.device("meta"):
        return sum(each.numel() for each in Workload.load(WORKLOAD).build_model().parameters())


def deepspeed(cap_bytes: int, tokens: int) -> Row:
    """Run DeepSpeed's ZeRO-Offload in its own process: same model, cap and batch; skipped if not
    installed.
    """
    row: Row = {"case": "fine-tune deepspeed", "tokens_a_sample": tokens}
    if importlib.util.find_spec("deepspeed") is None:
        return {**row, "status": "skipped", "reason": "DeepSpeed is not installed"}
    done = subprocess.run(
        [sys.executable, __file__, "--deepspeed", str(cap_bytes)], capture_output=True, text=True
    )
    if done.returncode:
        return {**row, "status": "skipped", "reason": f"it failed: {done.stderr[-800:]}"}
    return {**row, "status": "ok", "measured": json.loads(done.stdout.splitlines()[-1])}


def train_with_deepspeed(cap_bytes: int) -> Row:
    """Train with ZeRO stage 2, the optimizer on the host, in bf16, blocks checkpointed."""
    import deepspeed as peer
    from torch.utils.checkpoint import checkpoint

    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29511",
    }
    torch.cuda.set_per_process_memory_fraction(cap_bytes / torch.cuda.get_device_properties(0).total_memory)
    workload = Workload.load(WORKLOAD)
    model = workload.build_model().train()
    for name in workload.find_blocks(model):
        block = model.get_submodule(name)
        block.forward = lambda x, forward=block.forward: checkpoint(forward, x, use_reentrant=False)
    engine, *_ = peer.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        },
    )
    times = []
    for _ in range(4):
        batch = memtune.workload.workload.to_device(workload.make_batch(4), torch.device("cuda", 0))
        torch.cuda.synchronize()
        began = time.perf_counter()
        engine.backward(workload.loss(engine, batch))
        engine.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    step_s = statistics.median(times[1:])
    return {
        "step_s": step_s,
        "samples_per_s": 4 / step_s,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
    }


def judged(rows: list[Row], machine: Hardware) -> Row:
    """Return the figures compared with the bars; a check without measured rows has none."""
    ran = {row["case"]: row for row in rows if row.get("status") == "ok"}
    found: Row = {
        f"{row['case']} ratio": row["ratio"] for row in ran.values() if row["case"].startswith("link")
    }
    plain = ran.get("hidden plain")
    for case, row in ran.items():
        if plain is not None and case.startswith("hidden ratio"):
            moved, step_s = (
                row["measured"]["link_bytes"].get("device_to_host", 0),
                plain["measured"]["step_s"],
            )
            fits = (
                moved / machine.host_to_device_bytes_per_s <= step_s / 3
            )  # forward is a third of forward and backward
            found[case] = {
                "step_by_plain": row["measured"]["step_s"] / step_s,
                "link_suffices": fits,
                "bar": HIDDEN_BAR,
            }
    tuned = {
        case: row["measured"]["samples_per_s"] for case, row in ran.items() if case.startswith("fine-tune")
    }
    peer = tuned.pop("fine-tune deepspeed", None)
    if tuned:
        tokens = next(row["tokens_a_sample"] for row in ran.values() if "tokens_a_sample" in row)
        found["fine-tune tokens a second"] = {case: rate * tokens for case, rate in tuned.items()}
        found["fine-tune by DeepSpeed"] = max(tuned.values()) / peer if peer else None
    found |= {
        case: {"share": row["share"], "bar": LARGEST_BAR}
        for case, row in ran.items()
        if case.startswith("largest")
    }
    return found


def main() -> int:
    """Run the requested checks and write after each; return exit code 1 if a trial failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    checks = ("link", "hidden", "fine-tune", "largest")
    parser.add_argument(
        "checks", nargs="*", metavar="CHECK", help=f"of {', '.join(checks)}; all where none is given"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", *REHEARSALS))
    parser.add_argument(
        "--predict", metavar="GPU", help="predictions for this GPU alone, to offload-GPU.json"
    )
    parser.add_argument("--resume", action="store_true", help="keep what the results already have")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--deepspeed", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.deepspeed:
        print(json.dumps(train_with_deepspeed(asked.deepspeed)))
        return 0
    if unknown := set(asked.checks) - set(checks):
        parser.error(f"no check is called {', '.join(sorted(unknown))}")
    machine = hardware.find(asked.predict) if asked.predict else hardware.detect(asked.device)
    bench = Bench(machine.device if asked.predict else asked.device, machine, runs=not asked.predict)
    place = asked.results / (
        f"offload-{asked.predict}.json" if asked.predict else f"{device_name(asked.device)}/offload.json"
    )
    place.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(place.read_text())["cases"] if place.exists() else []
    rows = {row["case"]: row for row in before}
    known = frozenset(case for case, row in rows.items() if asked.resume and row.get("status") == "ok")
    run: dict[str, Callable[[], list[Row]]] = {
        "link": bench.link,
        "hidden": bench.hidden,
        "fine-tune": lambda: bench.fine_tune(known),
        "largest": lambda: bench.largest(known),
    }
    for check in asked.checks or checks:
        new = measured_before(place, run[check](), asked.resume)
        rows |= {row["case"]: row for row in new}
        place.write_text(
            json.dumps(
                {"judged": judged(list(rows.values()), machine), "cases": list(rows.values())}, indent=1
            )
            + "\n"
        )
        for row in new:
            print(
                row["case"],
                row.get("status"),
                row.get("reason", ""),
                row.get("measured") or row.get("predicted") or "",
                flush=True,
            )
    print(json.dumps(judged(list(rows.values()), machine)))
    return int(any(row.get("status") in ("oom", "crash", "timeout") for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
