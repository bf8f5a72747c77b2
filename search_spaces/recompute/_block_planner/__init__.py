"""Plan which tensors each block saves, recomputes or offloads within a byte budget (`planned`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.search_spaces.recompute._block_planner import claims as claims
    from memtune.search_spaces.recompute._block_planner.budget import (
        NO_PASS_INPUTS,
        Budget,
        PassInputs,
        Solution,
        apply_later_passes,
        later_pass_inputs,
        later_techniques,
        plain_bytes,
        solve_budget,
    )
    from memtune.search_spaces.recompute._block_planner.call_selection import (
        Block,
        CallsPlan,
        block_graphs,
        calls_by_block,
        core_attention,
        frees_saved_tensors,
        inputs_of_products,
        plan_calls,
    )
    from memtune.search_spaces.recompute._block_planner.claims import (
        OptionEntry,
        OptionsPlan,
        PlannedPlan,
        PricedEntry,
        SpillSpec,
        claim_planned,
        explain_planned,
        option_fields,
        rewrite_planned,
    )
    from memtune.search_spaces.recompute._block_planner.fits import (
        FREES_NOTHING,
        MATMULS,
        NO_BLOCKS,
        cannot_recompute,
        holds_blocks_in_one_graph,
        is_attention,
        is_matmul_or_attention,
        no_attention,
        no_blocks,
    )
    from memtune.search_spaces.recompute._block_planner.host_costs import claims_s, schedule_s
    from memtune.search_spaces.recompute._block_planner.measured_options import (
        FULL,
        MIN_MOVED_BYTES,
        Option,
        apply_options,
        block_ops,
        live_bytes,
        op_seconds,
        to_option,
        windows,
    )
    from memtune.search_spaces.recompute._block_planner.swap import (
        Choice,
        Part,
        busy_seconds,
        bytes_of,
        hull,
        parts_of,
        spilled_blocks,
    )
    from memtune.search_spaces.recompute._block_planner.tensor_options import (
        BlockOp,
        Combination,
        combinations,
    )
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "FREES_NOTHING",
    "FULL",
    "MATMULS",
    "MIN_MOVED_BYTES",
    "NO_BLOCKS",
    "NO_PASS_INPUTS",
    "Block",
    "BlockOp",
    "Budget",
    "CallsPlan",
    "Choice",
    "Combination",
    "Option",
    "OptionEntry",
    "OptionsPlan",
    "Part",
    "PassInputs",
    "PlannedPlan",
    "PricedEntry",
    "Solution",
    "SpillSpec",
    "apply_later_passes",
    "apply_options",
    "block_graphs",
    "block_ops",
    "busy_seconds",
    "bytes_of",
    "calls_by_block",
    "cannot_recompute",
    "claim_planned",
    "claims",
    "claims_s",
    "combinations",
    "core_attention",
    "explain_planned",
    "frees_saved_tensors",
    "holds_blocks_in_one_graph",
    "hull",
    "inputs_of_products",
    "is_attention",
    "is_matmul_or_attention",
    "later_pass_inputs",
    "later_techniques",
    "live_bytes",
    "no_attention",
    "no_blocks",
    "op_seconds",
    "option_fields",
    "parts_of",
    "plain_bytes",
    "plan_calls",
    "rewrite_planned",
    "schedule_s",
    "solve_budget",
    "spilled_blocks",
    "to_option",
    "windows",
]
