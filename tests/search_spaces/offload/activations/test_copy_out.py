"""Saved activations are offloaded: the claimed share crosses the link once D2H and once H2D.

Distinguishing test: exactly the claimed share of the saved bytes crosses the link, once D2H and once H2D, and
compute waits for it without prefetch; on SSD it is written once and read once, and host memory never holds
more than a few tensors.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
from fixed_cpu import CPU, NO_HOST_COSTS
from support.zoo_paths import ZOO

from memtune import hardware
from memtune.api import apply
from memtune.autotune.predict.breakdown import time_lines
from memtune.autotune.predict.simulation import simulate
from memtune.errors import ApplyError, EnvironmentFault
from memtune.program.residency import WRITES_IN_FLIGHT
from memtune.program.step import Resource, Tier
from memtune.search_spaces import find
from memtune.search_spaces.offload.activations.copy_out import CopyOut, CopyOutPlan
from memtune.search_spaces.recompute.full import Full
from memtune.search_spaces.recompute.selective import Selective
from memtune.ssd import offload_dir, ssd_tensors
from memtune.technique import Technique
from memtune.testing import TechniqueSuite, drift, rewritten, train
from memtune.testing.drift_check import plain_program, target_of
from memtune.testing.training import build, config_of, differences, plain

ALL = CopyOut(kind="copy_out", min_bytes=0)
HALF = CopyOut(kind="copy_out", min_bytes=0, ratio=0.5)
SSD = CopyOut(kind="copy_out", min_bytes=0, target="ssd", prefetch=2)


_CELLS = """
import torch
from torch import nn

class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(16, 16), nn.GRUCell(16, 16)

    def forward(self, x):
        hidden, cell = self.lstm(x)
        return self.gru(x, hidden) + cell

