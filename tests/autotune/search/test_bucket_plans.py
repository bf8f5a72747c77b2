"""Length buckets: plans of their own, real peaks and gradients."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from support.search.prepared_search import Probed
from torch import Tensor

from memtune.api import apply
from memtune.autotune.search.predictions import trial_config
from memtune.autotune.search.preparation import prepare
from memtune.autotune.space.search_options import PlanOptions
from memtune.config import TunedConfig, dump_yaml, load_config
from memtune.errors import ApplyError
from memtune.memory.ledger import Ledger
from memtune.runtime.memory_tiers import HOST, tier
from memtune.workload.workload import Workload

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

LENGTHS, DIM = (8, 40, 64), 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(DIM), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, DIM), nn.Linear(DIM, 50)
        self.blocks = nn.ModuleList([Block() for _ in range(6)])

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model():
    return Net()


def of_length(size, length):
    return torch.randint(50, (size, length)), torch.randint(50, (size, length))


def batch(size):
    return of_length(size, LENGTHS[int(torch.randint(3, ()))])


def buckets(size):
    return [of_length(size, length) for length in reversed(LENGTHS)]


def loss(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
"""
LIMIT_BYTES = 2_000_000

pytestmark = pytest.mark.usefixtures("one_thread")


def planned(tmp_path: Path, settings: dict[str, Any]) -> tuple[Workload, TunedConfig, int]:
    """Return the workload, its config with buckets, and the predicted peak of the largest."""
    path, config = tmp_path / "lengths.py", tmp_path / "settings.yaml"
    path.write_text(MODEL)
    config.write_text(dump_yaml(load_config({"settings": {"execution": {"micro_batch": 4}, **settings}})))
    setup = prepare(
        PlanOptions(workload=str(path), device="cpu", budget_bytes=LIMIT_BYTES, config=str(config)),
        for_trials=False,
        begun=Probed(),  # type: ignore[arg-type]
    )
    assert setup.only is not None
    peak_bytes = setup.scorer.candidate(setup.only).program.step.peak_bytes()
    return Workload.load(path), load_config(dump_yaml(trial_config(setup, setup.only))), peak_bytes


def recompute_s(plan: Any) -> float:
    """Return the seconds of recomputation of a plan by blocks or by a schedule."""
    if hasattr(plan, "recompute_s"):
        return float(plan.recompute_s)
    return float(sum(plan.options[each].seconds for each in plan.blocks))


def gradients(workload: Workload, batches: list[Any]) -> list[list[Tensor]]:
    """Return the gradients of plain training, step by step."""
    with tier(HOST):
        torch.manual_seed(0)
        model = workload.build_model()
        found, optimizer = [], workload.make_optimizer(model)
        for step, batch in enumerate(batches):
            torch.manual_seed(step)
            workload.loss(model, batch).backward()
            found.append([each.grad.clone() for each in model.parameters() if each.grad is not None])
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.drawn(1)
@pytest.mark.native_ledger
@pytest.mark.parametrize("by_schedule", [False, True])
def test_buckets_have_their_plans_their_peaks_and_plain_gradients(tmp_path: Path, by_schedule: bool) -> None:
    recompute = {"recompute": {"kind": "planned", "by_schedule": by_schedule, "offload": False}}
    workload, config, peak_bytes = planned(tmp_path, recompute)
    assert [each.inputs for each in config.buckets] == [((4, 8),), ((4, 40),)]
    assert not config.buckets[0].settings.techniques
    middle, large = (recompute_s(each.plan["recompute"]) for each in (config.buckets[1], config))
    assert 0 < middle < large
    predicted = [*(each.predicted["peak_bytes"] for each in config.buckets), peak_bytes]
    assert max(predicted) <= LIMIT_BYTES
    with tier(HOST):
        batches = workload.make_buckets(4) * 2
    plain = gradients(workload, batches)
    ledger = Ledger.open(torch.device("cpu"))
    gc.collect()
    before = ledger.live_bytes()  # what tests before left in this process
    torch.manual_seed(0)
    model = workload.build_model()
    optimizer = workload.make_optimizer(model)
    ledger.track(model, optimizer)
    seen: list[list[Tensor]] = []

    def note(*_: Any) -> None:
        with tier(HOST):
            seen.append([each.grad.clone() for each in model.parameters() if each.grad is not None])

    optimizer.register_step_pre_hook(note)
    tuned = apply(model, optimizer, config, loss=workload.loss)
    peaks = []
    for step, batch in enumerate(batches):
        ledger.reset_peak()
        torch.manual_seed(step)
        tuned.step([batch])
        peaks.append(ledger.peak_allocated_bytes() - before)
    pairs = zip(itertools.chain(*plain), itertools.chain(*seen), strict=True)
    assert all(torch.equal(mine, its) for mine, its in pairs)
    assert peaks[3:] == predicted  # the first step makes the optimizer's state
    assert tuned.audit()["buckets"]["forwards"] == [2, 2, 2]


def test_backward_follows_the_bucket_of_its_forward(tmp_path: Path) -> None:
    workload, config, _ = planned(tmp_path, {"recompute": {"kind": "full"}})
    document = {**config.document(), "made_for": {}}
    # Full recomputation in the small buckets, none in the largest.
    document["settings"], document["buckets"] = (
        {"execution": {"micro_batch": 4}},
        [
            {"inputs": each["inputs"], "settings": {"recompute": {"kind": "full"}}}
            for each in document["buckets"]
        ],
    )
    torch.manual_seed(0)
    model = workload.build_model()
    tuned = apply(model, workload.make_optimizer(model), load_config(document))
    small, _, large = workload.make_buckets(4)
    losses = [workload.loss(model, each) for each in (small, large, small)]
    for each in losses:
        each.backward()
    facts = tuned.audit()["buckets"]
    assert facts["forwards"] == [2, 0, 1]
    assert [each["activations"]["recomputed_blocks"] for each in facts["claims"]] == [6, 6]
    assert tuned._context.activations.traffic.forwards == set()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"execution": {"compile": "blocks"}}, "compile"),
        ({"execution": {"order": {"kind": "roam"}}}, "execution.order"),
        ({"offload": {"states": {"kind": "l2l", "order": "layer_major"}}}, "offload.states"),
    ],
)
def test_apply_refuses_buckets_where_one_plan_runs_all(
    tmp_path: Path, settings: dict[str, Any], named: str
) -> None:
    (tmp_path / "lengths.py").write_text(MODEL)
    workload = Workload.load(tmp_path / "lengths.py")
    model = workload.build_model()
    config = load_config({"settings": settings, "buckets": [{"inputs": [[4, 8]]}]})
    with pytest.raises(ApplyError, match=r"one plan|plan of its own|planned for one length") as error:
        apply(model, workload.make_optimizer(model), config)
    assert named in str(error.value)
    assert "forward" not in vars(model)
