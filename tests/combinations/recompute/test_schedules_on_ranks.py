"""Schedules of the whole model with techniques that average gradients or shard states: bits, link bytes and
peaks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gloo import run_ranks
from support.ranks.gloo_memory import freed_to
from support.zoo_paths import ZOO
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from memtune import hardware
from memtune.api import apply
from memtune.autotune.predict.simulation import simulate
from memtune.autotune.record.recorder import Recording, record
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.errors import ApplyError
from memtune.memory import cpu_allocator
from memtune.memory.ledger import Ledger
from memtune.memory.workspace import WorkspaceTable
from memtune.program.step import Program, RankClass
from memtune.runtime.memory_tiers import HOST, local, tier
from memtune.runtime.training_step import upload
from memtune.runtime.transfer import COUNTERS
from memtune.search_spaces.recompute._block_planner.fits import is_attention
from memtune.search_spaces.recompute._schedule_planner.region_placement import placement_of
from memtune.search_spaces.recompute.attention_boundary import AttentionBoundary
from memtune.search_spaces.recompute.checkmate import Checkmate
from memtune.search_spaces.recompute.coop import Coop
from memtune.search_spaces.recompute.dtr import Dtr
from memtune.search_spaces.recompute.full import Full
from memtune.search_spaces.recompute.megtaichi import Megtaichi
from memtune.search_spaces.recompute.planned import Planned
from memtune.search_spaces.sharding.communication.hierarchical import Hierarchical
from memtune.search_spaces.sharding.communication.zeropp import ZeroPp
from memtune.search_spaces.sharding.states.amsp import Amsp
from memtune.search_spaces.sharding.states.ddp import Ddp
from memtune.search_spaces.sharding.states.fsdp import Fsdp
from memtune.search_spaces.sharding.states.mics import Mics
from memtune.search_spaces.sharding.states.zero1 import Zero1
from memtune.search_spaces.sharding.states.zero2 import Zero2
from memtune.search_spaces.sharding.states.zero3 import Zero3
from memtune.search_spaces.split.tiled import Tiled
from memtune.technique import Reason, Target, Technique
from memtune.testing.drift_check import recording_of
from memtune.testing.training import build, settings_of
from memtune.workload.workload import Workload

SAMPLES, STEPS = 4, 3
"""Per micro-batch; optimizer steps."""
HIDDEN, LOG_SUM_EXP = SAMPLES * 32 * 64 * 4, SAMPLES * 4 * 32 * 4
"""Bytes of gpt: (micro-batch, sequence, width) and (micro-batch, heads, sequence), float32."""


@dataclass(frozen=True)
class Case:
    """A way to train, passed to the ranks as plain data."""

    states: dict[str, Any]
    config: dict[str, Any]
    accumulate: int
    clip: bool
    predicted_bytes: int
    plan: dict[str, Any] = field(default_factory=dict)
    """Of what it is compared with."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.config['settings']} x{self.accumulate}{' clipped' if self.clip else ''}"


@dataclass
class Ran:
    """Results of training under a config on this rank."""

    tensors: list[Tensor]
    link_bytes: int
    peak_bytes: int
    facts: dict[str, Any]


# -- what runs on each rank ----------------------------------------------------------------------------------


def differences(path: str, cases: list[Case]) -> list[tuple[str, int, dict[str, Any]]]:
    """Return, per case, the differences from the same states without a schedule, the peak in bytes, and the
    audit's facts.
    """
    found, plain = [], {}
    ledger = Ledger.open("cpu") if cpu_allocator.available() is None else None
    first_bytes = ledger.live_bytes() if ledger else 0
    for case in cases:
        key = (str(case.states), case.accumulate, case.clip)
        if key not in plain:
            plain[key] = trained(Path(path), {"settings": case.states, "plan": case.plan}, case, None, 0)
        wanted, got = plain[key], trained(Path(path), case.config, case, ledger, first_bytes)
        pairs = zip(got.tensors, wanted.tensors, strict=True)
        odd = [number for number, (one, other) in enumerate(pairs) if not torch.equal(one, other)]
        why = f"{case.name}: tensors {odd[:5]} of {len(wanted.tensors)} differ" if odd else ""
        if got.link_bytes != wanted.link_bytes:
            why += f"{case.name}: {got.link_bytes} bytes on the link against {wanted.link_bytes}"
        found.append((why, got.peak_bytes, got.facts))
    return found


