"""Recompute planned block by block, on stages that have different blocks and different numbers of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.gloo import run_ranks
from support.ranks.model_parallel_runs import SIZE, rewriter
from support.ranks.pipeline_runs import CHAIN, KIND, assert_as_predicted, measured, trained

from memtune.api import apply
from memtune.autotune.space.candidates import Candidate, Choice
from memtune.testing.training import build

pytestmark = pytest.mark.usefixtures("one_thread")  # as on the ranks: more threads add in another order
BY_CALLS: dict[str, dict[str, Any]] = {
    "every_second": {"kind": "selective", "matmuls": "every_second"},
    "core_attention": {"kind": "selective", "scope": "core_attention"},
    "save_ops": {"kind": "selective", "save_ops": ["aten.bmm"]},
    "balanced": {"kind": "balanced"},
    "every_nth": {"kind": "every_nth", "n": 2},
}
PLANNED: dict[str, dict[str, Any]] = {
    "planned": {"kind": "planned", "share": 0.3, "offload": False, "by_schedule": False},
    "lohan": {"kind": "lohan", "min_bytes": 256, "window": 0},
}
"""Planned for one rank with all blocks: a search refuses them together with a pipeline, `apply` does not."""
TRAINED = BY_CALLS | PLANNED
PLAIN_BLOCK = """
class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one, self.other = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.other(torch.tanh(self.one(self.norm(x))))


class GPT"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return `CHAIN` with seven blocks, every third one without attention."""
    text, blocks = CHAIN.read_text(), "Block() for _ in range(LAYERS)"
    assert text.count(blocks) == 1
    text = text.replace(blocks, "Plain() if n % 3 == 2 else Block() for n in range(7)")
    file = tmp_path_factory.mktemp("chain") / "chain.py"
    file.write_text(text.replace("\nclass GPT", PLAIN_BLOCK))
    return file


def candidate(path: Path, ranks: int, recompute: dict[str, Any], parallel: dict[str, Any]) -> Candidate:
    chosen = {"execution": {"micro_batch": SIZE, "accumulate": 2}, "recompute": recompute}
    found = rewriter(path, ranks).candidate(
        Choice.from_document({**chosen, **({"sharding": {"parallel": parallel}} if parallel else {})})
    )
    assert isinstance(found, Candidate), found
    return found


def config(path: Path, name: str, **knobs: Any) -> dict[str, Any]:
    """Return a config of `TRAINED` under a pipeline; plans for a budget are those of one rank."""
    parallel, recompute = {"kind": KIND, **knobs}, TRAINED[name]
    plans = candidate(path, 2, recompute if name in BY_CALLS else {"kind": "none"}, parallel).plans
    if name in PLANNED:
        plans = {**plans, "recompute": candidate(path, 1, recompute, {}).plans["recompute"]}
    return {
        "settings": {
            "execution": {"micro_batch": SIZE, "accumulate": 2},
            "recompute": recompute,
            "sharding": {"parallel": parallel},
        },
        "plan": {slot: plan.document() for slot, plan in plans.items() if not plan.is_empty},
    }


def all_trained(path: Path, configs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: trained(path, 2, each, False, 2) for name, each in configs.items()}


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("interleaved_1f1b", marks=pytest.mark.slow)])
def test_recompute_by_block_trains_bitwise_on_unequal_stages(path: Path, schedule: str) -> None:
    configs = {name: config(path, name, schedule=schedule) for name in TRAINED}
    wanted = trained(path, 2, None, False, 2)
    ranks = run_ranks(all_trained, 2, path, configs, deadline_s=200)
    for name in configs:
        assert len({found[name]["audit"]["sharding.parallel"]["blocks"] for found in ranks}) == 2, name
        for found in ranks:
            assert found[name]["losses"] == wanted["losses"], name
            assert all(torch.equal(found[name]["model"][key], w) for key, w in wanted["model"].items()), name


def again(path: Path, document: dict[str, Any]) -> set[str]:
    """Return the names of the blocks that ran a second time."""
    workload, model, optimizer = build(path)
    tuned = apply(model, optimizer, document, loss=workload.loss, strict=False)
    tuned.step([workload.make_batch(SIZE) for _ in range(2)])
    return tuned._context.activations.traffic.recomputed_regions


def test_every_nth_counts_the_blocks_of_the_model(path: Path) -> None:
    ranks = run_ranks(again, 2, path, config(path, "every_nth"))
    assert set.union(*ranks) == {f"h.{n}" for n in (0, 2, 4, 6)}


def peaks(path: Path, configs: dict[str, dict[str, Any]]) -> dict[str, tuple[int, int]]:
    return {name: measured(path, each) for name, each in configs.items()}


@pytest.mark.slow
def test_peaks_of_unequal_stages_are_predicted(path: Path) -> None:
    configs = {name: config(path, name) for name in BY_CALLS}
    ranks = run_ranks(peaks, 2, path, configs, deadline_s=200)
    for name in BY_CALLS:
        made = candidate(path, 2, BY_CALLS[name], {"kind": KIND})
        assert_as_predicted([(found[name], {}) for found in ranks], made)
