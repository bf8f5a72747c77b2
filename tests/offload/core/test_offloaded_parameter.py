"""Weights that are offloaded between uses: reads, writes, loads, copies and pickles are a plain model's."""

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
from torch.optim.swa_utils import AveragedModel

from memtune.api import apply
from memtune.autotune.record_parallel.fake_process_group import fake_ranks
from memtune.errors import ApplyError
from memtune.offload.core import offloaded_parameter
from memtune.offload.core.offloaded_parameter import OffloadedParameter
from memtune.runtime import shown_grad
from memtune.ssd import offload_dir

pytestmark = pytest.mark.usefixtures("one_thread")
ON_SSD = "parameters on SSD"
"""Weights and state on SSD, so that neither is the other's memory."""
SORTS = ["l2l", "late", "patrickstar", "angel_ptm", "zero_infinity", ON_SSD]
"""Blocks, values in flight, chunks, pages, weights apart from masters, files."""
READS: dict[str, Callable[[nn.Parameter], Tensor]] = {
    "norm": lambda weight: weight.norm(),
    "foreach": lambda weight: torch._foreach_norm([weight])[0],
    "alias": lambda weight: weight.detach()[0].clone(),
    "data": lambda weight: weight.data.sum(),
    "numpy": lambda weight: torch.tensor(weight.detach().numpy()),
    "copy": copy.deepcopy,
}
ROW_READS: dict[str, Callable[[DTensor], Any]] = {
    "rows": lambda weight: weight.to_local().sum(),
    "gathered": lambda weight: weight.full_tensor(),
    "divided otherwise": lambda weight: weight.redistribute(placements=weight.placements),
    "saved": lambda weight: torch.save(weight, io.BytesIO()),
    "copied": copy.deepcopy,
    "rows of data": lambda weight: weight.data.to_local().sum(),  # type: ignore[attr-defined]
}


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))


def started(name: str) -> tuple[Net, torch.optim.Optimizer]:
    """Return the net under a store; its parameters are on the host or on SSD."""
    if name == "harmony":
        plan = {"offload.states": {"forward": [[0, 2]], "backward": [[0, 2], [2, 4]], "swapped_bytes": 0}}
        states: dict[str, Any] = {"kind": name}
    elif name == ON_SSD:
        plan, states = {}, {"kind": "zero_infinity", "parameters": "ssd"}
    else:
        model, optimizer, _ = made(name)
        return model, optimizer
    model, optimizer = build()
    config = {"settings": {"offload": {"states": states}}, "plan": plan}
    apply(model, optimizer, config, loss=loss, strict=False)
    return model, optimizer


def weight_of(model: nn.Module, block: int = 1) -> nn.Parameter:
    found = model.get_parameter(f"blocks.{block}.up.weight")
    assert isinstance(found, nn.Parameter)
    return found


@pytest.mark.parametrize("name", SORTS)
def test_reads_between_steps_return_the_trained_values(name: str) -> None:
    wanted, others = build()
    step(wanted, others, 0)
    for how, read in READS.items():
        model, optimizer = started(name)  # a new one each: the first read ends a wait
        step(model, optimizer, 0)
        assert torch.equal(read(weight_of(model)), read(weight_of(wanted))), how


@torch.no_grad()
def in_place(model: Net) -> None:
    for each in model.parameters():
        each.mul_(0.9)


def through_data(model: Net) -> None:
    for each in model.parameters():
        each.data.mul_(0.9)


def assigned(model: Net) -> None:
    for each in model.parameters():
        each.data = each.detach() * 0.9


def loaded(model: Net) -> None:
    model.load_state_dict({name: 0.9 * value for name, value in model.state_dict().items()})


def loaded_in_part(model: Net) -> None:
    part = model.blocks[2].up  # type: ignore[union-attr]
    assert isinstance(part, nn.Module)
    part.load_state_dict({name: 0.9 * value for name, value in part.state_dict().items()})


def at_random(model: Net) -> None:
    torch.manual_seed(1)
    nn.init.normal_(weight_of(model), std=0.1)


@pytest.mark.drawn(30)
@pytest.mark.parametrize("change", [in_place, through_data, assigned, loaded, loaded_in_part, at_random])
@pytest.mark.parametrize("name", [*SORTS, "elixir", "stronghold", "gradients on SSD", "all else on SSD"])
def test_writes_between_steps_train_as_the_plain_model(name: str, change: Callable[[Net], None]) -> None:
    model, optimizer = started(name)
    wanted, others = build()
    for net, own in ((model, optimizer), (wanted, others)):
        change(net)
        for index in range(3):
            step(net, own, index)
            change(net)
    assert_equal(weights(model), weights(wanted))