def trained(path: Path, config: dict[str, Any], case: Case, ledger: Ledger | None, first_bytes: int) -> Ran:
    """Return losses, gradients as the optimizer sees them and final weights of a few steps on this rank's
    samples; `first_bytes` were live before the first model.
    """
    empty = freed_to(ledger, first_bytes + 64) if ledger else 0
    COUNTERS.take()
    workload, model, optimizer = build(path)
    tuned = apply(model, optimizer, config, loss=workload.loss, strict=False)
    trainable = [p for group in optimizer.param_groups for p in group["params"]]
    tensors: list[Tensor] = []
    peak = 0
    for step in range(STEPS):
        torch.manual_seed(100 * step + torch.distributed.get_rank())
        with tier(HOST):
            batches = [workload.make_batch(SAMPLES) for _ in range(case.accumulate)]
        if ledger:
            ledger.reset_peak()
        for number, batch in enumerate(batches):
            with tuned.micro_batch(last=number == len(batches) - 1):
                here = upload(batch, torch.device("cpu"))
                loss = workload.loss(tuned.model, here) / len(batches)
                loss.backward()
                with tier(HOST):
                    tensors.append(loss.detach().clone())
                del loss, here
        if case.clip:
            torch.nn.utils.clip_grad_norm_(trainable, 0.1)
        with tier(HOST):
            tensors += [local(p.grad).clone() for p in trainable]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if ledger:
            peak = max(peak, ledger.peak_allocated_bytes() - empty) if step > 1 else 0
    with tier(HOST):
        tensors += [p.detach().clone() for p in model.parameters()]
    return Ran(tensors, COUNTERS.take().get("collective", 0), peak, tuned.audit())


class _Counted(TorchDispatchMode):
    """Number of runs of each op on this rank's tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))


def counted(path: str, configs: list[dict[str, Any]]) -> list[Counter[str]]:
    """Return, per config, the ops of the second step's forward and backward."""
    found = []
    for config in configs:
        workload, model, optimizer = build(Path(path))
        tuned = apply(model, optimizer, config, loss=workload.loss, strict=False)
        for _ in range(2):
            optimizer.zero_grad(set_to_none=True)
            with _Counted() as mode:
                workload.loss(
                    tuned.model, upload(workload.make_batch(SAMPLES), torch.device("cpu"))
                ).backward()
        found.append(mode.ops)
    return found


# -- predictions ---------------------------------------------------------------------------------------------


@cache
def rewriter(path: Path, ranks: int) -> Rewriter:
    return Rewriter(recorded(path), Target(hardware.detect("cpu"), ranks))


def recorded(path: Path) -> Recording:
    """Return a recording with kernels' workspace, as in a search; gpt has almost none, bfloat16 products take
    3 % of a peak.
    """
    if path == ZOO["gpt"] or cpu_allocator.available() is not None:
        return recording_of(path)
    return record(Workload.load(path), sizes={SAMPLES}, workspace=WorkspaceTable.cached(threads=1))


def candidate(path: Path, ranks: int, accumulate: int, *techniques: Technique) -> Candidate | Reason:
    execution = {"micro_batch": SAMPLES, "accumulate": accumulate}
    return rewriter(path, ranks).candidate(
        Choice.from_document({**settings_of(*techniques), "execution": execution})
    )


def case_of(
    path: Path,
    ranks: int,
    states: Technique,
    recompute: Technique,
    accumulate: int,
    *more: Technique,
    clip: bool,
) -> Case:
    found, without = (candidate(path, ranks, accumulate, states, *more, *each) for each in ((recompute,), ()))
    assert isinstance(found, Candidate), f"{states} {recompute} x{accumulate}: {found}"
    assert isinstance(without, Candidate)
    decided = {slot: plan.document() for slot, plan in found.plans.items()}
    config = {"settings": settings_of(states, recompute, *more), "plan": decided}
    predicted = simulate(found.program, rewriter(path, ranks).target.hardware).peak_allocated_bytes
    plan = {slot: plan.document() for slot, plan in without.plans.items()}
    return Case(settings_of(states, *more), config, accumulate, clip, predicted, plan)


def check(path: Path, ranks: int, cases: list[Case]) -> None:
    assert cases
    for rank in run_ranks(differences, ranks, str(path), cases, deadline_s=280):
        for case, (why, peak_bytes, facts) in zip(cases, rank, strict=True):
            assert not why, why
            assert facts["recompute"]["frozen_runs"] >= STEPS - 1, facts
            assert facts["recompute"].get("plain_runs", 0) == 0, facts
            if cpu_allocator.available() is None:
                assert peak_bytes == pytest.approx(case.predicted_bytes, rel=0.02), case.name


def test_gradients_bytes_and_peak_equal_those_of_plain_model() -> None:
    path, ranks = ZOO["gpt"], 2
    cases = [
        case_of(path, ranks, Ddp(), Checkmate(share=0.3), 1, clip=True),
        case_of(path, ranks, Zero1(), Dtr(ratio=0.4), 2, clip=False),
        case_of(path, ranks, Fsdp(), AttentionBoundary(), 2, clip=True),
    ]
    check(path, ranks, cases)
    assert cases[-1].config["plan"]["recompute"]["kept_bytes"] == 4 * (HIDDEN + LOG_SUM_EXP) + 3 * HIDDEN


