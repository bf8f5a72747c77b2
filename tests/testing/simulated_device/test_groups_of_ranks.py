"""Four ranks in groups of two: all kinds of messages and collectives, and first uses of groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.gloo import run_ranks
from support.ranks.model_parallel_runs import MODELS, SEPARATE, SIZE, UNDRAWN, rewriter
from support.ranks.pipeline_runs import CHAIN
from support.simulated_ranks import PARTS, differences_on_ranks

from memtune.autotune.space.candidates import Candidate, Choice

pytestmark = [pytest.mark.device, pytest.mark.slow]
HASHED = MODELS / "hashed_experts.py"
EXECUTION = {"micro_batch": SIZE, "accumulate": PARTS}
ON_SEPARATE: dict[str, dict[str, Any]] = {
    "heads and contexts": {"sharding": {"parallel": {"kind": "head_context"}}},
    "rotation in place": {"sharding": {"parallel": {"kind": "rtp", "degree": 2, "in_place": True}}},
    "tensors and zero3": {
        "sharding": {"parallel": {"kind": "tensor", "degree": 2}, "states": {"kind": "zero3"}}
    },
    "stages with a tied weight": {"sharding": {"parallel": {"kind": "pipeline", "degree": 2}}},
    "nodes of two": {
        "sharding": {
            "states": {"kind": "fsdp"},
            "communication": {"kind": "hierarchical", "ranks_per_node": 2},
        }
    },
}
ON_CHAIN: dict[str, dict[str, Any]] = {
    "pipeline and zero2": {
        "sharding": {"parallel": {"kind": "pipeline", "degree": 2}, "states": {"kind": "zero2"}}
    },
    "pipeline of four": {"sharding": {"parallel": {"kind": "pipeline", "degree": 4}}},
    "mobius": {
        "sharding": {"states": {"kind": "none"}},
        "offload": {"states": {"kind": "mobius", "stages": 4}},
    },
}


ON_EXPERTS: dict[str, dict[str, Any]] = {
    "experts at once": {"sharding": {"parallel": {"kind": "expert_parallel", "degree": 2}}},
    "experts by node": {"sharding": {"parallel": {"kind": "expert_parallel", "inner_degree": 2}}},
}
OFFLOADED: dict[str, dict[str, Any]] = {
    "mobius with a tied weight": {
        "sharding": {"states": {"kind": "none"}},
        "offload": {"states": {"kind": "mobius", "stages": 2}},
    },
    **{
        f"{states} and {offload}": {
            "sharding": {"states": {"kind": states}},
            "offload": {"states": {"kind": offload}},
        }
        for states, offload in (
            ("fsdp", "l2l"),
            ("fsdp", "patrickstar"),
            ("zero2", "zero_offload"),
            ("zero1", "optimizer_cpu"),
            ("ddp", "l2l"),
            ("ddp", "patrickstar"),
        )
    },
}


def planned(path: Path, ranks: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the config of `settings` with its plans."""
    asked = {"execution": EXECUTION, **settings}
    found = rewriter(path, ranks).candidate(Choice.from_document(asked))
    assert isinstance(found, Candidate), found
    return {"settings": asked, "plan": {slot: plan.document() for slot, plan in found.plans.items()}}


@pytest.mark.parametrize(
    ("path", "ranks", "cases"),
    [(SEPARATE, 4, ON_SEPARATE), (CHAIN, 4, ON_CHAIN), (HASHED, 4, ON_EXPERTS), (UNDRAWN, 2, OFFLOADED)],
    ids=["layers", "stages", "experts", "offloaded"],
)
def test_groups_of_ranks_train_as_on_the_cpu(
    path: Path, ranks: int, cases: dict[str, dict[str, Any]]
) -> None:
    configs = {name: planned(path, ranks, settings) for name, settings in cases.items()}
    # Attention takes other kernels on an accelerator than on the CPU.
    found = run_ranks(differences_on_ranks, ranks, str(path), configs, 1e-5, device="sim", deadline_s=280)
    assert found == [{name: [] for name in cases}] * ranks
