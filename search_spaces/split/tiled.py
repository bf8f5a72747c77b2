"""Run head and cross-entropy, MLPs and norms over parts of the tokens, so that logits and inner activations
of all tokens never exist at once.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from memtune import refusals
from memtune.activations.tiling import (
    LossPattern,
    PositionWise,
    Tiling,
    install_lazy_head,
    install_tiled_modules,
    loss_pattern,
    norms,
    position_wise,
    tile_loss,
    tile_regions,
)
from memtune.effects import Effects
from memtune.errors import ApplyError
from memtune.program import Program, Step
from memtune.runtime import Context
from memtune.technique import Exactness, Plan, Reason, Target, Technique

_WORTH = 0.05
"""Fraction of the step's peak from which logits, or what MLPs or norms save, are cut."""
_KEEPS_PRODUCTS = {"activations.recompute": {"every": 1, "keep": "matmul_and_attention"}}
"""The record of `selective`. It selects matrix products by op name, so it would keep the products of all
parts, which tiling is to free.
"""


class TiledPlan(Plan):
    """The module that makes the logits, and the modules of the blocks that run in parts."""

    head: str | None = None
    """Module that makes the logits, "" for the model; None: the widest linear layer outside blocks."""
    weight: str | None = None
    """Name of the head's weight."""
    mlps: tuple[str, ...] | None = None
    """Names of the MLPs in parts."""
    norms: tuple[str, ...] | None = None
    """Names of the norms in parts."""


