"""Weights that are freed between uses: reading, writing, replacing and loading them is right, or refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.interrupted_loops import (
    STORES,
    Net,
    assert_equal,
    batch,
    build,
    loss,
    made,
    plain,
    step,
    weights,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from memtune.api import apply
from memtune.autotune.record_parallel.fake_process_group import fake_ranks
from memtune.errors import ApplyError
from memtune.ssd import offload_dir

pytestmark = pytest.mark.usefixtures("one_thread")
SORTS = ["l2l", "patrickstar", "angel_ptm"]
"""Blocks, chunks, pages."""
READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "norm": lambda weight: weight.norm(),
    "foreach": lambda weight: torch._foreach_norm([weight]),
    "alias": lambda weight: weight.detach()[0].clone(),
    "data": lambda weight: weight.data.sum(),
    "write": lambda weight: weight.data.mul_(2),
    "numpy": lambda weight: weight.detach().numpy(),
    "copy": copy.deepcopy,
    "replaced": lambda weight: setattr(weight, "data", torch.zeros_like(weight)),
}
ROW_READS: dict[str, Callable[[DTensor], Any]] = {
    "rows": lambda weight: weight.to_local().sum(),
    "rows as they are": lambda weight: torch.no_grad()(weight.to_local)().sum(),
    "rows of data": lambda weight: weight.data.to_local().mul_(2),  # type: ignore[attr-defined]
    "gathered": lambda weight: weight.full_tensor(),
    "divided otherwise": lambda weight: weight.redistribute(placements=weight.placements),
    "saved": lambda weight: torch.save(weight, io.BytesIO()),
}


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))


def weight_of(model: Net, block: int = 1) -> nn.Parameter:
    found = model.blocks[block].up.weight  # type: ignore[union-attr]
    assert isinstance(found, nn.Parameter)
    return found


@pytest.mark.parametrize("name", SORTS)
def test_access_to_freed_parameter_raises(name: str) -> None:
    """Without the guard torch's kernels would end the process or read other weights."""
    model, optimizer, _ = made(name)
    step(model, optimizer, 0)
    weight = weight_of(model)
    for read in READS.values():
        with pytest.raises(ApplyError, match=r"MT364 A weight of shape \(16, 8\)(.|\n)*state_dict"):
            read(weight)
    assert (weight.shape, weight.dtype, weight.grad, weight.requires_grad) == (
        (16, 8),
        torch.float32,
        None,
        True,
    )
    assert "not on the device" in repr(weight)
    assert isinstance(weight, nn.Parameter)
    step(model, optimizer, 1)
    assert_equal(weights(model), plain(2))


@pytest.mark.parametrize("name", SORTS)
def test_access_to_freed_rows_of_sharded_weight_raises(name: str) -> None:
    """On a fake process group: access to FSDP2's shards would end the process."""
    with fake_ranks(2):
        model, optimizer = build()
        settings, plan = STORES[name]
        chosen = {"sharding": {"states": {"kind": "fsdp"}}, "offload": {"states": settings}}
        config = {"settings": chosen, "plan": {"offload.states": plan} if plan else {}}
        apply(model, optimizer, config, loss=loss, strict=False)
        step(model, optimizer, 0)
        weight = weight_of(model)
        assert isinstance(weight, DTensor)
        assert isinstance(weight, nn.Parameter)
        for read in (*READS.values(), *ROW_READS.values()):
            with pytest.raises(ApplyError, match="MT364 A weight of shape"):
                read(weight)
        assert (weight.shape, weight.to_local().shape, weight.grad, weight.requires_grad) == (
            (16, 8),
            (8, 8),
            None,
            True,
        )
        assert "not on the device" in repr(weight)
        assert model.state_dict()["blocks.1.up.weight"].to_local().shape == (8, 8)
        for upset in (copy.deepcopy, lambda module: module.double()):
            with pytest.raises(ApplyError, match="freed on the device"):
                upset(model)
        model.to("cpu").float()
        step(model, optimizer, 1)


@pytest.mark.parametrize("name", SORTS)
def test_model_with_freed_weights_cannot_be_copied_or_converted(name: str) -> None:
    model, optimizer, tuned = made(name)
    step(model, optimizer, 0)
    dtypes = [each.dtype for each in model.parameters()]
    block = model.get_submodule(tuned._context.blocks[0])
    for read in (copy.deepcopy, lambda module: module.double(), lambda module: module.to(torch.bfloat16)):
        for module in (model, block):
            with pytest.raises(ApplyError, match="freed on the device"):
                read(module)
    assert [each.dtype for each in model.parameters()] == dtypes
    model.to("cpu").float().train()
    step(model, optimizer, 1)
    assert_equal(weights(model), plain(2))


@pytest.mark.parametrize("name", SORTS)
def test_replaced_memory_of_a_weight_raises(name: str) -> None:
    model, _, _ = made(name)
    out = loss(model, batch(0))
    weight = weight_of(model, 3)  # used last, and first in backward
    weight.data = torch.zeros_like(weight)

    def goes_on() -> None:
        out.backward()  # type: ignore[no-untyped-call]
        loss(model, batch(1))

    with pytest.raises(ApplyError, match=r"MT364 The memory of a weight of shape \(16, 8\) was replaced"):
        goes_on()


def test_autograd_grad_accepts_freed_parameters() -> None:
    """Between forward and backward, for blocks that are freed."""
    model, _, _ = made("l2l")
    plain_model, _ = build()
    found = [
        torch.autograd.grad(loss(net, batch(0)), [net.first.weight, net.blocks[0].up.weight])  # type: ignore[union-attr, list-item]
        for net in (model, plain_model)
    ]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))


@pytest.mark.parametrize("name", [*STORES, "harmony", "parameters on SSD"])
def test_part_of_a_block_is_saved_and_loaded(name: str) -> None:
    if name == "harmony":
        model, optimizer = build()
        plan = {"offload.states": {"forward": [[0, 2]], "backward": [[0, 2], [2, 4]], "swapped_bytes": 0}}
        apply(
            model,
            optimizer,
            {"settings": {"offload": {"states": {"kind": name}}}, "plan": plan},
            loss=loss,
            strict=False,
        )
    elif name == "parameters on SSD":
        model, optimizer = build()
        states = {"kind": "zero_infinity", "parameters": "ssd"}
        apply(model, optimizer, {"settings": {"offload": {"states": states}}}, loss=loss, strict=False)
    else:
        model, optimizer, _ = made(name)
    other, others = build()
    for net, own in ((model, optimizer), (other, others)):
        if name != "harmony":
            step(net, own, 0)
        for part in (net.blocks[2].up, net.blocks[1].norm):  # type: ignore[union-attr]
            assert isinstance(part, nn.Module)
            doubled: dict[str, Tensor] = {key: 2 * value for key, value in part.state_dict().items()}
            part.load_state_dict(doubled)
        if name != "harmony":
            step(net, own, 1)
    assert_equal(weights(model), weights(other))


@pytest.mark.parametrize("name", ["l2l", "patrickstar"])
def test_model_with_freed_weights_cannot_be_pickled(name: str) -> None:
    """`torch.save` of the model or of one block; torch's own error would name a hook."""
    model, _, _ = made(name)
    for module in (model, *model.blocks[1:2]):
        with pytest.raises(ApplyError, match="MT364 The model cannot be pickled here"):
            torch.save(module, io.BytesIO())
