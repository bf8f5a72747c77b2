"""Parallel pipelines with sharded stages: other shapes in one of them, and messages for an edited
config.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.gloo import run_ranks
from support.ranks.pipeline_runs import CHAIN, RANKS, STAGES, document, other_slots

from memtune.api import Tuned, apply
from memtune.errors import ApplyError
from memtune.testing.training import build

SIZES = ((2, 2), (3, 2), (2, 2), (2, 3), (3, 3))
"""Samples of a micro-batch in each step: of the first pipeline, and of the second."""
pytestmark = pytest.mark.slow


def asked(states: str) -> dict[str, Any]:
    return document(CHAIN, RANKS, other_slots(states), accumulate=1, degree=STAGES)


def started(config: dict[str, Any]) -> tuple[Any, Tuned]:
    workload, model, _ = build(CHAIN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return workload, apply(model, optimizer, config, loss=workload.loss, strict=False)


def trained(configs: dict[str, dict[str, Any]]) -> dict[str, dict[str, torch.Tensor]]:
    """Weights after steps of `SIZES`, by how states are divided."""
    found, pipeline = {}, dist.get_rank() // STAGES
    for name, config in configs.items():
        workload, tuned = started(config)
        for step, sizes in enumerate(SIZES):
            torch.manual_seed(10 * step + dist.get_rank())
            tuned.step([workload.make_batch(sizes[pipeline])])
        found[name] = {key: value.clone() for key, value in tuned.state_dict()["model"].items()}
    return found


def test_pipeline_accepts_shapes_that_change_in_one_pipeline() -> None:
    """A new shape is looked at by a probe, which gathers what FSDP2 has divided: on the ranks of the other
    pipeline as well.
    """
    configs = {states: asked(states) for states in ("none", "zero3", "kept")}
    for rank in run_ranks(trained, RANKS, configs, deadline_s=100):
        for states in ("zero3", "kept"):
            torch.testing.assert_close(rank[states], rank["none"], rtol=1e-5, atol=1e-6)


def counts(config: dict[str, Any]) -> str:
    workload, tuned = started(config)
    tuned.step([workload.make_batch(2)])
    with pytest.raises(ApplyError) as caught:
        tuned.step([workload.make_batch(2)] * (1 + dist.get_rank() // STAGES))
    return str(caught.value)


def test_pipelines_with_different_micro_batch_counts_all_raise() -> None:
    for said in run_ranks(counts, RANKS, asked("zero3"), deadline_s=100):
        assert "Pipelines that divide each other's stages bring 2 to 4 micro-batches" in said


def refusals(edited: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    """Return the message for each config with these techniques under `sharding`."""
    said = []
    for config, sharding in edited:
        chosen = {"parallel": config["settings"]["sharding"]["parallel"], **sharding}
        with pytest.raises(ApplyError) as caught:
            started({**config, "settings": {**config["settings"], "sharding": chosen}})
        said.append(str(caught.value))
    return said


def test_pipeline_refuses_edited_configs() -> None:
    plain = asked("zero1")
    moved = {"offload": {"activations": {"kind": "pipelined", "ratio": 0.5, "min_bytes": 256}}}
    waits = {"accumulate": 4, "degree": STAGES, "schedule": "gpipe"}
    pipelined = document(CHAIN, RANKS, other_slots("zero1", moved, schedule="gpipe"), **waits)
    by_node = {"kind": "hierarchical", "ranks_per_node": 2}
    whole_gradients = {"kind": "amsp", "parameters": 2, "gradients": 1, "optimizer": 2}
    edited = {
        "sharding.communication: hierarchical does not work on the stages": (
            plain,
            {"states": {"kind": "fsdp"}, "communication": by_node},
        ),
        "sharding.states: zero3 does not work where copies follow the schedule": (
            pipelined,
            {"states": {"kind": "zero3"}},
        ),
        "sharding.states: zero2 does not work where copies follow the schedule": (
            pipelined,
            {"states": {"kind": "zero2"}},
        ),
        "sharding.states: amsp does not work on the stages": (plain, {"states": whole_gradients}),
    }
    for said in run_ranks(refusals, RANKS, list(edited.values()), deadline_s=100):
        for wanted, got in zip(edited, said, strict=True):
            assert wanted in got