class Tiled(Technique):
    """Runs the head's product in `chunks` smaller products instead of a large one, and so never holds all
    logits, their log-probabilities and both gradients.

    The head's output is computed where the loss reads it, part by part, and its gradient is passed on to head
    and hidden states at once, so nothing runs twice. Model and loss function stay unchanged: views, casts and
    element-wise ops between head and `F.cross_entropy` are followed; any other reader of the logits gets all
    of them, as in the plain model.

    `mlp` does the same to position-wise modules in blocks (Linear, activation, Linear, with norms inside):
    they save their input alone, and each part's forward runs again just before its backward. `norm` does it
    to norms: in plain ops, or in float32 over bfloat16 inputs, they save up to three tensors as large as
    their input; fused norms save nothing worth cutting.

    Reordered: a weight's gradient is the sum of n parts, each rounded once, and the mean's 1/N is applied
    after the sum and not before. Both differ from the plain gradient by at most (n + 2)·eps·Σ|part|, in
    addition to the rounding of the plain sum itself.
    """

    kind: Literal["tiled"] = "tiled"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (TiledPlan,)
    title: ClassVar[str] = "Logits and loss, MLPs and norms in parts"
    source: ClassVar[str] = (
        "Nie et al. 2022, TSPLIT, ICDE 22; Rajbhandari et al. 2021, ZeRO-Infinity, arXiv:2104.07857, tiling"
    )
    paper: ClassVar[str] = "ZeRO-Infinity, TSPLIT"
    exactness: ClassVar[Exactness] = Exactness.REORDERED

    chunks: Annotated[int, Field(ge=1, le=1024)] = 8
    """Parts of the tokens in head and loss; more take fewer bytes and more, smaller kernels. 1: not cut."""
    mlp: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of parts of the tokens in every MLP of the blocks, with the norms inside it; each part runs
    again in backward. 1: not cut.
    """
    norm: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of parts of the tokens in every norm of the blocks that saves more than its input, except norms
    that `mlp` cuts. 1: not cut.
    """

    def sentence(self) -> str:
        """Return the setting as one clause."""
        counts = (("logits and loss", self.chunks), ("MLPs", self.mlp), ("norms", self.norm))
        parts = [f"{name} in {n} parts" for name, n in counts if n > 1]
        return f"computes {', '.join(parts) or 'every op whole'}"

    @property
    def effects(self) -> Effects:
        return Effects(
            calls="parts" if self.mlp > 1 else "plain",
            eager_only="compiled graphs make the logits themselves",
        )

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Refuse other losses than one cross-entropy over a linear head, and tensors too small to matter."""
        if target.compiled:
            return Reason(self.effects.eager_only, "execution.compile: false")
        if self.chunks == self.mlp == self.norm == 1:
            return Reason("nothing is cut", "split: {kind: none}")
        reason = None if self.mlp == 1 else self._mlp_fits(program.step, target)
        if reason is None and self.norm > 1:
            reason = self._norm_fits(program.step)
        return reason if reason is not None or self.chunks == 1 else self._loss_fits(program.step)

    def _mlp_fits(self, step: Step, target: Target) -> Reason | None:
        regions = position_wise(step)
        if not regions:
            return Reason("no module in the blocks is a position-wise MLP", "mlp: 1")
        reason = _too_little(step, regions, self.mlp, "MLPs", "mlp: 1")
        if reason is not None:
            return reason
        recompute = target.chosen.get("recompute")
        if recompute is not None and recompute.record(target) == _KEEPS_PRODUCTS:
            return Reason("recompute keeps the outputs of the MLPs' parts", "recompute: {kind: full}")
        return None

    def _norm_fits(self, step: Step) -> Reason | None:
        regions = self._norms(step)
        if not regions:
            return Reason("no norm in the blocks saves more than its input, as fused ones do not", "norm: 1")
        return _too_little(step, regions, self.norm, "norms", "norm: 1")

    def _norms(self, step: Step) -> tuple[PositionWise, ...]:
        """Return the norms to cut: all except those inside an MLP that is cut."""
        inside = {f"{region.module}." for region in position_wise(step)} if self.mlp > 1 else set()
        return tuple(each for each in norms(step) if not any(each.module.startswith(name) for name in inside))

    def _regions(self, step: Step) -> tuple[tuple[PositionWise, int], ...]:
        """Return the modules of the blocks to cut, with their numbers of parts."""
        mlps = position_wise(step) if self.mlp > 1 else ()
        return (
            *((each, self.mlp) for each in mlps),
            *((each, self.norm) for each in self._norms(step) if self.norm > 1),
        )

    def _loss_fits(self, step: Step) -> Reason | None:
        # A config that asks for MLPs or norms in parts gets the loss in parts too, by default.
        fix = "chunks: 1" if self.mlp > 1 or self.norm > 1 else ""
        pattern = loss_pattern(step)
        if isinstance(pattern, str):
            return Reason(pattern, fix)
        if pattern.head == "(outside)":
            return Reason(
                "the logits are made outside of the model", "the head's product in the model's forward"
            )
        if pattern.rows < self.chunks:
            return refusals.few_tokens(pattern.rows, self.chunks, "fewer chunks")
        share = _logits_bytes(step, pattern) / max(step.peak_bytes(), 1)
        if share < _WORTH:
            return Reason(f"the logits are {share:.1%} of the peak", fix)
        return None

    def plan(self, program: Program, target: Target) -> TiledPlan:
        fields: dict[str, Any] = {}
        if self.chunks > 1:
            pattern = _pattern(program.step)
            weight = pattern.step.parameters[pattern.step.parameter_of[pattern.weight.plain]].name
            fields = {"head": pattern.head, "weight": weight}
        if self.mlp > 1:
            fields["mlps"] = tuple(region.module for region in position_wise(program.step))
        if self.norm > 1:
            fields["norms"] = tuple(region.module for region in self._norms(program.step))
        return TiledPlan(**fields)

    def rewrite(self, program: Program, plan: TiledPlan, target: Target) -> Program:
        """Return the program with head, loss, MLPs and norms part by part in both directions."""
        regions = self._regions(program.step)
        step = tile_regions(program.step, regions) if regions else program.step
        return program.with_step(step if self.chunks == 1 else tile_loss(_pattern(step), self.chunks))

    def apply(self, context: Context, plan: TiledPlan) -> None:
        """Make the head return logits computed where they are read; run MLPs and norms over parts."""
        if self.chunks > 1:
            install_lazy_head(context, plan.head, chunks=self.chunks, weight=plan.weight)
        if self.mlp > 1:
            _install(context, plan.mlps, self.mlp, "split.modules")
        if self.norm > 1:
            _install(context, plan.norms, self.norm, "split.norms")

    def record(self, target: Target) -> dict[str, Any]:
        parts = {"split.logits": self.chunks, "split.mlp": self.mlp, "split.norm": self.norm}
        return {name: {"chunks": chunks} for name, chunks in parts.items() if chunks > 1}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        # Many parts for logits that still set the peak.
        return {"chunks": (8, 32, 1), "mlp": (1, 8), "norm": (1, 8)}


def _install(context: Context, names: tuple[str, ...] | None, parts: int, check: str) -> None:
    if names is None:
        raise ApplyError(
            f"{'norms' if check == 'split.norms' else 'MLPs'} in parts need a plan of which modules they"
            " are.",
            fix=(
                "memtune search  writes it with the config; or"
                f" {'norm' if check == 'split.norms' else 'mlp'}: 1"
            ),
            code="MT316",
        )
    install_tiled_modules(context, dict.fromkeys(names, Tiling(parts)), check=check)


def _too_little(
    step: Step, regions: tuple[PositionWise, ...], parts: int, what: str, fix: str
) -> Reason | None:
    """Return why `regions` save too little to be cut into `parts` parts, or have too few tokens."""
    rows = min(region.rows for region in regions)
    if rows < parts:
        return refusals.few_tokens(rows, parts, "fewer parts")
    share = sum(region.inner_bytes for region in regions) / max(step.peak_bytes(), 1)
    return Reason(f"what the {what} save is {share:.1%} of the peak", fix) if share < _WORTH else None


def _pattern(step: Step) -> LossPattern:
    pattern = loss_pattern(step)
    if isinstance(pattern, str):
        raise ValueError(f"asked to tile a loss that does not fit: {pattern}")
    return pattern


def _logits_bytes(step: Step, pattern: LossPattern) -> int:
    """Return the largest bytes of logits and tensors derived from them at any moment of the step."""
    storages = np.asarray([*pattern.made[:-1], *pattern.gradients])
    moments = np.asarray(
        [*pattern.forward, *pattern.backward, *(each.op for each in (pattern.dx, pattern.dweight) if each)]
    )
    live = (step.storages.producer[storages] <= moments[:, None]) & (
        step.freed_after[storages] >= moments[:, None]
    )
    return int((live * step.storages.bytes[storages]).sum(1).max())
