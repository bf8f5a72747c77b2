"""Plans which tensors each block saves, recomputes or offloads under a byte budget (`planned`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.search_spaces.recompute._block_planner import claims as claims
    from memtune.search_spaces.recompute._block_planner.budget import (
        NOTHING_TOLD,
        Budget,
        Solution,
        Told,
        after_later,
        best_row,
        later_techniques,
        packs_in,
        packs_of,
        plain_bytes,
        told_later,
        within,
    )
    from memtune.search_spaces.recompute._block_planner.call_selection import (
        Block,
        CallsPlan,
        block_graphs,
        calls_in,
        core_attention,
        frees_something,
        inputs_of_products,
        no_plan,
        plan_calls,
    )
    from memtune.search_spaces.recompute._block_planner.claims import (
        OptionEntry,
        OptionsPlan,
        PlannedPlan,
        PricedEntry,
        Spilled,
        as_planned,
        claim_planned,
        explained,
        fields_of,
    )
    from memtune.search_spaces.recompute._block_planner.fits import (
        NO_BLOCKS,
        in_one_graph,
        is_attention,
        is_matmul_or_attention,
        no_attention,
        no_blocks,
        why_not,
    )
    from memtune.search_spaces.recompute._block_planner.frontier import Frontier, Problem, solve
    from memtune.search_spaces.recompute._block_planner.measured_options import (
        FULL,
        MIN_MOVED_BYTES,
        Option,
        live_bytes,
        made_in,
        op_seconds,
        option_of,
        rewritten,
        windows,
    )
    from memtune.search_spaces.recompute._block_planner.swap import (
        Choice,
        Part,
        busy_in,
        bytes_of,
        hull,
        parts_of,
        spilled_blocks,
    )
    from memtune.search_spaces.recompute._block_planner.tensor_options import Combination, Made, combinations
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "FULL",
    "MIN_MOVED_BYTES",
    "NOTHING_TOLD",
    "NO_BLOCKS",
    "Block",
    "Budget",
    "CallsPlan",
    "Choice",
    "Combination",
    "Frontier",
    "Made",
    "Option",
    "OptionEntry",
    "OptionsPlan",
    "Part",
    "PlannedPlan",
    "PricedEntry",
    "Problem",
    "Solution",
    "Spilled",
    "Told",
    "after_later",
    "as_planned",
    "best_row",
    "block_graphs",
    "busy_in",
    "bytes_of",
    "calls_in",
    "claim_planned",
    "claims",
    "combinations",
    "core_attention",
    "explained",
    "fields_of",
    "frees_something",
    "hull",
    "in_one_graph",
    "inputs_of_products",
    "is_attention",
    "is_matmul_or_attention",
    "later_techniques",
    "live_bytes",
    "made_in",
    "no_attention",
    "no_blocks",
    "no_plan",
    "op_seconds",
    "option_of",
    "packs_in",
    "packs_of",
    "parts_of",
    "plain_bytes",
    "plan_calls",
    "rewritten",
    "solve",
    "spilled_blocks",
    "told_later",
    "why_not",
    "windows",
    "within",
]
