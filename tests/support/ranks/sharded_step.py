"""One step of plain SGD over this rank's samples under FSDP2, or over the whole batch without ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from memtune.api import apply
from memtune.technique import Technique
from memtune.testing.training import build, config_of


def sharded_step(path: str, technique: Technique | None) -> dict[str, Any]:
    """Return weights before and after the step, and the audit."""
    workload, model, _ = build(Path(path))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.manual_seed(3)
    inputs, targets = workload.make_batch(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    config: dict[str, Any] = {"settings": {}} if technique is None else config_of(Path(path), technique)
    if torch.distributed.is_initialized():
        config["settings"]["sharding"] = {"states": {"kind": "fsdp"}}
        mine = slice(torch.distributed.get_rank(), torch.distributed.get_rank() + 1)
        inputs, targets = inputs[mine], targets[mine]
    tuned = apply(model, optimizer, config, loss=workload.loss, strict=False)
    tuned.step([(inputs, targets)])
    return {"before": before, "after": tuned.state_dict()["model"], "audit": tuned.audit()}
