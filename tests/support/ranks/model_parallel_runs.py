"""Shared runs of model parallelism: candidates, five steps on each rank, peaks."""

from __future__ import annotations

import gc
import os
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from support.ranks.gloo_memory import freed_to
from torch import nn

from memtune import hardware
from memtune.api import apply
from memtune.autotune.record.recorder import record
from memtune.autotune.record_parallel.sharded_recording import ShardedRecordings
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.autotune.translate import translate
from memtune.memory import cpu_allocator
from memtune.memory.ledger import Ledger
from memtune.runtime import node_topology
from memtune.runtime.memory_tiers import HOST, tier
from memtune.runtime.training_step import train_step, upload
from memtune.runtime.transfer import COUNTERS
from memtune.technique import Reason, Target
from memtune.testing.training import build
from memtune.workload.workload import Workload

MODELS = Path(__file__).parents[1] / "models" / "parallel"
SEPARATE, UNDRAWN = MODELS / "separate.py", MODELS / "undrawn.py"
STEPS, SIZE = 3, 2


def settings(kind: str, accumulate: int = 1, **knobs: Any) -> dict[str, Any]:
    return {
        "execution": {"micro_batch": SIZE, "accumulate": accumulate},
        "sharding": {"parallel": {"kind": kind, **knobs}},
    }


@cache
def rewriter(path: Path, ranks: int = 2, device: str = "cpu") -> Rewriter:
    workload, on = Workload.load(path), hardware.detect(device)
    plain, to_device = record(workload, target=device), partial(translate, hardware=on)
    cut = ShardedRecordings(workload, plain, translate=to_device, target=device)
    return Rewriter(to_device(plain), Target(on, ranks, sharded=cut))


def candidate(
    kind: str, path: Path = SEPARATE, ranks: int = 2, other_slots: dict[str, Any] | None = None, **knobs: Any
) -> Candidate:
    """Return the candidate of `kind`; `knobs` may contain `accumulate`."""
    found = rewriter(path, ranks).candidate(
        Choice.from_document({**settings(kind, **knobs), **(other_slots or {})})
    )
    assert isinstance(found, Candidate), found
    return found


def config(
    kind: str, ranks: int = 2, other_slots: dict[str, Any] | None = None, path: Path = SEPARATE, **knobs: Any
) -> dict[str, Any]:
    made = candidate(kind, path, ranks, other_slots, **knobs)
    plan = {slot: plan.document() for slot, plan in made.plans.items()}
    return {"settings": {**settings(kind, **knobs), **(other_slots or {})}, "plan": plan}


def refusal(kind: str, path: Path = SEPARATE, other_slots: dict[str, Any] | None = None, **knobs: Any) -> str:
    found = rewriter(path).candidate(Choice.from_document({**settings(kind, **knobs), **(other_slots or {})}))
    assert isinstance(found, Reason)
    return str(found)


# -- on gloo ranks -------------------------------------------------------------------------------------------


def seeded(rotated: tuple[int, Any], device: torch.device) -> Any:
    """Upload a rotated micro-batch and set its seed, as `parallel.ranks.micro_batch_rotation` does."""
    seed, batch = rotated
    torch.manual_seed(seed)
    return upload(batch, device)


