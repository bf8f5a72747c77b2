"""Checkmate: any op runs again, as often as it pays, within a budget; the measured peak is the schedule's.

Distinguishing test: the measured peak is the schedule's, to the byte, and values are computed three times and
more where that pays.
"""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from support.zoo_paths import ZOO

from memtune.activations.schedules.region_pass import region_of
from memtune.activations.schedules.schedule_pass import run_schedule
from memtune.api import Tuned, apply
from memtune.errors import ApplyError, UsageError
from memtune.memory.ledger import Ledger
from memtune.program.op_schedule import plain_schedule
from memtune.runtime.memory_tiers import HOST, tier
from memtune.runtime.training_step import train_step
from memtune.search_spaces.recompute.checkmate import Checkmate
from memtune.search_spaces.recompute.full import Full
from memtune.technique import Target
from memtune.testing import TechniqueSuite, rewritten
from memtune.testing.drift_check import drift, plain_program, recorded, target_of
from memtune.testing.training import build, config_of, differences, one_step, plain, settings_of, train

UPDATES_AFTER_READING = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        hidden = nn.functional.gelu(self.up(x) + self.scale)
        with torch.no_grad():
            self.scale.mul_(0.9).add_(0.1 * hidden.abs().mean())
        return x + self.down(hidden)


def model():
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(3)], nn.Linear(16, 8))


def batch(size):
    return torch.randn(size, 64, 16, generator=torch.Generator().manual_seed(size))


def loss(model, batch):
    return model(batch).square().mean()


global_batch = 4
"""

FROZEN_NORMS = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[m for _ in range(3) for m in (nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())])

    def train(self, mode=True):
        super().train(mode)
        for each in self.layers:
            each.train(mode and not isinstance(each, nn.BatchNorm2d))
        return self

    def forward(self, x):
        return self.layers(x)


def model():
    torch.manual_seed(0)
    return Model()


def batch(size):
    return torch.randn(size, 4, 16, 16, generator=torch.Generator().manual_seed(size))


def loss(model, batch):
    return model(batch).square().mean()


global_batch = 4
"""  # noqa: E501


class TestCheckmate(TechniqueSuite):
    technique = Checkmate
    models: ClassVar = {name: ZOO[name] for name in ("gpt", "cnn_bn")}
    variants = (Checkmate(share=0.0, nodes=16),)
    quick = ("cnn_bn",)

    @classmethod
    def default(cls) -> Checkmate:
        return Checkmate(share=0.0, nodes=16)

    def sabotage(self, tuned: Tuned) -> bool:
        del vars(tuned._context.model)["forward"]
        return True

    @pytest.mark.parametrize("share", [0.4])
    def test_recorded_peak_is_the_schedules_and_within_the_budget(self, share: float) -> None:
        technique = Checkmate(share=share, nodes=16)
        program = plain_program(ZOO["gpt"])
        plan = technique.plan(program, target_of(technique))
        low, high = (self.peak(Checkmate(share=end, nodes=16)) for end in (0.0, 1.0))
        assert high == program.step.peak_bytes()
        assert plan.peak_bytes <= int(low + share * (high - low))
        assert plan.peak_bytes == rewritten(ZOO["gpt"], technique).peak_bytes()
        assert plan.peak_bytes == recorded(ZOO["gpt"], technique).peak_bytes()

    @pytest.mark.parametrize(
        "source", [UPDATES_AFTER_READING, FROZEN_NORMS], ids=["updates after reading", "frozen norms"]
    )
    def test_buffers_are_read_as_they_were_and_updated_once(self, tmp_path: Path, source: str) -> None:
        (tmp_path / "model.py").write_text(source)
        reference = train(tmp_path / "model.py")
        assert differences(train(tmp_path / "model.py", Checkmate(share=0.0, nodes=16)), reference, 0.0) == []

    def peak(self, technique: Checkmate) -> int:
        return int(technique.plan(plain_program(ZOO["gpt"]), target_of(technique)).peak_bytes)

    def test_rewritten_step_has_no_cached_columns_of_the_old_one(self) -> None:
        step = plain_program(ZOO["gpt"]).step
        step = step.without_donations(region_of(step).rows)
        region = region_of(step)
        assert len(step.ops.block) == step.ops.n
        assert len(step.saves.block) == step.saves.n
        assert run_schedule(step, region, plain_schedule(region.graph)).ops.n == step.ops.n

    def test_ops_run_three_times_where_that_saves(self) -> None:
        plan = self.default().plan(plain_program(ZOO["gpt"]), target_of())
        times = Counter(plan.schedule.computes())
        assert max(times.values()) >= 3

    def test_integer_program_is_never_slower_than_rounding(self) -> None:
        program = plain_program(ZOO["tied"])
        approx, exact = (
            technique.plan(program, target_of(technique)).document()
            for technique in (Checkmate(share=0.3, nodes=8), Checkmate(share=0.3, nodes=8, solver="exact"))
        )
        assert exact["recompute_s"] <= approx["recompute_s"]

    @pytest.mark.native_ledger
    @pytest.mark.parametrize("model", ["lora", "hf_llama"])
    def test_measured_peak_is_the_schedules_to_the_byte(self, model: str) -> None:
        technique = Checkmate(share=0.3, nodes=16)
        config = config_of(ZOO[model], technique)
        ledger = Ledger.open("cpu")
        try:
            gc.collect()  # the models of other tests are in cycles
            empty = ledger.live_bytes()
            workload, net, optimizer = build(ZOO[model])
            tuned = apply(net, optimizer, config, strict=False)
            one_step(workload, net, optimizer, tuned, seed=1, micro_batches=1)  # captures
            ledger.reset_peak()
            with tier(HOST):
                batches = [workload.make_batch(2)]
            train_step(tuned.model, optimizer, workload.loss, batches, torch.device("cpu"))
            assert ledger.peak_allocated_bytes() - empty == config["plan"]["recompute"]["peak_bytes"]
        finally:
            ledger.close()


