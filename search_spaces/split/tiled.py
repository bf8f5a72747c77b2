"""Head and cross-entropy over parts of the tokens: the logits of all of them never exist at once."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from memtune.passes.loss_pattern import LossPattern, loss_pattern
from memtune.passes.tiled_loss import tile_loss
from memtune.program import Program, Step
from memtune.runtime.context import Context
from memtune.runtime.lazy_head import install_lazy_head
from memtune.technique import Exactness, Plan, Reason, Target, Technique

_WORTH = 0.05
"""Logits that take less of the step's peak than this are left whole."""


class Tiled(Technique):
    """Trades `chunks` small products for one large one; saves the logits, their log-probabilities and both gradients.

    The head's output is computed where the loss reads it, part by part, and goes back to the gradients of head and hidden states
    at once, so nothing runs twice. Model and loss function stay as they are: views, casts and element-wise ops between head and
    `F.cross_entropy` are followed; whatever else reads the logits gets them whole, as the plain model makes them.

    Reordered: a weight's gradient is the sum of n parts, each rounded once, and the mean's 1/N is put on after the sum and not
    before. Both differ from the plain gradient by at most (n + 2)·eps·Σ|part| beside what the plain sum itself rounds.

    Distinguishing test: a step holds at most 1/chunks of the logits at any moment, and runs as many FLOPs as the plain one.
    """

    kind: Literal["tiled"] = "tiled"
    slot: ClassVar[str] = "split"
    title: ClassVar[str] = "Logits and loss in parts"
    source: ClassVar[str] = "Nie et al. 2022, TSPLIT, ICDE 22; Rajbhandari et al. 2021, ZeRO-Infinity, arXiv:2104.07857, tiling"
    exactness: ClassVar[Exactness] = Exactness.REORDERED
    eager_only: ClassVar[str] = "compiled graphs make the logits themselves"

    chunks: Annotated[int, Field(ge=2, le=1024)] = 8
    """Parts of the tokens; more of them take fewer bytes and more, smaller kernels."""

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs one cross-entropy over a linear head that nobody else reads, and logits that matter."""
        if target.compiled:
            return Reason(self.eager_only, "execution.compile: false")
        pattern = loss_pattern(program.step)
        if isinstance(pattern, str):
            return Reason(pattern)
        if pattern.head == "(outside)":
            return Reason("the logits are made outside of the model", "the head's product in the model's forward")
        if pattern.rows < self.chunks:
            return Reason(f"there are {pattern.rows} tokens, fewer than {self.chunks} parts", "fewer chunks")
        share = _logits_bytes(program.step, pattern) / max(program.step.peak_bytes(), 1)
        if share < _WORTH:
            return Reason(f"the logits are {share:.1%} of the peak")
        return None

    def plan(self, program: Program, target: Target) -> Plan:
        """Which module makes the logits, and with which weight."""
        pattern = _pattern(program.step)
        weight = pattern.step.parameters[pattern.step.parameter_of[pattern.weight.plain]].name
        return Plan(decisions={"head": pattern.head, "weight": weight})

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Head, loss and their gradients part by part in forward; backward scales the gradients."""
        return program.with_step(tile_loss(_pattern(program.step), self.chunks))

    def apply(self, context: Context, plan: Plan) -> None:
        """Make the head return logits that are computed where they are read."""
        decided = plan.decisions
        install_lazy_head(context, decided.get("head"), chunks=self.chunks, weight=decided.get("weight"))

    def record(self, target: Target) -> dict[str, Any]:
        """What is cut, and into how many parts."""
        return {"split.logits": {"chunks": self.chunks}}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """Few parts, and many where the logits still set the peak."""
        return {"chunks": (8, 32)}


def _pattern(step: Step) -> LossPattern:
    pattern = loss_pattern(step)
    if isinstance(pattern, str):
        raise ValueError(f"asked to tile a loss that does not fit: {pattern}")
    return pattern


def _logits_bytes(step: Step, pattern: LossPattern) -> int:
    """Most bytes of logits, and what is made of them, at any moment of the step."""
    storages = np.asarray([*pattern.made[:-1], *pattern.gradients])
    moments = np.asarray([*pattern.forward, *pattern.backward, *(each.op for each in (pattern.dx, pattern.dweight) if each)])
    live = (step.producer[storages] <= moments[:, None]) & (step.end[storages] >= moments[:, None])
    return int((live * step.bytes[storages]).sum(1).max())
