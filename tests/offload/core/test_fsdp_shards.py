"""Version counters of sharded gradients: all in-place changes count, those of foreach kernels included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.gloo import run_ranks
from support.ranks.block_offload_on_ranks import share_of, started
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from memtune.autotune.record_parallel.fake_process_group import fake_ranks
from memtune.errors import ApplyError
from memtune.offload.core.fsdp_shards import count_changes

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


# -- on gloo ranks -------------------------------------------------------------------------------------------


def error_of_clipping() -> str:
    """Return the error of a custom loop that clips by norm with foreach kernels."""
    settings = {"sharding": {"states": {"kind": "fsdp"}}, "offload": {"states": {"kind": "l2l"}}}
    workload, tuned = started({"settings": settings})
    with tuned.micro_batch(last=True):
        workload.loss(tuned.model, share_of(workload, 0, 1, RANKS)[0]).backward()
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
