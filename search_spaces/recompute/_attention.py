"""What techniques share that run every block again but for its attention."""

from __future__ import annotations

from typing import Any

from memtune.program import Program
from memtune.runtime.context import Context
from memtune.search_spaces.recompute._fits import no_attention, why_not
from memtune.search_spaces.recompute._keeps import is_attention
from memtune.technique import Reason, Target


def why_not_attention_once(program: Program, target: Target) -> Reason | None:
    """Needs blocks with fused attention that do not change their input, in eager mode."""
    return why_not(program.step, target.compiled, is_attention) or no_attention(program.step)


def claim_attention_once(context: Context) -> None:
    """Claim every block in the activation table, with attention's outputs to keep."""
    for region in context.activations.regions:
        context.activations.claim_recompute(region.index, is_attention)


def record_attention_once() -> dict[str, Any]:
    """All blocks; attention kept inside them."""
    return {"activations.recompute": {"every": 1, "keep": "attention"}}
