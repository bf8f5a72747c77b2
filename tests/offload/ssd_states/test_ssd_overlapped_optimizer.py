"""Updates from SSD inside backward: bits, bytes by the ledger under a budget, loops of the user's own,
faults.
"""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from support.zoo_paths import ZOO
from torch import nn
from torch.utils.checkpoint import checkpoint

from memtune import hardware
from memtune.api import Tuned, apply
from memtune.autotune.predict.simulation import simulate
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.config.tuned_config import TunedConfig
from memtune.errors import ApplyError, EnvironmentFault
from memtune.memory.ledger import Ledger
from memtune.program.step import Tier
from memtune.runtime.memory_tiers import HOST, SSD, tier, tier_of
from memtune.search_spaces.offload.states.lohan import Lohan
from memtune.ssd import offload_dir, ssd_tensors
from memtune.technique import Target
from memtune.testing.drift_check import recording_of
from memtune.testing.training import SEED, build, config_of, settings_of
from memtune.workload.workload import Workload

SMALL = Lohan(kind="lohan", bucket_mib=0.01)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))


def fused(path: Path) -> tuple[Workload, nn.Module, torch.optim.Optimizer]:
    """The model, and AdamW in torch's fused form, whose bits the native update has."""
    workload, model, _ = build(path)
    return workload, model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def batches(workload: Workload, step: int, count: int = 2) -> list[Any]:
    torch.manual_seed(SEED + step)
    with tier(HOST):
        return [workload.make_batch(2) for _ in range(count)]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def started() -> tuple[Workload, nn.Module, torch.optim.Optimizer, Tuned]:
    workload, model, optimizer = fused(ZOO["tied"])
    tuned = apply(model, optimizer, config_of(ZOO["tied"], SMALL), loss=workload.loss, strict=False)
    return workload, model, optimizer, tuned


def trained(
    path: Path, config: Any, steps: int, micro_batches: int = 2
) -> tuple[list[float], dict[str, torch.Tensor]]:
    workload, model, optimizer = fused(path)
    tuned = apply(model, optimizer, config, loss=workload.loss, strict=False)
    losses = [tuned.step(batches(workload, step, micro_batches)).item() for step in range(steps)]
    return losses, weights(model)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_ssd_overlapped_optimizer_has_the_bits_of_the_plain_run(micro_batches: int) -> None:
    """The plain run uses torch's fused AdamW on the device after backward, with accumulation."""
    got, wanted = (
        trained(ZOO["tied"], each, 5, micro_batches)
        for each in (config_of(ZOO["tied"], SMALL), {"settings": {}})
    )
    assert got[0] == wanted[0]
    assert all(torch.equal(got[1][name], value) for name, value in wanted[1].items())


