"""DDP: conditions, and its pass's buckets, sums and link traffic. On real ranks: tests/parallel/replicas.

Distinguishing test: every rank holds all bytes of the model and the gradients cross the link once, 2·(N-1)/N
of them.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from support.gloo import run_ranks
from support.sharding_programs import program, step, target, with_parameter
from support.suites.sharded_suite import NOT_AT_THE_PEAK, ShardedSuite
from torch import Tensor, nn

from memtune.api import apply
from memtune.errors import ApplyError
from memtune.parallel.replicas.ddp_pass import Replication, replicate
from memtune.program.step import FOREVER, Kind, Phase, Step
from memtune.search_spaces.sharding.states.ddp import Ddp
from memtune.technique import NO_PLAN


def gradient_bytes() -> int:
    return sum(int(step().storages.bytes[p.gradient]) for p in step().parameters)


def rewritten(cap: int = 25, *, ranks: int = 2, accumulate: int = 1, model: str = "gpt") -> Step:
    after = (
        Ddp(bucket_cap_mb=cap)
        .rewrite(program(model, ranks=ranks, accumulate=accumulate), NO_PLAN, target(ranks))
        .step
    )
    after.validate()
    return after


def ops(step: Step, name: str) -> list[int]:
    return [op for op in range(step.ops.n) if step.names[step.ops.name[op]] == name]


def buckets(step: Step) -> list[int]:
    rows = (
        (step.storages.kind == Kind.GRADIENT)
        & (step.storages.producer < 0)
        & (step.storages.held_until == FOREVER)
    )
    return [int(n_bytes) for n_bytes in step.storages.bytes[rows]]


def test_fits_two_ranks_and_more() -> None:
    assert "only one rank" in str(Ddp().fits(program(), target(1)))
    assert Ddp().fits(program(), target(2)) is None
    assert Ddp().fits(program("lora"), target(2)) is None  # frozen parameters are fine


def test_fits_requires_find_unused_parameters() -> None:
    unused = with_parameter(4, gradient=-1)
    assert "1 trainable parameters get no gradient" in str(Ddp().fits(unused, target(2)))
    assert Ddp(find_unused_parameters=True).fits(unused, target(2)) is None
    assert "every trainable parameter" in str(Ddp(find_unused_parameters=True).fits(program(), target(2)))
    assert (
        Ddp(find_unused_parameters=True).fits(program("moe"), target(2)) is None
    )  # a batch may leave experts out


def test_buckets_are_never_freed() -> None:
    assert buckets(rewritten()) == [gradient_bytes()]
    # DDP's buckets are allocated in addition to incoming gradients: at least one copy more than the plain
    # step holds at its end.
    assert rewritten().live_bytes()[0] == step().live_bytes()[0] + gradient_bytes()


def test_buckets_close_when_they_reach_their_size() -> None:
    after = replicate(step(), Replication(2, 100_000))
    found = buckets(after)
    assert sum(found) == gradient_bytes()
    largest = max(int(step().storages.bytes[p.gradient]) for p in step().parameters)
    assert all(100_000 <= each < 100_000 + largest for each in found[:-1])
    assert len(found) > 3
    assert [int(after.ops.traffic_bytes[op]) for op in ops(after, "c10d.allreduce_.default")] == found


def test_all_reduces_overlap_with_backward() -> None:
    after = replicate(step(), Replication(4, 100_000))
    reduced = ops(after, "c10d.allreduce_.default")
    last = int((after.ops.phase == Phase.BACKWARD).nonzero()[0][-1])
    assert reduced[0] < last - 20
    assert {int(after.ops.group[op]) for op in reduced} == {4}
    assert {int(after.ops.phase[op]) for op in reduced} == {Phase.BACKWARD}


def test_middle_micro_batches_hold_all_sums() -> None:
    """A peak at the end of backward, when the last micro-batch has freed sums; seen from three micro-batches
    on.
    """
    plain = program("gpt", accumulate=3).step
    late = plain.with_storages(bytes=plain.storages.bytes.copy())
    last = int(np.flatnonzero(plain.ops.phase == Phase.BACKWARD)[-1])
    made = np.flatnonzero(
        (plain.storages.producer > last - 40)
        & (plain.storages.producer < last)
        & (plain.storages.kind == Kind.TEMPORARY)
    )
    late.storages.bytes[made[:1]] += 20_000_000
    two, three = (replicate(late, Replication(2, 25 << 20, accumulate)).peak_bytes() for accumulate in (2, 3))
    assert two < three == late.peak_bytes() + gradient_bytes()


def test_accumulation_holds_sums_and_buckets_and_averages_once() -> None:
    once, twice = rewritten(), rewritten(accumulate=2)
    assert twice.live_bytes()[0] == once.live_bytes()[0] + gradient_bytes()
    assert {int(twice.ops.phase[op]) for op in ops(twice, "c10d.allreduce_.default")} == {
        Phase.BOUNDARY
    }  # once per step


def test_optimizer_reads_the_buckets() -> None:
    after = rewritten()
    first = int((after.ops.phase == Phase.OPTIMIZER).nonzero()[0][0])
    assert not ((after.storages.kind == Kind.GRADIENT) & (after.storages.producer >= 0)).any()
    assert {p.gradient for p in after.parameters} == set(after.grad_order.tolist())
    assert (after.uses.op[after.uses.storage == after.grad_order[0]] >= first).any()


def test_buffers_are_broadcast_from_the_first_rank() -> None:
    sent = ops(rewritten(model="cnn_bn"), "c10d.broadcast_.default")
    assert len(sent) == 1
    assert not ops(rewritten(), "c10d.broadcast_.default")


def test_record_differs_from_sharding() -> None:
    assert Ddp().record(target(2))["states.shard"] == {"parameters": 1, "gradients": 1, "optimizer": 1}
    assert Ddp().record(target(2)) != Ddp(bucket_cap_mb=100).record(target(2))


class TestDdp(ShardedSuite):
    technique = Ddp
    not_shown = (
        *NOT_AT_THE_PEAK,
        "a failed apply is not undone",
    )  # it wraps the model and changes nothing in it


# -- a parameter that some ranks do not use ------------------------------------------------------------------


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.always(x)
        out: Tensor = self.sometimes(y) if x[0, 0] > 0 else y
        return out


def without_search() -> list[str]:
    model = Gated()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = {"sharding": {"states": {"kind": "ddp"}}}
    tuned = apply(
        model, optimizer, {"settings": settings}, loss=lambda model, x: model(x).square().mean(), strict=False
    )
    before = [p.detach().clone() for p in model.parameters()]
    said = []
    try:
        tuned.step([torch.ones(2, 4), -torch.ones(2, 4)])  # the last one leaves `sometimes` out
    except ApplyError as error:
        said += [error.code, error.fix]
    return (
        said
        if all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        else ["updated"]
    )


def gated() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Gated()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = {"sharding": {"states": {"kind": "ddp", "find_unused_parameters": True}}}
    tuned = apply(
        model, optimizer, {"settings": settings}, loss=lambda model, x: model(x).square().mean(), strict=False
    )
    sign = 1.0 if torch.distributed.get_rank() == 0 else -1.0
    for _ in range(2):
        tuned.step([sign * torch.ones(2, 4)])
    return {
        "moved": {name: p.detach() - before[name] for name, p in model.named_parameters()},
        "names": list(tuned.state_dict()["model"]),
        "not looked for": without_search(),
    }


def test_unused_parameters_are_found() -> None:
    """Without the search a bucket that is not full is an error, in the step itself."""
    first, second = run_ranks(gated, 2)
    assert first["not looked for"] == second["not looked for"] == ["MT346", "find_unused_parameters: true"]
    assert all(torch.equal(first["moved"][name], second["moved"][name]) for name in first["moved"])
    assert first["moved"]["sometimes.weight"].abs().max() > 0
    assert first["names"] == ["always.weight", "always.bias", "sometimes.weight", "sometimes.bias"]


# -- a loss that does not call the model itself --------------------------------------------------------------


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoded(self.encoder(x))

    def decoded(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x)
        return out


def by_parts(model: Any, x: Tensor) -> Tensor:
    out: Tensor = model.decoded(model.encoder(x)).square().mean()
    return out


def by_functional_call(model: Any, x: Tensor) -> Tensor:
    def of_sample(weights: dict[str, Tensor], sample: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (sample,)).square().mean()

    weights = dict(model.named_parameters())
    return torch.func.vmap(of_sample, in_dims=(None, 0))(weights, x).mean()


def trained_in(*losses: Any) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    found: dict[str, Any] = {}
    for loss in losses:
        torch.manual_seed(0)
        model = Parts()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tuned = apply(
            model, optimizer, {"settings": {"sharding": {"states": {"kind": "ddp"}}}}, loss=loss, strict=False
        )
        for number in range(2):
            torch.manual_seed(10 * number + rank)
            tuned.step([torch.randn(2, 4), torch.randn(2, 4)])
            loss(tuned.model, torch.randn(2, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found[loss.__name__] = [p.detach().clone() for p in model.parameters()]
    saved = io.BytesIO()
    torch.save(tuned.model, saved)
    saved.seek(0)
    found["saved"] = type(torch.load(saved, weights_only=False)).__name__
    return found


def whole(model: Any, x: Tensor) -> Tensor:
    out: Tensor = model(x).square().mean()
    return out


def test_loss_of_submodules_and_functional_calls_trains_as_that_of_the_model() -> None:
    first, second = run_ranks(trained_in, 2, whole, by_parts, by_functional_call)
    assert first["saved"] == "Parts"
    for name in ("by_parts", "by_functional_call"):
        for each in (first[name], second[name]):
            torch.testing.assert_close(each, first["whole"])
