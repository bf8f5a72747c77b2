"""Optimizer state on SSD: 12 bytes per parameter are read and written in a step, and host memory holds a few
pieces.

Distinguishing test: 12 bytes per parameter are read and 12 written in a step, the read of the third parameter
begins before the first is updated, and host memory holds no more pieces than are in flight; a block is read
from SSD while the one two before it computes; of a tiled weight and of its gradient, at most two tiles are on
the device. With the optimizer on the host only each block's weight and gradient cross the drive, if they are
on SSD.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from support.suites.block_offload_suite import block_bytes
from support.zoo_paths import ZOO

from memtune.api import Tuned, apply
from memtune.errors import EnvironmentFault
from memtune.offload.parameters.ssd_values import ParameterTier
from memtune.program.step import Kind, Phase, Resource, Step, Tier
from memtune.runtime.memory_tiers import DEVICE, SSD, mark, tier_of
from memtune.search_spaces.offload.states.optimizer_cpu import OptimizerCpu
from memtune.search_spaces.offload.states.zero_infinity import ZeroInfinity
from memtune.ssd import offload_dir, ssd_tensors
from memtune.testing import TechniqueSuite, drift, rewritten
from memtune.testing.drift_check import plain_program, target_of
from memtune.testing.training import SEED, build, config_of, differences, one_step, train

DEFAULT = ZeroInfinity(kind="zero_infinity")


def rows(step: Step, name: str) -> list[int]:
    return np.flatnonzero(step.ops.name == step.names.index(f"memtune.{name}.default")).tolist()


def total(step: Step, resource: Resource) -> int:
    return int(step.ops.traffic_bytes[step.ops.resource == resource].sum())


@pytest.mark.usefixtures("ssd")
class TestZeroInfinity(TechniqueSuite):
    technique = ZeroInfinity
    models: ClassVar = {name: ZOO[name] for name in ("tied", "tobf16")}
    others: ClassVar = ZOO
    quick = ("tied",)
    tolerance = 1e-5

    def sabotage(self, tuned: Tuned) -> bool:
        mark(next(iter(tuned.optimizer.state.values()))["exp_avg"], DEVICE)
        return True

    @pytest.mark.slow
    @pytest.mark.parametrize("model", ZOO)
    def test_training_is_as_predicted(self, model: str) -> None:
        self._skip_unless_it_fits(model, DEFAULT)
        self.check_drift(model, DEFAULT)
        native = OptimizerCpu(kind="optimizer_cpu", update="native")
        assert not differences(train(ZOO[model], DEFAULT), train(ZOO[model], native))

    def test_training_is_bitwise_that_of_the_native_update_in_host_memory(self) -> None:
        native = OptimizerCpu(kind="optimizer_cpu", update="native")
        assert not differences(train(ZOO["tied"], DEFAULT), train(ZOO["tied"], native))

    @pytest.mark.parametrize("prefetch", [0, 3])
    def test_bytes_on_the_drive_and_in_host_memory_follow_the_formula(self, prefetch: int) -> None:
        plain, step = (
            rewritten(ZOO["gpt"]),
            rewritten(ZOO["gpt"], DEFAULT.model_copy(update={"optimizer_prefetch": prefetch})),
        )
        numel = sum(int(plain.storages.bytes[each.gradient]) // 4 for each in plain.parameters)
        largest = max(int(plain.storages.bytes[each.gradient]) // 4 for each in plain.parameters)
        assert (
            total(step, Resource.SSD_READ)
            == total(step, Resource.SSD_WRITE)
            == step.peak_bytes(Tier.SSD)
            == 12 * numel
        )
        assert total(step, Resource.DEVICE_TO_HOST) == 4 * numel
        counters = 4 * len(plain.parameters)
        batch = plain.peak_bytes(Tier.HOST)
        assert step.peak_bytes(Tier.HOST) - counters - batch <= (12 * (prefetch + 3) + 4) * largest
        assert not (step.storages.kind[step.storages.tier == Tier.DEVICE] == Kind.OPTIMIZER).any()

    def test_keeping_the_last_step_takes_twice_the_space_for_the_same_traffic(self) -> None:
        keeps = DEFAULT.model_copy(update={"resume": "last_step"})
        step, kept = rewritten(ZOO["tied"], DEFAULT), rewritten(ZOO["tied"], keeps)
        assert kept.peak_bytes(Tier.SSD) == 2 * step.peak_bytes(Tier.SSD)
        assert total(kept, Resource.SSD_WRITE) == total(step, Resource.SSD_WRITE)
        assert kept.peak_bytes() == step.peak_bytes()
        self.check_drift("tied", keeps)
        ssd_tensors.folder().remove()

    @pytest.mark.parametrize("tier", ["ssd", pytest.param("host", marks=pytest.mark.slow)])
    def test_offloaded_parameters_train_bitwise(self, tier: ParameterTier) -> None:
        offloaded = DEFAULT.model_copy(update={"parameters": tier})
        self.check_drift("tied", offloaded)
        native = train(ZOO["tied"], OptimizerCpu(kind="optimizer_cpu", update="native"))
        found = train(ZOO["tied"], offloaded)
        assert not differences(replace(found, gradients=[]), replace(native, gradients=[]))

    def test_blocks_are_read_two_blocks_before_use_and_bytes_follow_the_formula(self) -> None:
        """The mechanism: while block i computes, i + 1 is loaded and i + 2 is read; without prefetch not."""
        plain = rewritten(ZOO["gpt"])
        for prefetch in (1, 0):
            step = rewritten(
                ZOO["gpt"], DEFAULT.model_copy(update={"parameters": "ssd", "parameter_prefetch": prefetch})
            )
            numel = sum(int(plain.storages.bytes[each.gradient]) // 4 for each in plain.parameters)
            sizes = block_bytes(plain)
            twice = 2 * sum(sizes) - sum(sizes[-2:])  # the last two are resident between forward and backward
            assert total(step, Resource.SSD_READ) == 12 * numel + twice
            assert total(step, Resource.SSD_WRITE) == 12 * numel + sum(sizes)
            assert step.peak_bytes(Tier.SSD) == 12 * numel + sum(sizes)
            there = step.with_storages(
                tier=np.where(step.storages.kind == Kind.COMMUNICATION, step.storages.tier, Tier.SSD).astype(
                    np.uint8
                )
            )
            assert there.peak_bytes() == sizes[0] + sizes[1]
            in_forward = [row for row in rows(step, "from_ssd") if step.ops.phase[row] == Phase.FORWARD]
            third = in_forward[2 * len(in_forward) // len(sizes)]
            assert (third < self._begins(step, 0)) == (prefetch == 1)
            assert third < self._begins(step, 1)

    @staticmethod
    def _begins(step: Step, block: int) -> int:
        computes = (
            (step.ops.phase == Phase.FORWARD)
            & (step.ops.block == block)
            & (step.ops.resource == Resource.COMPUTE)
        )
        return int(np.flatnonzero(computes)[0])

    def test_reads_begin_before_earlier_updates(self) -> None:
        """The mechanism: three pieces are prefetched. Without prefetch each read waits for the update before
        it.
        """
        deep, flat = (
            rewritten(ZOO["gpt"], DEFAULT.model_copy(update={"optimizer_prefetch": prefetch}))
            for prefetch in (3, 0)
        )
        assert rows(deep, "from_ssd")[2] < rows(deep, "host_update_")[0]
        assert rows(deep, "from_ssd")[3] < rows(deep, "host_update_")[1]
        assert rows(flat, "from_ssd")[1] > rows(flat, "host_update_")[0]

    def test_float32_masters_of_bfloat16_parameters(self) -> None:
        master = ZeroInfinity(kind="zero_infinity", update="master")
        self.check_drift("tobf16", master)
        host = OptimizerCpu(kind="optimizer_cpu", update="master")
        assert not differences(train(ZOO["tobf16"], master), train(ZOO["tobf16"], host))

    def test_state_dict_is_complete_and_can_be_loaded(self) -> None:
        workload, model, optimizer = build(ZOO["tied"])
        tuned = apply(model, optimizer, config_of(ZOO["tied"], DEFAULT), strict=False)
        one_step(workload, model, optimizer, tuned, seed=SEED)
        saved = copy.deepcopy((tuned.state_dict(), optimizer.state_dict()))
        wanted = one_step(workload, model, optimizer, tuned, seed=SEED + 1)
        after = {name: value.clone() for name, value in model.state_dict().items()}

        workload, model, optimizer = build(ZOO["tied"])
        model.load_state_dict(saved[0]["model"])
        tuned = apply(model, optimizer, config_of(ZOO["tied"], DEFAULT), strict=False)
        optimizer.load_state_dict(saved[1])
        got = one_step(workload, model, optimizer, tuned, seed=SEED + 1)
        assert torch.equal(got[0], wanted[0])
        assert all(torch.equal(after[name], value) for name, value in model.state_dict().items())
        assert all(tier_of(state["exp_avg"]) == SSD for state in optimizer.state.values())

    def test_damaged_file_raises_in_the_step_with_the_name_of_the_parameter(self) -> None:
        workload, model, optimizer = build(ZOO["tied"])
        tuned = apply(model, optimizer, config_of(ZOO["tied"], DEFAULT), strict=False)
        one_step(workload, model, optimizer, tuned, seed=SEED)
        with open(ssd_tensors.current().path, "r+b") as file:
            (right,) = file.read(1)
            file.seek(0)
            file.write(bytes([right ^ 4]))
        name = next(name for name, each in model.named_parameters() if each.requires_grad)
        with pytest.raises(EnvironmentFault, match=f"the optimizer state of {name}"):
            optimizer.state_dict()  # a checkpoint of what is damaged would be worse than none
        with pytest.raises(EnvironmentFault, match="the optimizer state of ") as caught:
            one_step(workload, model, optimizer, tuned, seed=SEED + 1)
        assert caught.value.code == "MT363"
        assert name in caught.value.what

    def test_damaged_weight_raises_in_forward_with_its_name(self) -> None:
        workload, model, optimizer = build(ZOO["tied"])
        away = DEFAULT.model_copy(update={"parameters": "ssd"})
        tuned = apply(model, optimizer, config_of(ZOO["tied"], away), strict=False)
        one_step(workload, model, optimizer, tuned, seed=SEED)
        # The blocks' weights show the file on SSD between uses; those outside of the blocks stay in memory.
        name, ssd = next((n, p) for n, p in model.named_parameters() if tier_of(p) == SSD)
        with open(ssd_tensors.current().path, "r+b") as file:
            file.seek(ssd_tensors.current().extent(ssd).offset)
            file.write(b"\xff\x00\xff")
        with pytest.raises(EnvironmentFault, match=f"the weight {name}"):
            model.state_dict()
        with pytest.raises(EnvironmentFault, match=f"the weight {name}"):
            one_step(workload, model, optimizer, tuned, seed=SEED + 1)

    def test_fits_refuses_by_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "master" in str(DEFAULT.fits(plain_program(ZOO["tobf16"]), target_of()))
        master = ZeroInfinity(kind="zero_infinity", update="master")
        assert "native" in str(master.fits(plain_program(ZOO["tied"]), target_of()))
        monkeypatch.delenv(offload_dir.VARIABLE)
        assert "no directory" in str(DEFAULT.fits(plain_program(ZOO["tied"]), target_of()))


_GROUPS = """

def optimizer(params):
    params = list(params)
    decay, rest = ([each for each in params if (each.ndim > 1) is wanted] for wanted in (True, False))
    return torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}])
"""


@pytest.mark.usefixtures("ssd")
def test_parameter_groups_in_another_order_are_as_predicted(tmp_path: Path) -> None:
    """Groups with and without weight decay, as usual: memory follows the model's order, not the groups'."""
    path = tmp_path / "model.py"
    path.write_text(ZOO["tied"].read_text() + _GROUPS)
    for technique in (
        DEFAULT,
        DEFAULT.model_copy(update={"parameters": "ssd"}),
        OptimizerCpu(kind="optimizer_cpu"),
    ):
        assert drift(path, technique) == ""
