"""One small-op workload, its recording, and its steps under memtune's techniques and under stock PyTorch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from memtune import hardware
from memtune.api import Tuned, apply
from memtune.autotune.record.recorder import record
from memtune.program.step import Program, RankClass
from memtune.search_spaces import find
from memtune.search_spaces.recompute._block_planner.fits import is_matmul_or_attention
from memtune.technique import Plan, Target, Technique
from memtune.workload.workload import Workload

SMALL = Path(__file__).parent / "small_ops"
MODELS = tuple(sorted(path.stem for path in SMALL.glob("*.py")))
BATCH = 4
Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A model of `small_ops`."""

    name: str

    @cached_property
    def source(self) -> ModuleType:
        """The file's functions."""
        spec = importlib.util.spec_from_file_location(f"small_ops_{self.name}", self.path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    @property
    def path(self) -> Path:
        """The file."""
        return SMALL / f"{self.name}.py"

    @cached_property
    def workload(self) -> Workload:
        """The file as memtune loads it."""
        return Workload.load(self.path)

    @cached_property
    def recording(self) -> Any:
        """The recording, at one batch size."""
        return record(self.workload, sizes={BATCH})

    @cached_property
    def program(self) -> Program:
        """The recorded program on one rank."""
        return Program((RankClass(1, self.recording.at(BATCH)),), BATCH)

    @cached_property
    def target(self) -> Target:
        """This CPU."""
        return Target(hardware.detect("cpu"), 1, None)

    @cached_property
    def batch(self) -> Any:
        """The micro-batch of all steps."""
        torch.manual_seed(1)
        return self.source.batch(BATCH)

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the repeated blocks."""
        return tuple(self.recording.at(BATCH).blocks)

    def build(self) -> nn.Module:
        """Return the model with the same weights each time."""
        torch.manual_seed(0)
        model: nn.Module = self.source.model()
        return model

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Step:
        """Return a training step; without an optimizer gradients are dropped."""
        loss, batch, parameters = self.source.loss, self.batch, list(model.parameters())

        def run() -> None:
            loss(model, batch).backward()
            if optimizer is not None:
                optimizer.step()
            for each in parameters:
                each.grad = None

        return run

    def planned(self, technique: Technique) -> tuple[Plan, int]:
        """Return the technique's plan and the peak of the program under it."""
        plan = technique.plan(self.program, self.target)
        return plan, technique.rewrite(self.program, plan, self.target).step.peak_bytes()

    def with_optimizer(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return a fresh model and its optimizer."""
        model = self.build()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def tuned_model(self, slot: str, kind: str, **knobs: Any) -> nn.Module:
        """Return the model under one technique of memtune."""
        return self._tuned(slot, kind, knobs).model

    def tuned(self, slot: str, kind: str, *, updates: bool = False, **knobs: Any) -> Step:
        """Return the step under one technique of memtune; it `updates` the weights, or drops gradients."""
        tuned = self._tuned(slot, kind, knobs)
        if not updates:
            return self.step(tuned.model)
        loss, batch = self.source.loss, self.batch

        def run() -> None:
            loss(tuned.model, batch).backward()
            tuned.optimizer.step()
            tuned.optimizer.zero_grad(set_to_none=True)

        return run

    def _tuned(self, slot: str, kind: str, knobs: dict[str, Any]) -> Tuned:
        technique = find(slot, kind)(kind=kind, **knobs)
        axis, _, rest = slot.partition(".")
        dumped = technique.model_dump(mode="json")
        document: dict[str, Any] = {"settings": {axis: {rest: dumped} if rest else dumped}}
        if technique.plan_types:
            document["plan"] = {slot: technique.plan(self.program, self.target).document()}
        return self.applied(document)

    def applied(self, document: dict[str, Any], **more: Any) -> Tuned:
        """Return a fresh model under a config."""
        return apply(*self.with_optimizer(), document, **more)

    def checkpointed(self, *, selective: bool = False) -> Step:
        """Return the step under torch's checkpoint of each block, as one writes it by hand."""
        model = self.build()
        more: dict[str, Any] = (
            {"context_fn": partial(create_selective_checkpoint_contexts, _policy)} if selective else {}
        )
        for name in self.blocks:
            block = model.get_submodule(name)
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **more)
        return self.step(model)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE if is_matmul_or_attention(str(op)) else CheckpointPolicy.PREFER_RECOMPUTE
    )
