"""Version counters of sharded gradients: all in-place changes count, those of foreach kernels included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.gloo import run_ranks
from support.ranks.block_offload_on_ranks import Weights, share_of, started, weights_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from memtune.api import apply
from memtune.autotune.record_parallel.fake_process_group import fake_ranks
from memtune.errors import ApplyError
from memtune.offload.core.fsdp_shards import sharded_like
from memtune.offload.core.offloaded_parameter import OffloadedParameter
from memtune.parallel.ranks import missing_indices
from memtune.runtime.shown_grad import count_changes, spent_as_none, track_data, version_of_data

RANKS = 2


def clip(gradients: list[Tensor]) -> None:
    torch.nn.utils.clip_grads_with_norm_(parameters_with(gradients), 1e-3, torch.tensor(1.0), foreach=True)


def parameters_with(gradients: list[Tensor]) -> list[Tensor]:
    found = [torch.nn.Parameter(gradient.detach().clone()) for gradient in gradients]
    for parameter, gradient in zip(found, gradients, strict=True):
        parameter.grad = gradient
    return found


CHANGES: dict[str, Callable[[list[Tensor]], object]] = {
    "foreach clipping": clip,
    "one by one": lambda gradients: [gradient.mul_(0.5) for gradient in gradients],
    "a list and a scalar": lambda gradients: torch._foreach_mul_(gradients, 0.5),
    "a gradient scaler": lambda gradients: torch._amp_foreach_non_finite_check_and_unscale_(
        gradients, torch.zeros(()), torch.tensor(0.5)
    ),
    "two lists": lambda gradients: torch._foreach_add_(
        gradients, [torch.ones_like(each) for each in gradients]
    ),
}


@pytest.mark.parametrize("how", CHANGES)
def test_counted_gradient_has_a_new_version_after_every_change(how: str) -> None:
    with fake_ranks(RANKS):
        mesh = init_device_mesh("cpu", (RANKS,))
        gradients: list[Tensor] = [
            distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)], src_data_rank=None) for _ in range(2)
        ]
        for gradient in gradients:
            count_changes(gradient)
        before = [gradient._version for gradient in gradients]
        torch._foreach_norm(gradients)  # reads only
        assert [gradient._version for gradient in gradients] == before
        CHANGES[how](gradients)
        assert all(gradient._version > version for gradient, version in zip(gradients, before, strict=True))


def test_pickle_of_a_shard_whose_data_was_read_has_no_second_tensor() -> None:
    with fake_ranks(RANKS):
        mesh = init_device_mesh("cpu", (RANKS,))
        rows = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)], src_data_rank=None)
        weight = nn.Parameter(rows)
        track_data(weight)
        weight.data.add_(1.0)
        # A pickle is written after the call, from the dictionary that it returned.
        _, (_, kind, _, (attributes, _)) = weight.__reduce_ex__(2)[:2]
        assert kind is DTensor
        assert attributes.keys().isdisjoint({"_kept", "_assigned", "_earlier"})
        assert version_of_data(weight) != (0, 0)


def test_ranks_that_compare_gradients_do_not_wait_for_values() -> None:
    """They need the device of a parameter alone: a wait in each step would write all changed experts."""
    with fake_ranks(RANKS):
        mesh = init_device_mesh("cpu", (RANKS,))
        rows = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)], src_data_rank=None)
        each, waits = OffloadedParameter(nn.Parameter(rows), torch.ones(2, 3)), list[None]()
        each.free()
        each.expect_values(lambda: waits.append(each.settle()))
        assert missing_indices([True], mesh.get_group(), each.parameter) == []
        assert waits == []
        each.parameter.detach()
        assert waits == [None]


def test_rows_on_a_page_are_pickled_as_a_shard() -> None:
    with fake_ranks(RANKS):
        mesh = init_device_mesh("cpu", (RANKS,))
        weight = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)], src_data_rank=None))
        shown = sharded_like(weight, torch.arange(8.0)[2:].view(2, 3))
        _, (rebuild, *_) = shown.__reduce_ex__(2)[:2]
        assert rebuild is torch._utils._rebuild_wrapper_subclass
        assert isinstance(shown, DTensor)
        assert torch.equal(shown.to_local(), torch.arange(2.0, 8.0).view(2, 3))


# -- on gloo ranks -------------------------------------------------------------------------------------------


def error_of_clipping() -> str:
    """Return the error of a custom loop that clips by norm with foreach kernels."""
    settings = {"sharding": {"states": {"kind": "fsdp"}}, "offload": {"states": {"kind": "l2l"}}}
    workload, tuned = started({"settings": settings})
    with tuned.micro_batch(last=True):
        workload.loss(tuned.model, share_of(workload, 0, 1, RANKS)[0]).backward()
    with spent_as_none():
        resident = [each for each in tuned.model.parameters() if each.grad is not None]
    torch.nn.utils.clip_grad_norm_(resident, 1e-3, foreach=True)
    try:
        tuned.optimizer.step()
    except ApplyError as refused:
        return str(refused)
    return ""


@pytest.mark.slow
def test_clipping_sharded_gradients_by_foreach_kernels_raises() -> None:
    for rank in run_ranks(error_of_clipping, RANKS):
        assert "Gradients were changed between backward and the optimizer's step" in rank


def changed(settings: dict[str, Any]) -> Weights:
    """Return the weights of a loop that scales, drops and clips gradients between backward and step."""
    workload, tuned = started({"settings": settings})
    inside = tuned.model.get_submodule(tuned._context.blocks[1])
    for step in range(3):
        for batch in share_of(workload, step, 2, RANKS):
            workload.loss(tuned.model, batch).backward()
            torch._foreach_mul_([each.grad for each in inside.parameters() if each.grad is not None], 0.5)
        if step == 1:
            next(inside.parameters()).grad = None
        torch.nn.utils.clip_grad_norm_(tuned.model.parameters(), 1e-2)
        tuned.optimizer.step()
        tuned.optimizer.zero_grad()
    return weights_of(tuned)


@pytest.mark.slow
@pytest.mark.parametrize(
    "store", [{"kind": "l2l"}, {"kind": "zero_infinity", "parameters": "host", "optimizer": "host"}]
)
def test_changes_of_sharded_gradients_train_as_fsdp(store: dict[str, str]) -> None:
    """Each rank changes the rows that it shows; the norm is that of all ranks."""
    sharding = {"sharding": {"states": {"kind": "fsdp"}}}
    for mine, wanted in zip(
        run_ranks(changed, RANKS, sharding | {"offload": {"states": store}}),
        run_ranks(changed, RANKS, sharding),
        strict=True,
    ):
        assert all(torch.allclose(mine[name], value, rtol=0, atol=1e-6) for name, value in wanted.items())


def weights_of_only_blocks(offload: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights after two steps of a model that is all blocks, sharded over the ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    settings = {"sharding": {"states": {"kind": "fsdp"}}, **offload}
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tuned = apply(model, optimizer, {"settings": settings}, loss=squares, strict=False)
    for step in range(2):
        torch.manual_seed(step)
        tuned.step([torch.randn(2, 4)])
    found: dict[str, Tensor] = tuned.state_dict()["model"]
    return found


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().sum()


def test_gradients_that_fsdp_reduces_last_are_used_in_their_step() -> None:
    """Those of the first block, whose input needs no gradient, if the last block returns the loss's input."""
    plain, _ = run_ranks(weights_of_only_blocks, RANKS, {})
    found, _ = run_ranks(weights_of_only_blocks, RANKS, {"offload": {"states": {"kind": "l2l"}}})
    assert all(torch.equal(found[name], each) for name, each in plain.items())
