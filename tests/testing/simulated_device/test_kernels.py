"""Kernels of the simulated accelerator are the CPU's, bit for bit; errors are those of a GPU."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

pytestmark = pytest.mark.device


def trained(name: str, device: str) -> tuple[list[float], list[torch.Tensor]]:
    """Return losses and parameters after three steps."""
    workload: Any = importlib.import_module(f"zoo.{name}")
    torch.manual_seed(0)
    model, batch = workload.model(), workload.batch(2)
    model.to(device)
    batch = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        loss = workload.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("name", ["gpt", "cnn_bn", "inplace_views", "lora", "moe", "tied", "tobf16"])
def test_training_equals_the_cpus_bit_for_bit(name: str) -> None:
    losses, parameters = trained(name, "cpu")
    there, moved = trained(name, "sim:0")
    assert there == losses
    for here, other in zip(parameters, moved, strict=True):
        assert torch.equal(here, other)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_equal_the_cpus(kind: type[nn.RNNBase], bias: bool) -> None:
    """Their cells are fused on devices, and sum in another order."""
    torch.manual_seed(0)
    layer, x = kind(5, 6, num_layers=2, bias=bias), torch.randn(7, 3, 5)
    found = []
    for device in ("cpu", "sim:0"):
        here = kind(5, 6, num_layers=2, bias=bias).to(device)
        here.load_state_dict(layer.state_dict())
        mine = x.detach().to(device).requires_grad_()
        out, last = here(mine)
        ends = last if isinstance(last, tuple) else [last]
        (out.square().sum() + sum(each.sin().sum() for each in ends)).backward()
        found.append([each.detach().cpu() for each in (out, mine.grad, *(p.grad for p in here.parameters()))])
    torch.testing.assert_close(found[1], found[0])


def test_seeded_generators_draw_the_cpus_numbers() -> None:
    torch.manual_seed(3)
    here = [torch.randn(5), torch.rand(5), torch.randperm(9)]
    torch.manual_seed(3)
    there = [torch.randn(5, device="sim:1"), torch.rand(5, device="sim:1"), torch.randperm(9, device="sim:1")]
    assert all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True))
    state = torch.sim.get_rng_state(1)
    first = torch.rand(3, device="sim:1").cpu()
    torch.sim.set_rng_state(state, 1)
    assert torch.equal(torch.rand(3, device="sim:1").cpu(), first)


def test_tensors_of_two_devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="same device, but found at least two devices, sim:0 and sim:1"):
        torch.ones(3, device="sim:0") + torch.ones(3, device="sim:1")
    with pytest.raises(RuntimeError, match="same device, but found at least two devices, sim:0 and cpu"):
        nn.Linear(3, 3, device="sim:0")(torch.ones(1, 3))
    with pytest.raises(RuntimeError, match="sim:2 does not exist: there are 2"):
        torch.ones(3, device="sim:2")


def test_autocast_casts_as_on_other_accelerators() -> None:
    x = torch.randn(4, 4, device="sim:0")
    with torch.autocast("sim", dtype=torch.bfloat16):
        product = x @ x
        assert product.dtype == torch.bfloat16
        assert product.softmax(-1).dtype == torch.float32
        assert torch.cat([product, x]).dtype == torch.float32
        assert (product + 1).dtype == torch.bfloat16
    assert (x @ x).dtype == torch.float32


def test_results_of_unknown_size_wait_for_the_device() -> None:
    host = torch.arange(10.0).pin_memory()
    moved = host.to("sim:0", non_blocking=True)
    assert moved[moved > 4].sum().item() == 35
    assert torch.nonzero(moved).shape == (9, 1)


def test_add_takes_a_scalar_of_the_host_after_one_of_the_device() -> None:
    """Both calls have equal sizes; the second one's results are not found as the first one's."""
    here, there = (torch.ones((), device="sim:0") for _ in range(2))
    host = torch.ones(())
    for _ in range(3):
        assert (there + here).item() == 2
        assert (host + here).item() == 2
