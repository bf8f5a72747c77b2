"""A gradient scaler with an offloaded optimizer: all gradients are unscaled and checked, or it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.gloo import run_ranks
from support.ranks.block_offload_on_ranks import share_of, started
from support.zoo_paths import ZOO
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from memtune.api import apply
from memtune.errors import ApplyError
from memtune.runtime.memory_tiers import local
from memtune.search_spaces.execution.order.roam import Roam
from memtune.search_spaces.offload.states.angel_ptm import AngelPtm
from memtune.search_spaces.offload.states.l2l import L2L
from memtune.search_spaces.offload.states.optimizer_cpu import OptimizerCpu
from memtune.search_spaces.offload.states.patrickstar import PatrickStar
from memtune.search_spaces.offload.states.smart_infinity import SmartInfinity
from memtune.search_spaces.offload.states.stronghold import Stronghold
from memtune.search_spaces.offload.states.zero_infinity import ZeroInfinity
from memtune.search_spaces.offload.states.zero_offload import ZeroOffload
from memtune.technique import Technique
from memtune.testing.training import SEED, build, config_of
from memtune.workload.repeated_blocks import find_blocks

RANKS = 2
SCALE = 2.0**10  # a power of two: scaling and unscaling give the same bits
STATES: dict[str, Technique] = {
    "l2l": L2L(kind="l2l"),
    "stronghold": Stronghold(kind="stronghold", window=2),
    "zero_offload": ZeroOffload(kind="zero_offload"),
    "a part of it": ZeroOffload(kind="zero_offload", ratio=0.5),
    "own": OptimizerCpu(kind="optimizer_cpu"),
    "native": OptimizerCpu(kind="optimizer_cpu", update="native"),
    "chunks": PatrickStar(kind="patrickstar", chunk_bytes=70_000),
    "pages": AngelPtm(kind="angel_ptm", page_mib=0.02),
    "ssd": ZeroInfinity(kind="zero_infinity"),
    "updaters": SmartInfinity(kind="smart_infinity", domains=1),
}
pytestmark = pytest.mark.usefixtures("one_thread", "ssd")


def trained(
    technique: Technique, scaler: GradScaler | None, spoil: Callable[[nn.Module], Any] | None = None
) -> list[Tensor]:
    """Weights after each of three steps of a user's own loop, of two micro-batches each; `spoil` changes the
    second one.
    """
    workload, model, optimizer = build(ZOO["gpt"])
    tuned = apply(model, optimizer, config_of(ZOO["gpt"], technique), strict=False)
    weights = []
    for step in range(3):
        torch.manual_seed(SEED + step)
        handle = spoil(model) if spoil is not None and step == 1 else None
        for _ in range(2):
            loss = workload.loss(model, workload.make_batch(2))
            (loss if scaler is None else scaler.scale(loss)).backward()
        if handle is not None:
            handle.remove()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        weights.append(
            torch.cat([each.detach().flatten().clone() for each in tuned.state_dict()["model"].values()])
        )
    return weights


def scaled() -> GradScaler:
    return GradScaler("cpu", init_scale=SCALE)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("kind", STATES)
def test_training_with_a_scaler_has_the_bits_of_training_without(kind: str) -> None:
    with_one, without = trained(STATES[kind], scaled()), trained(STATES[kind], None)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(with_one, without, strict=True))
    assert not torch.equal(without[0], without[2])


def _infinite(which: int) -> Callable[[nn.Module], Any]:
    """One trained parameter's gradient is infinite, that of the first (outside of the blocks) or one within
    them.
    """

    def spoil(model: nn.Module) -> Any:
        inside = {
            parameter for name in find_blocks(model) for parameter in model.get_submodule(name).parameters()
        }
        parameter = next(each for each in model.parameters() if (each in inside) == bool(which))
        return parameter.register_hook(lambda gradient: gradient * float("inf"))

    return spoil


@pytest.mark.drawn(3)
@pytest.mark.parametrize("which", [0, 1], ids=["on the device", "on the host"])
@pytest.mark.parametrize("kind", ["l2l", "zero_offload", "own", "ssd"])
def test_nonfinite_gradient_on_any_tier_skips_the_step(kind: str, which: int) -> None:
    scaler = scaled()
    first, second, third = trained(STATES[kind], scaler, _infinite(which))
    assert torch.equal(first, second)
    assert scaler.get_scale() == SCALE / 2
    assert torch.isfinite(third).all()
    assert not torch.equal(second, third)  # nothing infinite was left behind


@pytest.mark.parametrize(
    "technique",
    [
        L2L(kind="l2l"),
        OptimizerCpu(kind="optimizer_cpu", update="native", trigger="per_gradient"),
        Roam(kind="roam"),
    ],
    ids=["l2l", "optimizer_cpu", "roam"],
)
def test_scaler_raises_after_updates_inside_backward(technique: Technique) -> None:
    workload, model, optimizer = build(ZOO["gpt"])
    tuned = apply(model, optimizer, config_of(ZOO["gpt"], technique), strict=False)
    scaler = scaled()
    with tuned.micro_batch(last=True):
        scaler.scale(workload.loss(model, workload.make_batch(2))).backward()
    with pytest.raises(ApplyError, match="updated inside backward"):
        scaler.unscale_(optimizer)


def test_scaler_handles_other_optimizers_as_without_memtune() -> None:
    """An optimizer that was never tuned, after one that was."""
    _, model, tuned = build(ZOO["gpt"])
    apply(model, tuned, config_of(ZOO["gpt"], STATES["own"]), strict=False)
    weight = nn.Parameter(torch.ones(3))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), scaled()
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(weight.detach(), torch.zeros(3))


# -- on gloo ranks -------------------------------------------------------------------------------------------


def skipped(sharded: bool) -> tuple[bool, float]:
    """Return whether weights are unchanged when one rank alone has an infinite gradient, and the scale
    afterwards.
    """
    settings = {"sharding": {"states": {"kind": "fsdp"}}, "offload": {"states": {"kind": "l2l"}}}
    workload, tuned = started({"settings": settings})
    scaler: Any = ShardedGradScaler(device="cpu", init_scale=SCALE) if sharded else scaled()
    before = {name: each.clone() for name, each in tuned.state_dict()["model"].items()}
    with tuned.micro_batch(last=False):  # nothing is updated in backward
        scaler.scale(workload.loss(tuned.model, share_of(workload, 0, 1, RANKS)[0])).backward()
    optimizer = tuned.optimizer
    if dist.get_rank() == 1:
        held = next(
            each for group in optimizer.param_groups for each in group["params"] if each.grad is not None
        )
        local(held.grad).fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    after = tuned.state_dict()["model"]
    return all(torch.equal(after[name], each) for name, each in before.items()), scaler.get_scale()


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_nonfinite_gradient_on_one_rank_skips_the_step_on_all(sharded: bool) -> None:
    assert run_ranks(skipped, RANKS, sharded) == [(True, SCALE / 2)] * RANKS