@pytest.mark.native_ledger
@pytest.mark.parametrize("micro_batches", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_ssd_overlapped_optimizer_peaks_as_predicted_where_plain_is_out_of_memory(micro_batches: int) -> None:
    """Within 2 % per tier; no tier holds more after the third step."""
    path, machine = ZOO["gpt"], hardware.detect("cpu")
    rewriter = Rewriter(recording_of(path), Target(machine))
    execution = {"micro_batch": 2, "accumulate": micro_batches}
    found = rewriter.candidate(Choice.from_document({**settings_of(SMALL), "execution": execution}))
    plain = rewriter.candidate(Choice.from_document({"execution": execution}))
    assert isinstance(found, Candidate), found
    assert isinstance(plain, Candidate)
    predicted, whole = (simulate(each.program, machine).peak_allocated_bytes for each in (found, plain))
    gc.collect()
    ledger = Ledger.open("cpu")
    empty, empty_host = ledger.live_bytes(), ledger.live_bytes(HOST)
    workload, model, optimizer = fused(path)
    tuned = apply(model, optimizer, TunedConfig(settings=found.choice), loss=workload.loss, strict=False)
    gc.collect()
    budget, held = empty + (predicted + whole) // 2, []
    with Ledger.open("cpu", budget_bytes=budget) as ledger:
        for step in range(5):
            given = batches(workload, step, micro_batches)
            n_bytes = sum(each.nbytes for pair in given for each in pair)
            ledger.reset_peak()
            tuned.step(given)
            del given
            peaks = (
                ledger.peak_allocated_bytes() - empty,
                ledger.peak_allocated_bytes(HOST) - empty_host - n_bytes,
            )
            held.append(
                (*peaks, ledger.live_bytes(), ledger.live_bytes(HOST), ssd_tensors.current().used_bytes)
            )
    assert max(peak for peak, *_ in held[2:]) == pytest.approx(predicted, rel=0.02)
    host = found.program.step.peak_bytes(Tier.HOST) - 2 * 2 * 32 * 8  # without the batch
    assert max(peak for _, peak, *_ in held[2:]) == pytest.approx(host, rel=0.02)
    assert held[2][2:] == held[3][2:] == held[4][2:]
    del tuned, model, optimizer
    gc.collect()
    assert ssd_tensors.current().used_bytes == 0
    workload, model, optimizer = fused(path)
    tuned = apply(model, optimizer, {"settings": {}}, loss=workload.loss, strict=False)
    given = [
        batches(workload, step, micro_batches) for step in range(2)
    ]  # the first one makes the optimizer's state
    with Ledger.open("cpu", budget_bytes=budget), pytest.raises(torch.OutOfMemoryError):
        [tuned.step(each) for each in given]


def test_audit_counts_parameters_updated_in_backward() -> None:
    """All but the sentinel in `Tuned.step`; none in a loop that does not announce the last micro-batch; the
    same bits.
    """
    workload, model, optimizer, tuned = started()
    tuned.step(batches(workload, 0))
    assert tuned.audit()["offload.states"]["updated_in_backward"] == len(list(model.parameters())) - 1

    workload, own, optimizer = fused(ZOO["tied"])
    other = apply(own, optimizer, config_of(ZOO["tied"], SMALL), strict=False)
    for batch in batches(workload, 0):
        (workload.loss(own, batch) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert other.audit()["offload.states"]["updated_in_backward"] == 0
    wanted = weights(model)
    assert all(torch.equal(wanted[name], value) for name, value in own.state_dict().items())


def test_state_dict_is_complete_at_any_time_and_can_be_loaded() -> None:
    """Also between backward and step, while records are being written to SSD."""
    workload, model, optimizer, tuned = started()
    tuned.step(batches(workload, 0))
    saved = copy.deepcopy(tuned.state_dict())
    tuned.step(batches(workload, 1))
    wanted = weights(model)
    workload, model, optimizer, tuned = started()
    tuned.load_state_dict(saved)
    tuned.step(batches(workload, 1))
    assert all(torch.equal(wanted[name], value) for name, value in model.state_dict().items())
    assert all(tier_of(state["exp_avg"]) == SSD for state in optimizer.state.values())
    assert tuned._context.loop.sync is not None
    with tuned._context.loop.sync(True):
        workload.loss(model, batches(workload, 2, 1)[0]).backward()
    early = copy.deepcopy(optimizer.state_dict())["state"]
    optimizer.step()
    late = optimizer.state_dict()["state"]
    same = [torch.equal(early[key]["exp_avg"], late[key]["exp_avg"]) for key in late]
    assert same.count(False) == 1  # the sentinel gradient's


def test_load_between_backward_and_step_drops_running_updates() -> None:
    """Updates of that backward were writing weights to the device and to SSD; afterwards the step can run
    again.
    """
    workload, model, optimizer, tuned = started()
    tuned.step(batches(workload, 0))
    saved = copy.deepcopy(tuned.state_dict())
    assert tuned._context.loop.sync is not None
    with tuned._context.loop.sync(True):
        workload.loss(model, batches(workload, 2, 1)[0]).backward()
    tuned.load_state_dict(saved)
    optimizer.zero_grad()
    assert all(torch.equal(saved["model"][name], value) for name, value in weights(model).items())
    tuned.step(batches(workload, 1))
    got = weights(model)
    workload, model, optimizer, tuned = started()
    for step in range(2):
        tuned.step(batches(workload, step))
    assert all(torch.equal(got[name], value) for name, value in weights(model).items())


def test_ssd_overlapped_optimizer_refuses_clipping_by_norm() -> None:
    workload, model, optimizer = fused(ZOO["tied"])
    tuned = apply(model, optimizer, config_of(ZOO["tied"], SMALL), strict=False)
    assert tuned._context.loop.sync is not None
    with tuned._context.loop.sync(True):
        workload.loss(model, batches(workload, 0, 1)[0]).backward()
    with pytest.raises(ApplyError, match="clipping cannot change gradients") as caught:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert caught.value.code == "MT364"


@pytest.mark.parametrize(
    ("bias", "bucket_mib", "message"),
    [
        (True, 0.0, r"ready again after (.|\n)*reentrant checkpoints"),
        (False, 0.0, r"ready again after (.|\n)*reentrant checkpoints"),
        (True, 1.0, "twice in one backward"),
    ],
    ids=["after its update", "before its update", "in one bucket"],
)
def test_ssd_overlapped_optimizer_refuses_a_gradient_that_is_ready_twice(
    bias: bool, bucket_mib: float, message: str
) -> None:
    """A reentrant checkpoint around each of two uses of a weight: the first gradient is only a part.

    Without a bias, whose gradient would end the copy of the weight's first part, the second part is ready
    while the first is in flight.
    """
    shared, head = nn.Linear(8, 8, bias=bias), nn.Linear(8, 4, bias=bias)
    model = nn.Sequential(shared, head)
    config = {"settings": settings_of(SMALL.model_copy(update={"bucket_mib": bucket_mib}))}
    tuned = apply(model, torch.optim.AdamW(model.parameters(), fused=True), config, strict=False)
    assert tuned._context.loop.sync is not None
    x = torch.randn(2, 8, requires_grad=True)
    for _ in range(2):
        x = checkpoint(shared, x, use_reentrant=True)
    with tuned._context.loop.sync(True), pytest.raises(ApplyError, match=message) as caught:
        head(x).sum().backward()
    assert caught.value.code == "MT367"


def test_damaged_file_raises_in_backward_with_the_parameter_name() -> None:
    workload, _model, _optimizer, tuned = started()
    tuned.step(batches(workload, 0))
    path = ssd_tensors.current().path
    path.write_bytes(bytes(each ^ 1 for each in path.read_bytes()[: 1 << 20]))
    with pytest.raises(EnvironmentFault, match="the optimizer state of ") as caught:
        tuned.step(batches(workload, 1))
    assert caught.value.code in ("MT363", "MT364")
