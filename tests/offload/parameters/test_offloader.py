"""Offloaded blocks: bytes by the ledger, user's own loops, checkpoints, and refusals."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from support.suites.block_offload_suite import NATIVE, without_gradients
from support.zoo_paths import ZOO
from torch import nn

from memtune import hardware
from memtune.api import apply
from memtune.autotune.predict.simulation import simulate
from memtune.autotune.record.recorder import record
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.config.tuned_config import TunedConfig
from memtune.errors import ApplyError
from memtune.memory.ledger import Ledger
from memtune.offload.optimizer.native_update import wait_for_updates
from memtune.runtime.memory_tiers import HOST, tier
from memtune.search_spaces.offload.states.angel_ptm import AngelPtm
from memtune.search_spaces.offload.states.elixir import Elixir
from memtune.search_spaces.offload.states.l2l import L2L
from memtune.search_spaces.offload.states.patrickstar import PatrickStar
from memtune.search_spaces.offload.states.stronghold import Stronghold
from memtune.search_spaces.offload.states.zero_infinity import ZeroInfinity
from memtune.technique import Target, Technique
from memtune.testing import differences, drift, train
from memtune.testing.drift_check import plain_program, target_of
from memtune.testing.training import SEED, build, config_of, one_step, settings_of
from memtune.workload.repeated_blocks import find_blocks
from memtune.workload.workload import Workload

ONE, TWO = L2L(kind="l2l"), Stronghold(kind="stronghold", window=2)
DEFERRED = Stronghold(kind="stronghold", window=2, deferred=(1, 3))
CHUNKS = PatrickStar(kind="patrickstar", chunk_bytes=70_000)
PAGES = AngelPtm(kind="angel_ptm", page_mib=0.02)
ON_HOST = ZeroInfinity(kind="zero_infinity", parameters="host", optimizer="host")
pytestmark = pytest.mark.usefixtures("one_thread")


def steps(
    workload: Workload, tuned: Any, ledger: Ledger, micro_batches: int, count: int = 5
) -> list[tuple[int, int, int, int]]:
    """Peaks of device and host, and bytes live there after it, of every step."""
    found = []
    for step in range(count):
        torch.manual_seed(SEED + step)
        with tier(HOST):
            batches = [workload.make_batch(2) for _ in range(micro_batches)]
        ledger.reset_peak()
        tuned.step(batches)
        batch = sum(each.nbytes for pair in batches for each in pair)
        del batches
        peaks = ledger.peak_allocated_bytes(), ledger.peak_allocated_bytes(HOST) - batch
        wait_for_updates()  # of deferred blocks, whose thread makes scalars
        found.append((*peaks, ledger.live_bytes(), ledger.live_bytes(HOST)))
    return found


@pytest.mark.drawn(1)
@pytest.mark.native_ledger
@pytest.mark.parametrize(
    ("technique", "micro_batches", "budget_bytes"),
    [
        pytest.param(ONE, 1, None, marks=pytest.mark.slow),
        pytest.param(TWO, 2, None, marks=pytest.mark.slow),
        pytest.param(DEFERRED, 1, None, marks=pytest.mark.slow, id="late"),
        pytest.param(DEFERRED, 2, None, id="late, accumulated"),
        (CHUNKS, 2, 2_050_000),
        (PAGES, 2, 2_050_000),
        pytest.param(PAGES, 2, 3_000_000, marks=pytest.mark.slow, id="some stay on the device"),
    ],
)
def test_peaks_equal_the_prediction_and_nothing_stays_allocated(
    technique: Technique, micro_batches: int, budget_bytes: int | None
) -> None:
    """Under a budget that the plain model exceeds; after the third step nothing more is held on any tier."""
    path = ZOO["gpt"]
    target = Target(hardware.detect("cpu"), budget_bytes=budget_bytes)
    rewriter = Rewriter(record(Workload.load(path)), target)
    execution = {"micro_batch": 2, "accumulate": micro_batches}
    document = {"execution": execution, **settings_of(technique)}
    candidate = rewriter.candidate(Choice.from_document({**document, "execution": execution}))
    assert isinstance(candidate, Candidate), candidate
    plain = rewriter.candidate(Choice.from_document({"execution": execution}))
    assert isinstance(plain, Candidate)
    predicted, whole = (
        simulate(each.program, target.hardware).peak_allocated_bytes for each in (candidate, plain)
    )
    gc.collect()
    ledger = Ledger.open("cpu")
    empty, empty_host = ledger.live_bytes(), ledger.live_bytes(HOST)
    workload, model, optimizer = build(path)
    config = TunedConfig(settings=candidate.choice, plan=dict(candidate.plans))
    tuned = apply(model, optimizer, config, loss=workload.loss, strict=False)
    gc.collect()
    budget = empty + (budget_bytes or (predicted + whole) // 2)
    assert predicted <= budget - empty < whole
    with Ledger.open("cpu", budget_bytes=budget) as ledger:
        seen = steps(workload, tuned, ledger, micro_batches)
    assert max(peak for peak, *_ in seen[2:]) - empty == pytest.approx(predicted, rel=0.02)
    host = candidate.program.step.peak_bytes(2 - 1) - 2 * 2 * 32 * 8
    assert max(peak for _, peak, *_ in seen[2:]) - empty_host == pytest.approx(host, rel=0.02)
    assert seen[2][2:] == seen[3][2:] == seen[4][2:]
    del tuned, model, optimizer
    workload, model, optimizer = build(path)
    plainly = apply(model, optimizer, {"settings": {}}, loss=workload.loss, strict=False)
    with Ledger.open("cpu", budget_bytes=budget) as ledger, pytest.raises(torch.OutOfMemoryError):
        steps(workload, plainly, ledger, micro_batches)


def test_custom_loop_updates_in_the_optimizers_step() -> None:
    """The last micro-batch is not announced: gradients wait on the host."""
    runs = []
    for technique in (ONE, NATIVE):
        workload, model, optimizer = build(ZOO["tied"])
        apply(model, optimizer, config_of(ZOO["tied"], technique), strict=False)
        for step in range(3):
            torch.manual_seed(SEED + step)
            for _ in range(2):
                workload.loss(model, workload.make_batch(2)).backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append({name: value.clone() for name, value in model.state_dict().items()})
    assert all(torch.equal(runs[0][name], value) for name, value in runs[1].items())


def test_backward_through_no_block_counts_as_no_change_of_gradients() -> None:
    """A penalty on parameters outside of the blocks, in a backward of its own."""
    ended = []
    for technique in (ONE, NATIVE):
        workload, model, optimizer = build(ZOO["tied"])
        apply(model, optimizer, config_of(ZOO["tied"], technique), strict=False)
        own = next(
            p
            for name, p in model.named_parameters()
            if not any(name.startswith(each) for each in find_blocks(model))
        )
        torch.manual_seed(SEED)
        workload.loss(model, workload.make_batch(2)).backward()
        own.square().mean().backward()
        optimizer.step()
        ended.append({name: value.clone() for name, value in model.state_dict().items()})
    assert all(torch.equal(ended[0][name], value) for name, value in ended[1].items())


def test_clipping_after_some_gradients_are_used_raises() -> None:
    workload, model, optimizer = build(ZOO["tied"])
    tuned = apply(model, optimizer, config_of(ZOO["tied"], ONE), strict=False)
    with tuned.micro_batch(last=True):
        workload.loss(model, workload.make_batch(2)).backward()
    with pytest.raises(ApplyError, match="used and freed by an update inside backward") as caught:
        nn.utils.clip_grad_norm_([each for each in model.parameters() if each.grad is not None], 1e-3)
    assert caught.value.code == "MT364"


def test_checkpoint_has_all_weights_and_evaluation_leaves_none_resident() -> None:
    path = ZOO["tied"]
    workload, model, optimizer = build(path)
    late = Stronghold(kind="stronghold", window=2, deferred=(0, 2))
    tuned = apply(model, optimizer, config_of(path, late), strict=False)
    one_step(workload, model, optimizer, tuned, seed=SEED)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        loss = workload.loss(model, batch := workload.make_batch(2))
    assert tuned.audit()
    _, other, _ = build(path)
    other.load_state_dict(saved)
    assert torch.equal(workload.loss(other, batch), loss)
    with torch.no_grad():
        for value in other.state_dict().values():
            value.mul_(2)
    model.load_state_dict(other.state_dict())
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(workload.loss(model, batch), workload.loss(other, batch))
    assert tuned.audit()


@pytest.mark.parametrize("technique", [ONE, CHUNKS, PAGES], ids=lambda each: each.kind)
def test_full_checkpoint_can_be_loaded(technique: Technique) -> None:
    """Weights that are not on the device go to host memory, and no later copy from the device overwrites
    them.
    """
    workload, model, optimizer = build(ZOO["tied"])
    tuned = apply(model, optimizer, config_of(ZOO["tied"], technique), strict=False)
    one_step(workload, model, optimizer, tuned, seed=SEED)
    saved = copy.deepcopy(tuned.state_dict())
    one_step(workload, model, optimizer, tuned, seed=SEED + 1)
    wanted = copy.deepcopy(tuned.state_dict()["model"])
    tuned.load_state_dict(saved)
    assert all(
        torch.equal(value, saved["model"][name]) for name, value in tuned.state_dict()["model"].items()
    )
    one_step(workload, model, optimizer, tuned, seed=SEED + 1)
    assert all(torch.equal(value, wanted[name]) for name, value in tuned.state_dict()["model"].items())


def test_offloader_works_with_recompute_and_offloaded_activations() -> None:
    from memtune.search_spaces.offload.activations.copy_out import CopyOut
    from memtune.search_spaces.recompute.full import Full

    others = [Full(kind="full"), CopyOut(kind="copy_out", min_bytes=0)]
    found, wanted = (without_gradients(train(ZOO["tied"], each, *others)) for each in (TWO, NATIVE))
    assert not differences(found, wanted)


def test_blocks_that_share_a_weight_are_refused_before_any_change() -> None:
    _, model, optimizer = build(ZOO["tied"])
    model.layers[1].up.weight = model.layers[0].up.weight
    optimizer = type(optimizer)(model.parameters())
    with pytest.raises(ApplyError, match="shared with another module"):
        apply(model, optimizer, config_of(ZOO["tied"], ONE), strict=False)
    assert all(parameter.untyped_storage().nbytes() for parameter in model.parameters())


def test_block_that_returns_its_input_is_skipped() -> None:
    """A layer that stochastic depth skips: its moment is passed over."""
    runs = []
    for technique in (ONE, NATIVE):
        workload, model, optimizer = build(ZOO["gpt"])
        apply(model, optimizer, config_of(ZOO["gpt"], technique), strict=False)
        skipped = model.get_submodule(find_blocks(model)[1])
        skipped.register_forward_hook(lambda module, args, output: args[0], prepend=True)
        for step in range(2):
            torch.manual_seed(SEED + step)
            workload.loss(model, workload.make_batch(2)).backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append({name: value.clone() for name, value in model.state_dict().items()})
    assert all(torch.equal(runs[0][name], value) for name, value in runs[1].items())


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "store",
    [
        ONE,
        TWO,
        Elixir(kind="elixir"),
        PatrickStar(kind="patrickstar", chunk_bytes=80_000),
        PAGES,
        ZeroInfinity(kind="zero_infinity", parameters="host", optimizer="host"),
    ],
    ids=lambda each: each.kind,
)
def test_adapters_in_blocks_are_offloaded_as_predicted(store: Technique) -> None:
    """No parameter outside of the blocks is trained."""
    assert store.fits(plain_program(ZOO["lora"]), target_of(store)) is None
    assert drift(ZOO["lora"], store) == ""