def test_frozen_weight_on_ssd_written_between_backward_and_step_keeps_its_checksum() -> None:
    runs = []
    for config in (
        {"settings": {"offload": {"states": {"kind": "zero_infinity", "parameters": "ssd"}}}},
        None,
    ):
        model, _ = build()
        weight_of(model).requires_grad_(False)
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=True)
        if config is not None:
            apply(model, optimizer, config, loss=loss, strict=False)
        for index in range(2):
            loss(model, batch(index)).backward()
            with torch.no_grad():
                weight_of(model).mul_(0.9)
            optimizer.step()
            optimizer.zero_grad()
        runs.append(weights(model))
    assert_equal(*runs)


@pytest.mark.parametrize("name", SORTS)
def test_write_in_forward_is_kept(name: str) -> None:
    """A module that scales its own weight, as spectral norms do, writes it while it is on the device."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.mul_(0.9)
            return super().forward(x)

    runs = []
    for net, own in (started(name), build()):
        net.blocks[1].down.__class__ = Scaled  # type: ignore[union-attr, assignment]
        for index in range(2):
            step(net, own, index)
        runs.append(weights(net))
    assert_equal(*runs)


@pytest.mark.parametrize("name", SORTS)
def test_copied_and_pickled_models_train_as_plain_models(name: str) -> None:
    model, optimizer = started(name)
    step(model, optimizer, 0)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    wanted, others = build()
    step(wanted, others, 0)
    for other, twin in (
        (copy.deepcopy(model), copy.deepcopy(wanted)),
        (torch.load(file, weights_only=False), copy.deepcopy(wanted)),
    ):
        for net in (other, twin):
            own = torch.optim.SGD(net.parameters(), lr=0.1)
            for index in range(2):
                step(net, own, index)
        assert_equal(weights(other), weights(twin))
    step(model, optimizer, 1)
    assert_equal(weights(model), plain(2))


@pytest.mark.parametrize("name", SORTS)
def test_averaged_weights_are_those_of_the_plain_model(name: str) -> None:
    runs = []
    for net, own in (started(name), build()):
        average = AveragedModel(net)
        for index in range(3):
            step(net, own, index)
            average.update_parameters(net)
        runs.append(weights(average))
    assert_equal(*runs)


def test_tied_weights_outside_of_blocks_train_as_in_the_plain_model() -> None:
    runs = []
    for tuned in (True, False):
        net, _ = build()
        net.last.weight = net.first.weight
        own = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
        if tuned:
            apply(net, own, {"settings": {"offload": {"states": {"kind": "l2l"}}}}, loss=loss, strict=False)
        for index in range(2):
            step(net, own, index)
            through_data(net)
        assert net.last.weight is net.first.weight
        runs.append(weights(net))
    assert_equal(*runs)


@pytest.mark.parametrize("name", ["l2l", "angel_ptm", ON_SSD])
def test_change_of_dtype_raises_at_the_next_use(name: str) -> None:
    model, optimizer = started(name)
    step(model, optimizer, 0)
    model.to("cpu").float().train()  # changes nothing
    step(model, optimizer, 1)
    assert_equal(weights(model), plain(2))
    model.blocks.double()  # type: ignore[union-attr]
    with pytest.raises(ApplyError, match=r"MT364 A weight of shape .*float64 after memtune.apply"):
        step(model, optimizer, 2)


@pytest.mark.parametrize("name", ["l2l", "late", "patrickstar", "angel_ptm"])
def test_sharded_weights_show_their_rows_between_steps(name: str) -> None:
    """On a fake process group: values of other ranks are wrong, those of this rank's rows are not."""
    with fake_ranks(2):
        model, optimizer = build()
        settings, plan = STORES[name]
        chosen = {"sharding": {"states": {"kind": "fsdp"}}, "offload": {"states": settings}}
        config = {"settings": chosen, "plan": {"offload.states": plan} if plan else {}}
        apply(model, optimizer, config, loss=loss, strict=False)
        for read in ROW_READS.values():
            step(model, optimizer, 0)
            weight = weight_of(model)
            assert isinstance(weight, DTensor)
            assert isinstance(weight, nn.Parameter)
            read(weight)
        assert (weight.shape, weight.to_local().shape, weight.grad) == ((16, 8), (8, 8), None)
        with torch.no_grad():
            weight.fill_(2.0)
        saved = model.state_dict()
        assert (saved["blocks.1.up.weight"].to_local() == 2.0).all()
        model.load_state_dict({key: torch.ones_like(value) for key, value in saved.items()})
        assert (weight.to_local() == 1.0).all()
        loss(model, batch(0))
        gathered = model.blocks[1]._get_fsdp_state()._fsdp_param_group.fsdp_params  # type: ignore[union-attr]
        rows = [each._sharded_param_data for each in gathered]
        assert all(
            (each[: each.numel() // 2] == 1.0).all() for each in rows if each.untyped_storage().nbytes()
        )
        assert weight.untyped_storage().nbytes() == 0 or (weight.to_local() == 1.0).all()


@torch.no_grad()
def test_parameter_that_keeps_its_memory_has_the_hosts_values_while_it_is_freed() -> None:
    """As where DDP averages its gradient."""
    parameter, host = nn.Parameter(torch.ones(3)), torch.full((3,), 2.0)
    each, loads = OffloadedParameter(parameter, host, keeps=True), list[str]()
    each.free()
    each.device.untyped_storage().resize_(0)

    def load() -> None:
        loads.append("load")
        each.device.untyped_storage().resize_(host.nbytes)
        each.device.copy_(host)
        each.restore()

    each.expect_values(load)
    parameter.mul_(3)
    parameter.data.sub_(1)
    assert torch.equal(parameter.detach(), torch.full((3,), 5.0))
    parameter.data = torch.full((3,), 7.0)
    assert torch.equal(copy.deepcopy(parameter), host)
    assert (host.tolist(), loads, parameter.shape, parameter.grad) == ([7.0] * 3, [], (3,), None)
    with torch.enable_grad():
        out = parameter.square().sum()  # recorded, so its values are loaded
    out.backward()
    assert (loads, parameter.grad.tolist()) == (["load"], [14.0] * 3)  # type: ignore[union-attr]
    assert type(parameter) is nn.Parameter


def test_error_before_values_are_in_flight_leaves_nothing_to_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """`apply` restores the parameters after an error anywhere in it, and must not fail in turn."""
    parameter, host = nn.Parameter(torch.ones(3)), torch.full((3,), 2.0)
    each = OffloadedParameter(parameter, host, keeps=True)
    each.free()

    def fail(tensor: Tensor) -> type:
        raise RuntimeError("injected")

    monkeypatch.setattr(offloaded_parameter, "plain_type", fail)
    with pytest.raises(RuntimeError, match="injected"):
        each.expect_values(lambda: None)
    each.restore()
    assert type(parameter) is nn.Parameter
    assert each.is_resident


def test_autograd_grad_accepts_freed_parameters() -> None:
    """Between forward and backward, for blocks that are freed."""
    model, _, _ = made("l2l")
    plain_model, _ = build()
    found = [
        torch.autograd.grad(loss(net, batch(0)), [net.first.weight, weight_of(net, 0)])
        for net in (model, plain_model)
    ]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))


def test_write_between_forward_and_backward_raises_as_in_the_plain_model() -> None:
    for net in (made("l2l")[0], build()[0]):
        out = loss(net, batch(0))
        with torch.no_grad():
            weight_of(net).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()  # type: ignore[no-untyped-call]


def test_part_of_a_block_is_loaded_under_harmony() -> None:
    model, _ = started("harmony")
    other, _ = build()
    for net in (model, other):
        loaded_in_part(net)
    assert_equal(weights(model), weights(other))


def test_untouched_parameters_change_states_without_a_call_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, _ = made("l2l")
    asked: list[nn.Parameter] = []
    adopt = OffloadedParameter.adopt
    monkeypatch.setattr(shown_grad, "_used", False)  # as in a process that reads no weight's `data`
    monkeypatch.setattr(OffloadedParameter, "adopt", lambda self: asked.append(self.parameter) or adopt(self))
    step(model, optimizer, 0)
    assert asked == []
    with torch.no_grad():
        weight_of(model).mul_(2)
    step(model, optimizer, 1)
    assert asked
    assert all(each is weight_of(model) for each in asked)
