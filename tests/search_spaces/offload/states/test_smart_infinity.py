"""An updater process per storage domain: gradients out, weights in, state in its own file; it ends with its
trainer.

Distinguishing test: bytes between trainer and updaters are gradients plus weights; every updater is a process
with its own file and an equal part of the state; weights are sent, then written, before moments are.
"""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.budget_runs import trains_where_the_plain_model_is_out_of_memory
from support.gloo import FRESH
from support.suites.block_offload_suite import without_gradients
from support.zoo_paths import ZOO

from memtune.api import Tuned, apply
from memtune.errors import ApplyError, EnvironmentFault
from memtune.offload.core import own_grad
from memtune.offload.near_storage.update_worker_client import UpdaterLink
from memtune.program.step import Phase, Resource, Step, Tier
from memtune.runtime.memory_tiers import DEVICE, mark
from memtune.runtime.transfer import COUNTERS
from memtune.search_spaces.offload.states.optimizer_cpu import OptimizerCpu
from memtune.search_spaces.offload.states.smart_infinity import SmartInfinity
from memtune.search_spaces.offload.states.zero_infinity import ZeroInfinity
from memtune.ssd import offload_dir, ssd_tensors
from memtune.technique import Exactness, Technique
from memtune.testing import TechniqueSuite, rewritten
from memtune.testing.drift_check import drift, plain_program, target_of
from memtune.testing.training import SEED, build, config_of, differences, one_step, train

NATIVE = OptimizerCpu(kind="optimizer_cpu", update="native")
MASTER = OptimizerCpu(kind="optimizer_cpu", update="master")
SMALL = SmartInfinity(kind="smart_infinity", sub_group_mib=0.02)
BACKWARD = SMALL.model_copy(update={"gradients": "backward", "bucket_mib": 0.01})

KEEPS = SMALL.model_copy(update={"resume": "last_step"})


def total(step: Step, resource: Resource) -> int:
    return int(step.ops.traffic_bytes[step.ops.resource == resource].sum())


def tuned_with(
    technique: SmartInfinity | ZeroInfinity | OptimizerCpu, model: str = "tied"
) -> tuple[Any, Any, Any, Tuned]:
    workload, net, optimizer = build(ZOO[model])
    return workload, net, optimizer, apply(net, optimizer, config_of(ZOO[model], technique), strict=False)


def facts(tuned: Tuned) -> dict[str, Any]:
    found: dict[str, Any] = tuned.audit()["offload.states"]
    return found


def updaters(tuned: Tuned) -> list[UpdaterLink]:
    check: Any = tuned._context.checks["offload.states"]
    return [domain.link for domain in check.__self__._domains]


def clipped(technique: SmartInfinity | OptimizerCpu) -> list[torch.Tensor]:
    """Return weights after five steps of three micro-batches, with gradients clipped by norm."""
    workload, net, optimizer, _ = tuned_with(technique)
    for step in range(5):
        torch.manual_seed(SEED + step)
        for _ in range(3):
            (workload.loss(net, workload.make_batch(2)) / 3).backward()
        assert torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5) > 0.5
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in net.parameters()]


def with_gaps(technique: SmartInfinity | OptimizerCpu) -> list[torch.Tensor]:
    """Return weights after five steps in each of which every third parameter has no gradient."""
    workload, net, optimizer, _ = tuned_with(technique)
    for step in range(5):
        torch.manual_seed(step)
        workload.loss(net, workload.make_batch(2)).backward()
        for index, parameter in enumerate(net.parameters()):
            if (index + step) % 3 == 0:
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in net.parameters()]


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def train_and_report_updaters(connection: Any, directory: str) -> None:
    """Run one step in a process of its own, then wait to be killed."""
    os.environ[offload_dir.VARIABLE] = directory
    torch.set_num_threads(1)
    workload, net, optimizer, tuned = tuned_with(SMALL)
    one_step(workload, net, optimizer, tuned, seed=SEED)
    connection.send([link.process.pid for link in updaters(tuned)])
    time.sleep(60)