AUTOCAST = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))

def model():
    return nn.Sequential(*(Block() for _ in range(4)))

def batch(size):
    return torch.randn(256 * size, 16)

def loss(model, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(batch).float().square().mean()
"""


ALL_STATES = """
class States(nn.Sequential):
    def forward(self, x):
        found = []
        for block in self:
            x = block(x)
            found.append(x)
        return found

def model():
    return States(*(Block() for _ in range(4)))

def loss(model, batch):
    return sum(each.square().mean() for each in model(batch))
"""


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["autocast", "all_states"])
def test_blocks_with_externally_held_values_are_recomputed(name: str, tmp_path: Path) -> None:
    """Casts of weights in autocast's cache; every block's output, which is the model's."""
    path, technique, full = tmp_path / f"{name}.py", Checkmate(share=0.3), Full()
    path.write_text(AUTOCAST + (ALL_STATES if name == "all_states" else ""))
    program = plain_program(path)
    assert technique.fits(program, target_of(technique)) is None
    plan = technique.plan(program, target_of(technique)).document()
    assert plan["peak_bytes"] < 0.75 * plan["plain_bytes"]
    assert (
        least_peak(path)
        <= full.rewrite(program, full.plan(program, target_of()), target_of()).step.peak_bytes()
    )
    assert drift(path, technique) == ""
    assert differences(train(path, technique), plain(path)) == []


def least_peak(path: Path) -> int:
    """The least that it finds."""
    technique = Checkmate(share=0.0)
    return int(technique.plan(plain_program(path), target_of(technique)).peak_bytes)


REFUSED = {
    "moe": (Checkmate(share=0.5), "aten.nonzero.default"),
    "gpt": (Checkmate(), "no budget"),
    "tied": (Checkmate(budget_bytes=1), "no recompute gets below"),
    "lora": (Checkmate(budget_bytes=2**40), "fits into the budget"),
    "cnn_bn": (Checkmate(budget_bytes=1, share=0.5), "both set the budget"),
}


@pytest.mark.parametrize("model", REFUSED)
def test_refusals_name_the_reason(model: str) -> None:
    technique, why = REFUSED[model]
    assert why in str(technique.fits(plain_program(ZOO[model]), target_of(technique)))


def test_fits_refuses_compiled_code() -> None:
    compiled = Target(target_of().hardware, compiled="model")
    assert "compile" in str(Checkmate(share=0.5).fits(plain_program(ZOO["gpt"]), compiled))


def test_another_model_runs_plainly_and_the_audit_says_why() -> None:
    config = config_of(ZOO["gpt"], Checkmate(share=0.5, nodes=8))
    workload, model, optimizer = build(ZOO["tied"])
    tuned = apply(model, optimizer, config, strict=False)
    torch.manual_seed(0)
    workload.loss(model, workload.make_batch(2)).backward()
    with pytest.raises(ApplyError, match="without its schedule") as caught:
        tuned.audit()
    assert caught.value.code == "MT313"
    assert "other ops" in str(caught.value.evidence)


@pytest.mark.parametrize(
    "plan",
    [
        {},
        *({"schedule": {"graph": "x", "forward": [step], "backward": []}} for step in ("?", [])),
        {"schedule": 3},
    ],
)
def test_apply_refuses_a_missing_or_damaged_plan(plan: dict[str, object]) -> None:
    _, model, optimizer = build(ZOO["gpt"])
    settings = settings_of(Checkmate(share=0.5))
    config = {"settings": settings, "plan": {"recompute": plan} if plan else {}}
    with pytest.raises(
        UsageError, match=r"plan\.recompute\.schedule: malformed" if plan else "needs a plan"
    ) as caught:
        apply(model, optimizer, config, strict=False)
    assert caught.value.code == "MT316"
    assert "forward" not in vars(model)