def trained(
    ranks: int,
    document: dict[str, Any] | None,
    clip: bool = False,
    accumulate: int = 1,
    dropout: bool = False,
    path: Path = SEPARATE,
    momentum: bool = False,
) -> dict[str, Any]:
    """Train five steps; each rank provides its own samples, the plain run (one rank) has all of them.

    With `dropout`, all of one group: the plain run draws the numbers of the rotated micro-batches. With
    `momentum`, SGD instead of AdamW.
    """
    workload, model, optimizer = build(path)
    if momentum:
        optimizer = torch.optim.SGD(
            [p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9, weight_decay=0.01
        )
    if not dropout:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    tuned = apply(model, optimizer, document, loss=workload.loss, strict=False) if document else None
    rank = torch.distributed.get_rank() if document else 0
    losses, norms = [], []

    def clipped(*_: Any) -> None:
        """Return norms of all gradients at once and one after the other, which torch dispatches
        differently.
        """
        at_once = len(norms) % 2 == 0
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=at_once)))

    if clip:
        optimizer.register_step_pre_hook(clipped)
    for step in range(STEPS):
        torch.manual_seed(step)
        batches = [workload.make_batch(SIZE) for _ in range(ranks * accumulate)]
        seeds = []
        for each in range(ranks):
            torch.manual_seed(100 * step + each)
            seeds.append(torch.randint(2**62, (accumulate,)).tolist())
        if tuned is not None:
            torch.manual_seed(100 * step + rank)
            losses.append(float(tuned.step(batches[rank * accumulate :][:accumulate])))
        else:
            ordered = [
                (seeds[each][n], batches[each * accumulate + n])
                for n in range(accumulate)
                for each in range(ranks)
            ]
            losses.append(
                float(
                    train_step(model, optimizer, workload.loss, ordered, torch.device("cpu"), upload=seeded)
                )
            )
    state = (
        tuned.state_dict()
        if tuned is not None
        else {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    )
    audit = tuned.audit() if tuned is not None else {}
    return {
        "losses": losses,
        "norms": norms,
        "model": state["model"],
        "optimizer": state["optimizer"]["state"],
        "audit": audit,
    }


def assert_trained_as_one(found: list[dict[str, Any]], wanted: dict[str, Any], atol: float = 1e-6) -> None:
    """Compare with one rank. AdamW divides by the gradient's size, so `atol` covers rounding of tiny
    gradients.
    """
    mean = torch.tensor([each["losses"] for each in found]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(wanted["losses"]), rtol=1e-6, atol=1e-6)
    for each in found:
        assert list(each["model"]) == list(wanted["model"])
        torch.testing.assert_close(each["model"], wanted["model"], rtol=1e-5, atol=atol)
        torch.testing.assert_close(each["norms"], wanted["norms"], rtol=1e-6, atol=1e-6)
        assert each["optimizer"].keys() == wanted["optimizer"].keys()
        for index, state in wanted["optimizer"].items():
            name = "exp_avg" if "exp_avg" in state else "momentum_buffer"
            torch.testing.assert_close(each["optimizer"][index][name], state[name], rtol=1e-4, atol=1e-6)


def peak(document: dict[str, Any], path: Path | None = None) -> int:
    """Return the least ledger peak of three steps after the first two."""
    ledger = Ledger.open("cpu")
    empty = freed_to(ledger)
    workload, model, optimizer = build(path or SEPARATE)
    tuned = apply(model, optimizer, document, loss=workload.loss, strict=False)
    peaks, how = [], document["settings"]["execution"]
    for _ in range(5):
        with tier(HOST):
            batches = [workload.make_batch(how["micro_batch"]) for _ in range(how["accumulate"])]
        ledger.reset_peak()
        tuned.step(batches)
        peaks.append(ledger.peak_allocated_bytes() - empty)
    return min(peaks[2:])  # steps are alike, and messages that gloo still holds add to some


Measured = dict[str, tuple[int, int, int]]


def bytes_received(document: dict[str, Any], path: Path = SEPARATE) -> tuple[int, int]:
    """Return the bytes that a step receives inside a node and between nodes."""
    workload, model, optimizer = build(path)
    tuned = apply(model, optimizer, document, loss=workload.loss, strict=False)
    batches = [workload.make_batch(SIZE) for _ in range(document["settings"]["execution"]["accumulate"])]
    COUNTERS.take()
    tuned.step(batches)
    counted = COUNTERS.take()
    return counted.get("intra_link", 0), counted.get("inter_link", 0)


def measured(documents: dict[str, dict[str, Any]], node: int = 8, path: Path = SEPARATE) -> Measured:
    """Return per config the ledger's peak, and the bytes that a step receives inside a node and between
    nodes.
    """
    os.environ["LOCAL_WORLD_SIZE"] = str(node)
    found = {}
    for name, document in documents.items():
        gc.collect()  # the model before is in cycles
        highest = peak(document, path) if cpu_allocator.available() is None else 0
        found[name] = (highest, *bytes_received(document, path))
        node_topology.declare(None)
    return found