class TestSmartInfinity(TechniqueSuite):
    technique = SmartInfinity
    models: ClassVar = {"tied": ZOO["tied"]}
    others: ClassVar = ZOO
    variants = (SMALL, BACKWARD)
    quick = ("tied",)
    tolerance = 1e-5

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))

    def check_training(self, model: str, variant: Technique) -> None:
        if variant == BACKWARD:  # gradients are on the host when backward returns
            found, wanted = (without_gradients(train(ZOO[model], each)) for each in (variant, NATIVE))
            assert not (bad := differences(found, wanted)), bad[:5]
        else:
            super().check_training(model, variant)

    def sabotage(self, tuned: Tuned) -> bool:
        tuned.optimizer.state[next(iter(tuned.model.parameters()))] = {"exp_avg": torch.zeros(1)}
        return True

    def test_gradients_are_offloaded_in_backward(self) -> None:
        """The mechanism: after backward only the sentinel's gradient is on the device; the step offloads that
        one alone, and the peak is lower by the others. Clipped and accumulated, all bits are the native
        update's.
        """
        step, late = rewritten(ZOO["tied"], BACKWARD), rewritten(ZOO["tied"], SMALL)
        copies = step.ops.resource == Resource.DEVICE_TO_HOST
        in_backward = copies & (step.ops.phase == Phase.BACKWARD)
        sentinel = min(4 * each.numel() for each in build(ZOO["tied"])[1].parameters() if each.requires_grad)
        assert total(step, Resource.DEVICE_TO_HOST) == total(late, Resource.DEVICE_TO_HOST)
        assert int(step.ops.traffic_bytes[copies & ~in_backward].sum()) == sentinel
        assert step.peak_bytes() < late.peak_bytes()
        workload, net, *_ = tuned_with(BACKWARD)
        workload.loss(net, workload.make_batch(2)).backward()
        left = [each for each in net.parameters() if own_grad(each) is not None]
        assert [4 * each.numel() for each in left] == [sentinel]
        assert all(map(torch.equal, clipped(BACKWARD), clipped(NATIVE)))

    def test_fits_refuses_a_share_of_gradients_offloaded_in_backward(self) -> None:
        some = BACKWARD.model_copy(update={"topk_ratio": 0.1})
        assert "in the step" in str(some.fits(plain_program(ZOO["tied"]), target_of()))

    @pytest.mark.slow  # each apply starts two processes
    def test_failed_apply_leaves_no_trace(self) -> None:
        self.check_untouched("tied", SMALL)

    @pytest.mark.slow
    def test_audit_finds_technique_not_in_effect(self) -> None:
        super().test_audit_finds_technique_not_in_effect()

    @pytest.mark.slow
    @pytest.mark.parametrize("model", ZOO)
    def test_training_is_as_predicted(self, model: str) -> None:
        if (reason := SMALL.fits(plain_program(ZOO[model]), target_of())) is not None:
            pytest.skip(str(reason))
        if model != "moe":  # the recorder runs it for real, and keeps what it ran
            assert not drift(ZOO[model], SMALL)
        assert not differences(train(ZOO[model], SMALL), train(ZOO[model], NATIVE))

    def test_accumulation_and_clipping_are_bitwise_those_of_the_native_update(self) -> None:
        assert all(map(torch.equal, clipped(SMALL), clipped(NATIVE)))

    @pytest.mark.slow
    def test_parameters_without_a_gradient_are_unchanged(self) -> None:
        """Sub-groups without any gradient are not even read."""
        assert all(map(torch.equal, with_gaps(SMALL), with_gaps(NATIVE)))

    def test_only_gradients_and_weights_are_sent_between_trainer_and_updaters(self) -> None:
        """The mechanism, by bytes: in a step `zero_infinity` passes 24 bytes of state per parameter through
        the trainer's own file and buffers; here its file is not even open, and 4 bytes go out and 4 in.
        """
        numel = sum(int(each.numel()) for each in build(ZOO["tied"])[1].parameters() if each.requires_grad)
        workload, net, optimizer, tuned = tuned_with(SMALL)
        before = facts(tuned)["moved_bytes"]
        COUNTERS.take()
        one_step(workload, net, optimizer, tuned, seed=SEED)
        counted, after = COUNTERS.take(), facts(tuned)["moved_bytes"]
        assert counted["to_updaters"] == counted["from_updaters"] == counted["device_to_host"] == 4 * numel
        for mine, what in (("ssd_read", "read"), ("ssd_write", "written")):
            assert (
                counted[mine]
                == sum(b[what] - a[what] for a, b in zip(before, after, strict=True))
                == 12 * numel
            )
        used = ssd_tensors.opened()
        assert used is None or used.used_bytes == 0
        step, infinity = (
            rewritten(ZOO["tied"], SMALL),
            rewritten(ZOO["tied"], ZeroInfinity(kind="zero_infinity")),
        )
        for resource in (
            Resource.SSD_READ,
            Resource.SSD_WRITE,
            Resource.DEVICE_TO_HOST,
            Resource.HOST_TO_DEVICE,
        ):
            assert total(step, resource) == total(infinity, resource)
        assert step.peak_bytes(Tier.SSD) == 12 * numel

    def test_keeping_the_last_step_takes_twice_the_space_for_the_same_traffic(self) -> None:
        step, kept = rewritten(ZOO["tied"], SMALL), rewritten(ZOO["tied"], KEEPS)
        assert kept.peak_bytes(Tier.SSD) == 2 * step.peak_bytes(Tier.SSD)
        assert total(kept, Resource.SSD_WRITE) == total(step, Resource.SSD_WRITE)
        assert (kept.peak_bytes(), kept.peak_bytes(Tier.HOST)) == (
            step.peak_bytes(),
            step.peak_bytes(Tier.HOST),
        )
        self.check_drift("tied", KEEPS)

    @pytest.mark.slow
    def test_two_slots_are_bitwise_with_the_same_bytes_on_the_drive(self) -> None:
        assert not differences(train(ZOO["tied"], KEEPS), train(ZOO["tied"], NATIVE))
        workload, net, optimizer, tuned = tuned_with(KEEPS)
        before = facts(tuned)["moved_bytes"]
        one_step(workload, net, optimizer, tuned, seed=SEED)
        after = facts(tuned)
        kept = rewritten(ZOO["tied"], KEEPS)
        assert sum(after["ssd_bytes"]) == kept.peak_bytes(Tier.SSD)
        for what, resource in (("read", Resource.SSD_READ), ("written", Resource.SSD_WRITE)):
            assert sum(b[what] - a[what] for a, b in zip(before, after["moved_bytes"], strict=True)) == total(
                kept, resource
            )
        tuned.finish()

    def test_resume_with_a_share_of_the_gradients_is_refused(self) -> None:
        some = KEEPS.model_copy(update={"topk_ratio": 0.1})
        assert "share" in str(some.fits(plain_program(ZOO["tied"]), target_of()))
        _, net, optimizer = build(ZOO["tied"])
        with pytest.raises(ApplyError, match="share"):
            apply(net, optimizer, config_of(ZOO["tied"], some), strict=False)

    @pytest.mark.slow
    def test_domains_have_a_process_a_file_and_an_equal_part(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The mechanism: with one domain, one process would hold all."""
        roots = [tmp_path / "one", tmp_path / "two"]
        for root in roots:
            root.mkdir()
        monkeypatch.setenv(offload_dir.VARIABLE, os.pathsep.join(map(str, roots)))
        *_, tuned = tuned_with(SMALL.model_copy(update={"domains": 3}))
        links = updaters(tuned)
        assert len({link.process.pid for link in links}) == len({link.path for link in links}) == 3
        assert [link.path.parents[1] for link in links] == [roots[0], roots[1], roots[0]]
        ssd_bytes = facts(tuned)["ssd_bytes"]
        assert max(ssd_bytes) - min(ssd_bytes) <= 12

    def test_weights_are_sent_before_moments_are_written(self) -> None:
        """The mechanism, by events: an updated sub-group's weights are sent, then written, before its moments
        are; and the read of a later sub-group begins before an earlier one is updated.
        """
        workload, net, optimizer, tuned = tuned_with(SMALL)
        one_step(workload, net, optimizer, tuned, seed=SEED)
        for events in facts(tuned)["events"]:
            order = [(what, group) for what, group, _ in events]
            groups = sorted({group for _, group in order if group >= 0})
            assert len(groups) > 3
            for group in groups:
                acts = ("read", "update", "weights handed over", "write weights", "write moments")
                assert [each for each in order if each[1] == group] == [(act, group) for act in acts]
            assert order.index(("read", 2)) < order.index(("update", 0))
            assert order[-1] == ("all written", -1)
            times = [at for *_, at in events]
            assert times == sorted(times)

    @pytest.mark.slow
    def test_processes_and_files_end_with_the_model(self, tmp_path: Path) -> None:
        *made, tuned = tuned_with(SMALL)
        pids = [link.process.pid for link in updaters(tuned)]
        assert all(map(is_running, pids))
        assert len(list(tmp_path.glob("memtune-run-*/tensors"))) == 2
        del made, tuned
        gc.collect()
        assert not any(map(is_running, pids))
        assert not list(tmp_path.iterdir())

    @pytest.mark.slow
    def test_host_memory_is_as_predicted(self) -> None:
        *_, tuned = tuned_with(SMALL)
        there = sum(each.nbytes for link in updaters(tuned) for each in (*link.slots, *link.buffers))
        step, plain = rewritten(ZOO["tied"], SMALL), rewritten(ZOO["tied"])
        assert (
            there == facts(tuned)["shared_bytes"] == step.peak_bytes(Tier.HOST) - plain.peak_bytes(Tier.HOST)
        )

    @pytest.mark.slow
    @pytest.mark.native_ledger
    def test_trains_where_the_plain_model_is_out_of_memory(self) -> None:
        trains_where_the_plain_model_is_out_of_memory(ZOO["gpt"], SMALL)

    @pytest.mark.slow
    def test_float32_masters_of_bfloat16_parameters(self) -> None:
        master = SMALL.model_copy(update={"update": "master"})
        assert not differences(train(ZOO["tobf16"], master), train(ZOO["tobf16"], MASTER))
        assert (SMALL.exactly(), master.exactly()) == (Exactness.REORDERED, Exactness.LOSSY)

    @pytest.mark.slow
    def test_masters_and_the_largest_gradients_are_predicted(self) -> None:
        for model, change in (
            ("tobf16", {"update": "master"}),
            ("tied", {"topk_ratio": 0.1}),
            ("tied", {"domains": 3, "buffers": 2}),
        ):
            assert not drift(ZOO[model], SMALL.model_copy(update=change))

    @pytest.mark.slow
    def test_only_the_largest_gradients_are_sent(self) -> None:
        """Off by default, lossy; `tests/offload/near_storage/test_topk_compression.py` checks that the sum of
        gradients is kept.
        """
        some = SMALL.model_copy(update={"topk_ratio": 0.1})
        assert SMALL.topk_ratio is None
        assert some.exactly() is Exactness.LOSSY
        workload, net, optimizer, tuned = tuned_with(some)
        numel = sum(each.numel() for each in net.parameters() if each.requires_grad)
        COUNTERS.take()
        losses = [float(one_step(workload, net, optimizer, tuned, seed=SEED)[0]) for _ in range(6)]
        counted = COUNTERS.take()
        assert 0.1 * 8 * numel <= counted["to_updaters"] / 6 < 0.11 * 8 * numel
        assert counted["from_updaters"] == 6 * 4 * numel
        assert losses[-1] < losses[0]

    @pytest.mark.slow
    def test_state_dict_is_complete_and_can_be_loaded(self) -> None:
        workload, net, optimizer, tuned = tuned_with(SMALL)
        one_step(workload, net, optimizer, tuned, seed=SEED)
        saved = copy.deepcopy(tuned.state_dict())
        wanted = one_step(workload, net, optimizer, tuned, seed=SEED + 1)
        after = {name: value.clone() for name, value in net.state_dict().items()}
        plain = tuned_with(NATIVE)
        one_step(*plain, seed=SEED)
        theirs = plain[3].state_dict()["optimizer"]["state"]
        for index, state in saved["optimizer"]["state"].items():
            assert all(
                torch.equal(state[name], theirs[index][name]) for name in ("step", "exp_avg", "exp_avg_sq")
            )
        workload, net, optimizer, tuned = tuned_with(SMALL)
        tuned.load_state_dict(saved)
        got = one_step(workload, net, optimizer, tuned, seed=SEED + 1)
        assert torch.equal(got[0], wanted[0])
        assert all(torch.equal(after[name], value) for name, value in net.state_dict().items())

    @pytest.mark.parametrize("within_step", [False, pytest.param(True, marks=pytest.mark.slow)])
    def test_killed_updater_ends_training_with_its_name(self, within_step: bool) -> None:
        """No wrong result: the step and every later one raise, even if weights of other domains have
        arrived.
        """
        workload, net, optimizer, tuned = tuned_with(SMALL)
        one_step(workload, net, optimizer, tuned, seed=SEED)
        victim = updaters(tuned)[1].process
        victim.send_signal(signal.SIGSTOP if within_step else signal.SIGKILL)
        if within_step:
            threading.Timer(0.5, victim.kill).start()
        for _ in range(2):
            with pytest.raises(
                EnvironmentFault, match=r"updater of storage domain 1 .* has ended by SIGKILL"
            ) as caught:
                one_step(workload, net, optimizer, tuned, seed=SEED + 1)
            assert str(victim.pid) in caught.value.what
        with pytest.raises(EnvironmentFault, match=r"updater of storage domain 1 .* has ended by SIGKILL"):
            tuned.state_dict()  # not that of domain 0, whose replies are of an unfinished step

    @pytest.mark.slow
    def test_damaged_file_raises_with_the_names_of_parameters(self) -> None:
        workload, net, optimizer, tuned = tuned_with(SMALL)
        one_step(workload, net, optimizer, tuned, seed=SEED)
        facts(tuned)  # all is written
        with open(updaters(tuned)[0].path, "r+b") as file:
            (right,) = file.read(1)
            file.seek(0)
            file.write(bytes([right ^ 4]))
        with pytest.raises(
            EnvironmentFault, match=r"domain 0 in .* gave up. The bytes of the weights of "
        ) as caught:
            one_step(workload, net, optimizer, tuned, seed=SEED + 1)
        assert caught.value.code == "MT363"
        assert next(name for name, _ in net.named_parameters()) in caught.value.what

    @pytest.mark.slow
    def test_updaters_end_with_their_trainer(self, tmp_path: Path) -> None:
        """After `kill -9` of the trainer no process and, after the next cleanup, no file is left."""
        ours, theirs = FRESH.Pipe()
        trainer = FRESH.Process(target=train_and_report_updaters, args=(theirs, str(tmp_path)))
        trainer.start()
        theirs.close()
        pids = ours.recv()
        assert len(pids) == 2
        assert all(map(is_running, pids))
        trainer.kill()
        trainer.join()
        stop_s = time.monotonic() + 10
        while any(map(is_running, pids)) and time.monotonic() < stop_s:
            time.sleep(0.02)
        assert not any(map(is_running, pids))
        assert not list(tmp_path.glob("memtune-run-*/tensors"))

    @pytest.mark.slow
    def test_fits_refuses_by_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        program = plain_program(ZOO["tied"])
        assert "master" in str(SMALL.fits(plain_program(ZOO["tobf16"]), target_of()))
        assert SMALL.fits(program, replace(target_of(), ranks=2)) is None
        monkeypatch.delenv(offload_dir.VARIABLE)
        assert "no directory" in str(SMALL.fits(program, target_of()))
        _, net, optimizer = build(ZOO["tied"])
        with pytest.raises(EnvironmentFault, match="No directory"):
            apply(net, optimizer, config_of(ZOO["tied"], SMALL), strict=False)
        monkeypatch.setenv(offload_dir.VARIABLE, "/one:/two")
        with pytest.raises(EnvironmentFault, match="/one cannot be used"):
            apply(net, optimizer, config_of(ZOO["tied"], SMALL), strict=False)


@pytest.mark.slow
def test_state_is_marked_for_the_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit finds the place of every sub-group."""
    monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))
    *_, tuned = tuned_with(SMALL)
    check = tuned._context.checks["offload.states"]
    assert check()["parameters"] > 0
    mark(check.__self__._domains[0].moments[0], DEVICE)  # type: ignore[attr-defined]
    with pytest.raises(Exception, match="not with its updaters"):
        check()