def model(): return nn.Sequential(Cell(), Cell(), Cell())
def batch(size): return torch.randn(2 * size, 16)
def loss(model, batch): return model(batch).square().mean()
"""
QUICK = [name if name in ("tied", "lstm") else pytest.param(name, marks=pytest.mark.slow) for name in ZOO]


class TestCopyOut(TechniqueSuite):
    technique = CopyOut
    models = ZOO
    quick = ("tied",)
    drawn_defects = 8  # all: other suites of the slot draw one each
    variants = (ALL, HALF)

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))

    @pytest.mark.drawn(4)
    @pytest.mark.parametrize("variant", [ALL, HALF], ids=["all", "half"])
    @pytest.mark.parametrize(
        "recompute", [Full(kind="full"), Selective(kind="selective")], ids=lambda each: each.kind
    )
    @pytest.mark.parametrize("model", ZOO)
    def test_composes_with_recompute(self, model: str, recompute: Technique, variant: CopyOut) -> None:
        assert drift(ZOO[model], recompute, variant) == ""

    @pytest.mark.parametrize(
        "states",
        [
            {"kind": "optimizer_cpu", "update": "native", "trigger": "per_layer"},
            *(
                pytest.param({"kind": each}, marks=pytest.mark.slow)
                for each in ("stronghold", "patrickstar", "angel_ptm")
            ),
        ],
        ids=lambda each: str(each["kind"]),
    )
    def test_prefetched_tensors_are_on_the_host_until_gradient_copies_end(
        self, states: dict[str, str]
    ) -> None:
        """Between the end of a node, when gradients are ready, and the next one, which reads the prefetched
        tensors.
        """
        assert drift(ZOO["gpt"], ALL, find("offload.states", states["kind"]).model_validate(states)) == ""

    @pytest.mark.drawn(1)
    @pytest.mark.parametrize("recompute", [(), (Selective(kind="selective"),)], ids=["alone", "selective"])
    def test_gates_saved_in_parts_stay_as_predicted(
        self, recompute: tuple[Technique, ...], tmp_path: Path
    ) -> None:
        path = tmp_path / "cells.py"
        path.write_text(_CELLS)
        assert drift(path, ALL, *recompute, micro_batch=4) == ""

    @pytest.mark.drawn(3)
    @pytest.mark.parametrize(
        "recompute", [Full(kind="full"), Selective(kind="selective")], ids=lambda each: each.kind
    )
    @pytest.mark.parametrize("model", ["gpt", "cnn_bn", "inplace_views"])
    def test_trains_with_recompute(self, model: str, recompute: Technique) -> None:
        assert not differences(train(ZOO[model], recompute, HALF), plain(ZOO[model]))

    @pytest.mark.parametrize(("variant", "blocks"), [(ALL, 4), (HALF, 2)], ids=["all", "half"])
    def test_claimed_share_is_offloaded_and_reloaded_once(self, variant: CopyOut, blocks: int) -> None:
        """The mechanism: bytes on the link. With half the ratio, half as much is copied."""
        before, step = rewritten(ZOO["gpt"]), rewritten(ZOO["gpt"], variant)
        down = int(step.ops.traffic_bytes[step.ops.resource == Resource.DEVICE_TO_HOST].sum())
        up = int(step.ops.traffic_bytes[step.ops.resource == Resource.HOST_TO_DEVICE].sum())
        batch = int(before.ops.traffic_bytes[before.ops.resource == Resource.HOST_TO_DEVICE].sum())
        assert down == up - batch == sum(before.saved_bytes(block) for block in range(blocks))

    def test_prefetched_reloads_are_hardly_exposed(self) -> None:
        """The mechanism of `prefetch`: the same bytes on the link, overlapped with backward except for the
        first read.
        """
        program, here = (
            plain_program(ZOO["gpt"]),
            replace(CPU, device="cuda", launch_s=0.0, hook_s=0.0, **NO_HOST_COSTS),
        )
        plain_s = simulate(program, here, level="events").step_s
        steps = [rewritten(ZOO["gpt"], ALL.model_copy(update={"prefetch": prefetch})) for prefetch in (0, 6)]
        up = [
            int(step.ops.traffic_bytes[step.ops.resource == Resource.HOST_TO_DEVICE].sum()) for step in steps
        ]
        assert up[0] == up[1]
        link = replace(here, host_to_device_bytes_per_s=up[0] / (0.2 * plain_s))
        late, ahead = (
            simulate(program.with_step(step), link, level="events").exposed_s["host_to_device"]
            for step in steps
        )
        assert late > 0.15 * plain_s
        assert ahead < 0.25 * late

    def test_plan_is_empty_unless_blocks_differ_in_size(self) -> None:
        """Editing the ratio makes its plan void."""
        program, uneven = plain_program(ZOO["gpt"]), plain_program(ZOO["lstm"])
        target = target_of(HALF)
        assert HALF.plan(program, target).document() == {}
        plan = HALF.plan(uneven, target)
        assert plan.ratio == 0.5
        quarter = HALF.model_copy(update={"ratio": 0.25})
        got, wanted = (quarter.rewrite(uneven, each, target).step for each in (plan, CopyOutPlan()))
        assert got.ops.traffic_bytes.tolist() == wanted.ops.traffic_bytes.tolist()
        workload, model, optimizer = build(ZOO["lstm"])
        document = config_of(ZOO["lstm"], HALF)
        document["plan"]["offload.activations"]["shares"] = [[[0.5, 1]]]
        with pytest.raises(ApplyError, match="needs a plan"):
            apply(model, optimizer, document, loss=workload.loss, strict=False)

    @pytest.mark.parametrize("recompute", [(), (Full(kind="full"),), (Selective(kind="selective"),)], ids=str)
    @pytest.mark.parametrize("model", QUICK)
    def test_ssd_is_used_as_predicted(self, model: str, recompute: tuple[Technique, ...]) -> None:
        assert drift(ZOO[model], *recompute, SSD) == ""

    @pytest.mark.parametrize("model", ["gpt"])
    def test_ssd_with_half_the_ratio_and_without_prefetch(self, model: str) -> None:
        assert drift(ZOO[model], SSD.model_copy(update={"prefetch": 0, "ratio": 0.5})) == ""

    @pytest.mark.parametrize("model", QUICK)
    def test_ssd_trains_as_the_plain_model(self, model: str) -> None:
        assert not differences(train(ZOO[model], SSD), plain(ZOO[model]))
        gc.collect()
        assert ssd_tensors.current().engine.written_bytes > 0
        assert ssd_tensors.current().used_bytes == 0

    @pytest.mark.parametrize("prefetch", [0, 2])
    def test_ssd_is_written_and_read_once_and_host_memory_holds_a_few_tensors(self, prefetch: int) -> None:
        """The mechanism of `target: ssd`: tensors written to the drive are freed on the host."""
        host, step = (
            rewritten(ZOO["gpt"], ALL),
            rewritten(ZOO["gpt"], SSD.model_copy(update={"prefetch": prefetch})),
        )
        moved = int(host.ops.traffic_bytes[host.ops.resource == Resource.DEVICE_TO_HOST].sum())
        for resource in (Resource.DEVICE_TO_HOST, Resource.SSD_WRITE, Resource.SSD_READ):
            assert int(step.ops.traffic_bytes[step.ops.resource == resource].sum()) == moved
        largest = int(step.ops.traffic_bytes[step.ops.resource == Resource.SSD_WRITE].max())
        batch = host.peak_bytes(Tier.HOST) - moved
        assert step.peak_bytes(Tier.SSD) == moved
        assert step.peak_bytes(Tier.HOST) - batch <= (max(WRITES_IN_FLIGHT, prefetch) + 1) * largest < moved
        assert step.peak_bytes() == host.peak_bytes()

    def test_ssd_reports_written_bytes_and_the_simulator_prices_them(self) -> None:
        program = plain_program(ZOO["gpt"])
        step = rewritten(ZOO["gpt"], SSD)
        found = simulate(
            replace(program, accumulate=3).with_step(step), hardware.find("a100-80g"), level="events"
        )
        assert found.ssd_written_bytes == 3 * int(
            step.ops.traffic_bytes[step.ops.resource == Resource.SSD_WRITE].sum()
        )
        assert any("written to SSD" in line for line in time_lines(found.to_dict()))
        slower = replace(hardware.find("a100-80g"), ssd_read_bytes_per_s=1e7)
        assert simulate(program.with_step(step), slower, level="events").step_s > found.step_s / 3

    def test_ssd_needs_a_directory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(offload_dir.VARIABLE)
        assert "no directory" in str(SSD.fits(plain_program(ZOO["gpt"]), target_of(SSD)))
        with pytest.raises(EnvironmentFault, match="No directory"):
            train(ZOO["tied"], SSD)

    def test_damaged_file_raises_with_the_name_of_the_block(self) -> None:
        """Every byte that is written during forward is flipped before backward reads it."""
        workload, model, optimizer = build(ZOO["tied"])
        apply(model, optimizer, config_of(ZOO["tied"], SSD), strict=False)
        batch = workload.make_batch(2)
        loss = workload.loss(model, batch)
        path = ssd_tensors.current().path
        path.write_bytes(bytes(each ^ 1 for each in path.read_bytes()[: 1 << 20]))
        with pytest.raises(EnvironmentFault, match="a saved activation of") as caught:
            loss.backward()
        assert caught.value.code in ("MT363", "MT364")

    def test_small_tensors_are_resident(self) -> None:
        step = rewritten(ZOO["gpt"], CopyOut(kind="copy_out", min_bytes=20_000))
        sizes = step.ops.traffic_bytes[step.ops.resource == Resource.DEVICE_TO_HOST]
        assert len(sizes)
        assert sizes.min() >= 20_000

    def test_fits_refuses_blocks_without_large_tensors(self) -> None:
        technique = CopyOut(kind="copy_out", min_bytes=1 << 30)
        assert "1073741824" in str(technique.fits(plain_program(ZOO["gpt"]), target_of(technique)))


TWICE = Path(__file__).parents[3] / "support" / "models" / "recompute" / "called_twice.py"


@pytest.mark.parametrize("variant", [ALL, SSD], ids=["cpu", "ssd"])
def test_backward_inside_the_loss_prefetches_offloaded_tensors_only(
    variant: CopyOut, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second call of the model offloads its tensors after the first one's backward."""
    monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))
    rewritten(TWICE, variant).validate()
    assert drift(TWICE, variant) == "" or variant is SSD  # writes to SSD end earlier than predicted
    assert differences(train(TWICE, variant), plain(TWICE)) == []