RECOMPUTE = (
    Checkmate(share=0.3),
    Planned(share=0.2, by_schedule=True),
    Dtr(ratio=0.4),
    Megtaichi(ratio=0.5),
    Coop(ratio=0.5),
    AttentionBoundary(),
)
WHOLE = (
    Ddp(),
    Zero1(),
    Zero2(),
    Ddp(bucket_cap_mb=1),
    Amsp(parameters=1, gradients=1, optimizer=2),
    Amsp(parameters=1, gradients=2, optimizer=4),
)


def those_that_fit(
    techniques: tuple[Technique, ...], ranks: int, accumulate: int, states: Technique
) -> list[Technique]:
    """Return those of `techniques` that fit `gpt` with `states`; skip the test if `states` does not."""
    if isinstance(why := candidate(ZOO["gpt"], ranks, accumulate, states), Reason):
        pytest.skip(str(why))
    return [
        each
        for each in techniques
        if isinstance(candidate(ZOO["gpt"], ranks, accumulate, states, each), Candidate)
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("states", WHOLE, ids=str)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_schedules_with_replicated_parameters(ranks: int, states: Technique, accumulate: int) -> None:
    path, fitting = ZOO["gpt"], those_that_fit(RECOMPUTE, ranks, accumulate, states)
    check(
        path,
        ranks,
        [
            case_of(path, ranks, states, one, accumulate, clip=clip)
            for one, clip in product(fitting, (False, True))
        ],
    )


DIVIDED = (
    Fsdp(),
    Fsdp(reshard_after_forward=False, blocks_per_unit=2),
    Fsdp(prefetch=2, keep_root=False),
    Zero3(),
    Mics(group=2),
    Amsp(parameters=2, gradients=2, optimizer=4),
)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("states", DIVIDED, ids=str)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_schedules_of_blocks_with_sharded_parameters(ranks: int, states: Technique, accumulate: int) -> None:
    """Link bytes are those without a schedule: recomputed ops use the parameters of the block's own
    backward.
    """
    path, fitting = ZOO["gpt"], those_that_fit((AttentionBoundary(),), ranks, accumulate, states)
    check(path, ranks, [case_of(path, ranks, states, one, accumulate, clip=True) for one in fitting])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_schedules_of_blocks_with_parameters_outside_blocks() -> None:
    path, ranks = ZOO["gpt"], 4
    settings = (
        (Fsdp(), AttentionBoundary(), Hierarchical(ranks_per_node=2)),
        (Zero3(), AttentionBoundary(), ZeroPp(ranks_per_node=2)),
        (Fsdp(), AttentionBoundary(), Tiled()),
    )
    check(
        path,
        ranks,
        [case_of(path, ranks, states, one, 2, other, clip=True) for states, one, other in settings],
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("states", [Fsdp(), Zero3()], ids=lambda each: each.kind)
def test_attention_runs_once_with_parameters_unsharded_per_block(states: Technique) -> None:
    path, ranks = ZOO["gpt"], 2
    configs = [
        case_of(path, ranks, states, one, 1, clip=False).config for one in (AttentionBoundary(), Full())
    ]
    for mine, full in run_ranks(counted, ranks, str(path), configs, deadline_s=200):
        runs = [sum(times for name, times in ops.items() if is_attention(name)) for ops in (mine, full)]
        assert runs == [4, 8]  # of four blocks
        assert mine["memtune.all_gather_into_.default"] == full["memtune.all_gather_into_.default"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", ["hf_llama", "autocast", "tied", "lora"])
def test_schedules_of_blocks_of_other_models(model: str) -> None:
    path = ZOO[model]
    check(path, 2, [case_of(path, 2, Fsdp(), AttentionBoundary(), 2, clip=False)])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_online_each_rank_decides_and_stays_within_its_budget() -> None:
    path, ranks = ZOO["gpt"], 2
    cases = [
        case_of(path, ranks, states, Dtr(ratio=0.8, online=True, freeze_after=after), 2, clip=clip)
        for states, after, clip in ((Ddp(), 0, True), (Zero1(), 0, False), (Ddp(), 1, False))
    ]
    for rank in run_ranks(differences, ranks, str(path), cases, deadline_s=280):
        for case, (why, peak_bytes, facts) in zip(cases, rank, strict=True):
            assert not why, why
            ran, budget_bytes = facts["recompute"], case.config["plan"]["recompute"]["online"]["budget_bytes"]
            assert ran["online_replays"] > 0
            assert ran["online_peak_bytes"] <= budget_bytes
            assert peak_bytes <= budget_bytes + 24
        assert facts["recompute"]["frozen_runs"] > 0


# -- what does not go ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recompute",
    [Dtr(ratio=0.8, online=True), Dtr(ratio=0.4), Checkmate(share=0.3), Planned(share=0.2, by_schedule=True)],
    ids=str,
)
@pytest.mark.parametrize("states", [Fsdp(), Zero3(), Mics(group=2), Amsp()], ids=lambda each: each.kind)
def test_schedule_of_all_blocks_is_refused_by_name(states: Technique, recompute: Technique) -> None:
    found = candidate(ZOO["gpt"], 4, 2, states, recompute)
    assert f"{states.kind} unshards a block's parameters for its own calls only" in str(found)


def test_residual_stream_that_another_block_makes_is_not_rebuilt() -> None:
    found = candidate(ZOO["gpt"], 2, 1, Fsdp(), AttentionBoundary(residual_every=2))
    assert "another block makes a block's input" in str(found)
    assert "residual_every: 1, or omit it" in str(found)
    assert isinstance(candidate(ZOO["gpt"], 2, 1, Ddp(), AttentionBoundary(residual_every=2)), Candidate)


@pytest.mark.slow
def test_blocks_with_parts_of_their_own_are_refused_by_name() -> None:
    found = candidate(ZOO["hf_llama"], 2, 1, Fsdp(), Tiled(mlp=2), AttentionBoundary())
    assert "MLPs in parts have graphs of their own" in str(found)
    assert isinstance(candidate(ZOO["hf_llama"], 2, 1, Fsdp(), Tiled(), AttentionBoundary()), Candidate)


def refused_when_applied(path: str, asked: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    """Return the message for each of these settings and plans, and whether the model's forward is
    restored.
    """
    message = []
    for settings, plan in asked:
        workload, model, optimizer = build(Path(path))
        with pytest.raises(ApplyError) as caught:
            apply(model, optimizer, {"settings": settings, "plan": plan}, loss=workload.loss, strict=False)
        assert "forward" not in vars(model)
        message.append(str(caught.value))
    return message


def test_apply_refuses_what_fits_refuses() -> None:
    path, online = ZOO["gpt"], Dtr(ratio=0.8, online=True)
    looking = Ddp(find_unused_parameters=True)
    target = Target(hardware.detect("cpu"), 2, chosen={looking.slot: looking})
    assert "DDP cannot search for unused parameters" in str(online.fits(program_of(path, 2), target))
    asked = []
    for states, recompute in ((Fsdp(), Checkmate(share=0.3)), (Fsdp(), online), (looking, online)):
        found = candidate(path, 2, 1, Ddp(), recompute)
        assert isinstance(found, Candidate)
        asked.append((settings_of(states, recompute), {"recompute": found.plans["recompute"].document()}))
    boundary = AttentionBoundary()
    blocks = candidate(path, 2, 1, Fsdp(), boundary)
    assert isinstance(blocks, Candidate)
    decided = blocks.plans["recompute"].document()
    asked.append((settings_of(Fsdp(), boundary), {"recompute": {**decided, "blocks": decided["blocks"][1:]}}))
    for message in run_ranks(refused_when_applied, 2, str(path), asked):
        assert ["unshards a block's parameters" in each for each in message] == [True, True, False, False]
        assert "It is for 3 blocks, the model has 4" in message[3]
        assert "dtr} does not work with find_unused_parameters: true" in message[2]


def program_of(path: Path, ranks: int) -> Program:
    return Program((RankClass(ranks, recording_of(path).at(SAMPLES)),), SAMPLES)


def test_budget_counts_memory_of_later_passes() -> None:
    """Gradient buckets are live as well; the lower bound on schedules counts them, and sharded optimizer
    state as sharded.
    """
    path, target = ZOO["gpt"], Target(hardware.detect("cpu"), 2)
    program = program_of(path, 2)
    alone, ddp, zero = (
        placement_of(program, replace(target, chosen={each.slot: each for each in chosen}))
        for chosen in ((), (Ddp(),), (Zero1(),))
    )
    gradients = sum(p.numel() * 4 for p in build(path)[1].parameters())
    assert ddp.plain_bytes == alone.plain_bytes + gradients
    assert ddp.buffer_bytes == gradients
    assert zero.plain_bytes < alone.plain_bytes
    for place, states in ((ddp, Ddp()), (zero, Zero1())):
        assert place.least_bytes <= place.plain_bytes
        for ratio in (0.1, 0.5):
            found = candidate(path, 2, 1, states, Dtr(ratio=ratio))
            if isinstance(found, Candidate):
                assert (
                    place.least_bytes
                    <= found.program.step.peak_bytes()
                    == found.plans["recompute"].peak_bytes
                )
    low = Checkmate(budget_bytes=ddp.least_bytes - 1)
    assert "no recompute gets below" in str(candidate(path, 2, 1, Ddp(), low))
