"""FSDP: conditions, record, and its pass by knobs. Numbers: tests/parallel/sharding/test_fsdp_pass.py.

Distinguishing test: a rank holds 1/degree of parameters, gradients and state (rounded up along the first
dim), and per micro-batch every unit crosses the link once per gather and once per reduction.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.gloo import run_ranks
from support.sharding_programs import program, target, with_parameter
from support.suites.sharded_suite import ShardedSuite
from torch import Tensor, nn

from memtune.api import apply
from memtune.program.step import Kind, Program, RankClass, Resource
from memtune.search_spaces.sharding.communication.hierarchical import Hierarchical
from memtune.search_spaces.sharding.states.fsdp import Fsdp
from memtune.technique import NO_PLAN, Exactness


@pytest.mark.parametrize(
    ("knobs", "ranks", "reason"),
    [
        ({}, 1, "only one rank"),
        ({"degree": 3}, 4, "degree=3 must divide the 4 ranks (degree: 2 or 4)"),
        ({"blocks_per_unit": 5}, 2, "there are 4 blocks (at most 4)"),
        ({}, 2, None),
        ({"degree": 2, "reshard_after_forward": False, "blocks_per_unit": 4}, 8, None),
        ({"reshard_after_forward": 2}, 4, None),
        ({"reshard_after_forward": 2}, 2, "no smaller equal groups of the 2 ranks"),
        ({"reshard_after_forward": 3}, 4, "(reshard_after_forward: 2)"),
        ({"reshard_after_forward": 4, "degree": 4}, 8, "no smaller equal groups of the 4 ranks"),
        ({"reshard_after_forward": False, "keep_root": False}, 4, "all units stay unsharded"),
        ({"reduce_dtype": "bfloat16", "prefetch": 0}, 2, None),
        ({"reduce_dtype": "float32"}, 2, "already have elements of 4 bytes"),
    ],
)
def test_fsdp_fits_or_gives_the_reason(knobs: dict[str, Any], ranks: int, reason: str | None) -> None:
    found = Fsdp(**knobs).fits(program(ranks=ranks), target(ranks))
    assert found is None if reason is None else reason in str(found)


def test_fits_refuses_scalar_parameters() -> None:
    found = Fsdp().fits(with_parameter(3, shape=()), target(2))
    assert "has no dimension to divide" in str(found)


def test_fits_refuses_prefetch_of_units_that_run_several_times() -> None:
    plain = program()
    calls = plain.step.calls
    again = replace(
        calls, block=np.append(calls.block, calls.block[:1]), grad_enabled=np.append(calls.grad_enabled, 1)
    )
    twice = plain.with_step(replace(plain.step, calls=again))
    assert "several times in a forward" in str(Fsdp(prefetch=1).fits(twice, target(2)))
    assert Fsdp(prefetch=0).fits(twice, target(2)) is None


def test_fits_refuses_prefetch_of_units_without_a_backward() -> None:
    plain = program()
    frozen = replace(plain.step.calls, grad_enabled=np.zeros_like(plain.step.calls.grad_enabled))
    reference = plain.with_step(replace(plain.step, calls=frozen))
    assert "without gradients" in str(Fsdp(prefetch=1).fits(reference, target(2)))
    assert "without gradients" not in str(Fsdp(prefetch=0).fits(reference, target(2)))


def test_fits_refuses_units_of_blocks_with_and_without_gradients() -> None:
    plain = program()
    enabled = np.ones_like(plain.step.calls.grad_enabled)
    enabled[::2] = 0  # every second block is of a frozen copy under no_grad
    mixed = plain.with_step(replace(plain.step, calls=replace(plain.step.calls, grad_enabled=enabled)))
    assert "alone without gradients" in str(Fsdp(blocks_per_unit=2).fits(mixed, target(2)))
    assert Fsdp().fits(mixed, target(2)) is None


def test_fits_refuses_two_types_in_one_unit() -> None:
    assert "another type" in str(Fsdp().fits(with_parameter(5, itemsize=2), target(2)))
    assert Fsdp().fits(with_parameter(5, itemsize=2, trainable=False), target(2)) is None


def test_fits_refuses_weights_shared_between_units() -> None:
    shared = with_parameter(3, block=1)  # a weight that block 0 uses, but block 1 holds
    assert "is used outside its unit" in str(Fsdp().fits(shared, target(2)))
    assert Fsdp(blocks_per_unit=2).fits(shared, target(2)) is None


def test_model_without_blocks_is_one_unit() -> None:
    plain = program().step
    outside = tuple(p._replace(block=-1) for p in plain.parameters)
    step = (
        replace(plain, blocks=(), parameters=outside)
        .with_calls(block=plain.calls.block[:0])
        .with_ops(call=np.full_like(plain.ops.call, -1))
    )
    without = Program((RankClass(2, step),), 2)
    assert Fsdp().fits(without, target(2)) is None
    assert "always stays gathered" in str(Fsdp(reshard_after_forward=False).fits(without, target(2)))


def test_all_ranks_is_one_candidate_for_any_spelling() -> None:
    assert Fsdp().record(target(8)) == Fsdp(degree=8).record(target(8)) != Fsdp(degree=4).record(target(8))
    assert Fsdp().record(target(8))["states.shard"] == {"parameters": 8, "gradients": 8, "optimizer": 8}


def test_pass_follows_the_knobs() -> None:
    step = Fsdp(degree=4).rewrite(program(ranks=16), NO_PLAN, target(16)).step
    by_name = {
        name: [op for op in range(step.ops.n) if step.names[step.ops.name[op]] == name] for name in step.names
    }
    assert {int(step.ops.group[op]) for op in by_name["memtune.all_gather_into_.default"]} == {4}
    assert {int(step.ops.group[op]) for op in by_name["memtune.all_reduce_.default"]} == {4}
    assert {int(step.ops.resource[op]) for op in by_name["memtune.all_reduce_.default"]} == {
        Resource.INTER_LINK
    }  # 8 GPUs a node
    kept = Fsdp(degree=4, reshard_after_forward=False).rewrite(program(ranks=16), NO_PLAN, target(16)).step
    assert (
        len(by_name["memtune.all_gather_into_.default"]) == 9
    )  # root and four blocks, the blocks once more in backward
    assert sum(kept.names[name] == "memtune.all_gather_into_.default" for name in kept.ops.name) == 5


def test_custom_collectives_refuse_other_gathers_and_types() -> None:
    for knobs, reason in (
        ({"reshard_after_forward": 2}, "in smaller groups"),
        ({"reduce_dtype": "bfloat16"}, "travel in reduce_dtype"),
    ):
        chosen = replace(target(16), chosen={"sharding.states": Fsdp(**knobs)})
        assert reason in str(Hierarchical().fits(program(ranks=16), chosen))


def test_choices_spare_links_on_several_nodes_only() -> None:
    assert (
        Fsdp().choices_on(target(8)).keys()
        == Fsdp().choices_on(target(4, "cpu")).keys()
        == {"degree", *Fsdp().choices()}
    )
    assert Fsdp().choices_on(target(16))["reshard_after_forward"] == (True, False, 8)


def test_narrow_reductions_are_lossy() -> None:
    assert Fsdp().exactly() is Fsdp(reshard_after_forward=2, prefetch=2).exactly() is Exactness.REORDERED
    assert Fsdp(reduce_dtype="bfloat16").exactly() is Exactness.LOSSY


def test_only_gloo_stages_its_messages() -> None:
    def scratch(device: str) -> int:
        step = Fsdp().rewrite(program(), NO_PLAN, target(2, device)).step
        return int(step.storages.bytes[step.storages.kind == Kind.WORKSPACE].sum())

    assert scratch("cuda") == 0 < scratch("cpu")


def test_choices_are_valid_knobs() -> None:
    for knob, values in Fsdp().choices().items():
        assert values[0] == getattr(Fsdp(), knob)
        for value in values:
            Fsdp(**{knob: value})


class TestFsdp(ShardedSuite):
    technique = Fsdp


# -- two copies of two shards --------------------------------------------------------------------------------


def two_by_two() -> dict[str, Any]:
    warnings.simplefilter("error", FutureWarning)  # of a collective by a name that torch has given up
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    x = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(1))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return F.mse_loss(model(batch), torch.ones_like(batch))

    if torch.distributed.is_initialized():
        settings = {"sharding": {"states": {"kind": "fsdp", "degree": 2}}}
        tuned = apply(model, optimizer, {"settings": settings}, loss=loss, strict=False)
        tuned.step([x[torch.distributed.get_rank()]])
        shard = next(model.parameters()).to_local().shape  # type: ignore[operator]
        after = tuned.state_dict()["model"]
    else:
        loss(model, x.flatten(0, 1)).backward()
        optimizer.step()
        after, shard = model.state_dict(), next(model.parameters()).shape
    return {"gradients": {name: before[name] - after[name] for name in before}, "shard": tuple(shard)}


def test_replicated_shards_train_as_the_plain_model() -> None:
    plain = two_by_two()
    for rank in run_ranks(two_by_two, 4):
        assert rank["shard"] == (4, 8)
        for name, wanted in plain["gradients"].items():
            # 4 ranks, 16 summands each, and the rounding of weights of size 1 when the gradient is read off
            # them
            assert (rank["gradients"][name] - wanted).abs().max() <= 2 * 21 * torch.finfo(torch.float32).eps
