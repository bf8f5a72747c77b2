"""Parameters, gradients and optimizer state sharded over ranks, gathered by block (FSDP2, ZeRO-3)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from memtune import refusals
from memtune.parallel.sharding import Sharding
from memtune.program import Program, Step
from memtune.search_spaces.sharding.states._fsdp_technique import _FsdpUnits
from memtune.technique import Reason, Target
from memtune.units import format_ranks


class Fsdp(_FsdpUnits):
    """Trades an all-gather of every unit in forward and in backward and a reduce-scatter for 1/degree of the
    model state.

    A unit is one or more blocks; parameters in no block form the root unit, gathered once per micro-batch.
    With a degree below the number of ranks each group of `degree` ranks holds one copy, and gradients are
    all-reduced between the copies.

    Reordered: the gradient of the union batch is the mean over N ranks of the means over their samples. Each
    rank rounds its own sum and the ring adds N of them, so an element differs from the plain one by at most
    (N + 1)·eps·Σ|gᵣ|/N in addition to the rounding of the per-sample sums, which both have. Weights are
    gathered, so forward is bitwise. With `reduce_dtype: bfloat16` gradients of float32 lose all but 8 bits of
    every summand and sum: lossy.
    """

    kind: Literal["fsdp"] = "fsdp"
    title: ClassVar[str] = "Model state sharded over ranks"
    source: ClassVar[str] = (
        "Zhao et al. 2023, PyTorch FSDP, arXiv:2304.11277; Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054"
    )
    paper: ClassVar[str] = "FSDP"

    degree: Annotated[int, Field(ge=2)] | None = None
    """Ranks that share a copy of the model state. Default: all; fewer hold more, gather on shorter rings."""

    reshard_after_forward: bool | Annotated[int, Field(ge=2)] = True  # type: ignore[assignment]  # wider than the others'
    """Free a unit's parameters between forward and backward; off, they are resident and the second gather is
    saved; a number keeps them sharded over groups of that many ranks, so that the second gather uses shorter
    links.
    """
    prefetch: Annotated[int, Field(ge=0, le=8)] | None = None
    """Units gathered before the one that runs. Default: FSDP2's, none explicitly in forward, where streams
    overlap, and one in backward. More hide slow links and hold more bytes; 0 holds the fewest.
    """
    keep_root: bool = True
    """Parameters in no block are unsharded between forward and backward; off, they are gathered again."""

    def sentence(self) -> str:
        """Return the setting as one clause."""
        kept = ", keeps gathered weights until backward" if self.reshard_after_forward is False else ""
        return f"divides weights, gradients and optimizer state over {format_ranks(self.degree)}{kept}"

    def _degree(self, ranks: int, plan: Any) -> int:
        return self.degree or ranks

    def _sharding(self, program: Program, plan: Any, target: Target) -> Sharding:
        sharding = super()._sharding(program, plan, target)
        return replace(sharding, prefetch=self.prefetch, keeps_root=self.keep_root and sharding.keeps_root)

    def _shard_options(self) -> dict[str, Any]:
        return {"prefetch": self.prefetch, "keep_root": self.keep_root}

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require two ranks, a degree that divides them, and units that FSDP2 can flatten and gather."""
        if target.ranks < 2:
            return super().fits(program, target)
        wrong = refusals.uneven_groups("degree", self.degree, target.ranks) if self.degree else None
        wrong = wrong or self._no_such_group(target) or self._no_order(program.step)
        return wrong or super().fits(program, target)

    def _no_order(self, step: Step) -> Reason | None:
        """Return why units cannot name the units that they prefetch."""
        block = step.calls.block[: len(step.calls.block) // max(step.model_calls, 1)]
        if self.prefetch and len(np.unique(block)) < len(block):
            return Reason(
                f"a block runs several times in a forward, and prefetch={self.prefetch} names the next units"
                " of each only once",
                "no prefetch, which is FSDP2's own order",
            )
        if self.prefetch and len(np.setdiff1d(block, step.calls.block[step.calls.grad_enabled > 0])):
            return Reason(
                f"a block runs without gradients, and prefetch={self.prefetch} would name it in backward too",
                "no prefetch, which is FSDP2's own order",
            )
        return None

    def _no_such_group(self, target: Target) -> Reason | None:
        """Return why units cannot be sharded over such groups, or why no gather is repeated."""
        group, degree = self.reshard_after_forward, self.degree or target.ranks
        if isinstance(group, bool):
            useless = not group and not self.keep_root
            return (
                Reason("keep_root=false, but all units stay unsharded", "reshard_after_forward: true")
                if useless
                else None
            )
        return refusals.uneven_reshard(group, degree)

    def record(self, target: Target) -> dict[str, Any]:
        settings = self._settings(self.degree or target.ranks, target.ranks)
        more = {"prefetch": self.prefetch} if self.prefetch is not None else {}
        gather = settings["states.gather"] | more | ({} if self.keep_root else {"keep_root": False})
        return settings | {"states.gather": gather}

    def choices_on(self, target: Target) -> dict[str, tuple[Any, ...]]:
        """Return all ranks and sizes of a node, a part of it or several; over several nodes also settings
        that spare links.

        Inside a node a second gather is as fast from all ranks as from some. On CPU collectives are
        synchronous, so prefetch hides nothing.
        """
        sizes, node = target.group_sizes(), target.hardware.local_ranks(target.ranks)
        choices = {"degree": (None, *sizes), **self.choices()}
        if 1 < node < target.ranks:
            choices["reshard_after_forward"] = (True, False, node)
            choices["prefetch"] = (None, 2)
            choices["reduce_dtype"] = (None, "bfloat16")
        return choices
