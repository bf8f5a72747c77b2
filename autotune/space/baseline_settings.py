"""The baselines: the user's own setting, full recompute, plain FSDP, and full recompute with FSDP."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

from memtune.autotune.space.candidates import Choice
from memtune.autotune.space.scoring import Scored, Scorer
from memtune.autotune.space.search_space import variants
from memtune.search_spaces import find, kinds
from memtune.search_spaces.execution import Execution
from memtune.technique import Reason


class Baseline(NamedTuple):
    """A setting that needs no search, with its name and prediction."""

    name: str
    scored: Scored


def baselines(scorer: Scorer, global_batch: int) -> tuple[list[Baseline], dict[str, Reason]]:
    """Return the baselines that can be used, the user's own setting first, and why others cannot."""
    ranks = scorer.rewriter.target.ranks
    wanted: list[tuple[str, dict[str, str]]] = [("plain", {})]
    if "full" in kinds("recompute"):
        wanted.append(("full recompute", {"recompute": "full"}))
    if ranks > 1 and "fsdp" in kinds("sharding.states"):
        wanted.append(("plain fsdp", {"sharding.states": "fsdp"}))
        if "full" in kinds("recompute"):
            wanted.append(("full recompute with fsdp", {"recompute": "full", "sharding.states": "fsdp"}))
    found, refused = [], {}
    for name, kind_by_slot in wanted:
        if ranks > 1:  # ranks must at least average their gradients
            kind_by_slot = {"sharding.states": "ddp"} | kind_by_slot
        scored = first_that_fits(
            scorer, scorer.rewriter.execution.of_size(max(1, global_batch // ranks)), kind_by_slot
        )
        if isinstance(scored, Reason):
            refused[name] = scored
        else:
            found.append(Baseline(name, scored))
    return found, refused


def first_that_fits(scorer: Scorer, execution: Execution, kind_by_slot: Mapping[str, str]) -> Scored | Reason:
    """Return the kinds with their default knobs, or with the first values worth trying that fit."""
    options = [variants(find(slot, kind), scorer.rewriter.target) for slot, kind in kind_by_slot.items()]
    reason: Reason | None = None
    for techniques in itertools.product(*options):
        scored = scorer.score(Choice.of(execution, {each.slot: each for each in techniques}))
        if isinstance(scored, Scored):
            return scored
        reason = reason or scored
    assert reason is not None  # the product of no slots has one element, of others at least the defaults
    return reason
