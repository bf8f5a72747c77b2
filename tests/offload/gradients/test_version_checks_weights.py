"""Weights that the user loads or writes on the device: the next update begins with them, or is refused."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from support import interrupted_loops
from support.gloo import run_ranks
from support.zoo_paths import ZOO
from torch import Tensor, nn

from memtune.api import Tuned, apply
from memtune.errors import ApplyError
from memtune.search_spaces.offload.states.angel_ptm import AngelPtm
from memtune.search_spaces.offload.states.l2l import L2L
from memtune.search_spaces.offload.states.lohan import Lohan
from memtune.search_spaces.offload.states.optimizer_cpu import OptimizerCpu
from memtune.search_spaces.offload.states.patrickstar import PatrickStar
from memtune.search_spaces.offload.states.smart_infinity import SmartInfinity
from memtune.search_spaces.offload.states.stronghold import Stronghold
from memtune.search_spaces.offload.states.zero_infinity import ZeroInfinity
from memtune.search_spaces.offload.states.zero_offload import ZeroOffload
from memtune.technique import Technique
from memtune.testing.training import SEED, build, config_of, one_step
from memtune.workload.workload import Workload

QUICK: dict[str, Technique] = {
    "l2l": L2L(kind="l2l"),
    "own": OptimizerCpu(kind="optimizer_cpu"),
    "ssd": ZeroInfinity(kind="zero_infinity"),
}
SLOW: dict[str, Technique] = {
    "late": Stronghold(kind="stronghold", window=2, deferred=(0, 1, 2, 3)),
    "native": OptimizerCpu(kind="optimizer_cpu", update="native"),
    "zero_offload": ZeroOffload(kind="zero_offload"),
    "a part of it": ZeroOffload(kind="zero_offload", ratio=0.5),
    "one step late": ZeroOffload(kind="zero_offload", delayed=True),
    "chunks": PatrickStar(kind="patrickstar", chunk_bytes=70_000),
    "pages": AngelPtm(kind="angel_ptm", page_mib=0.02),
    "ssd in backward": Lohan(kind="lohan"),
    "weights on ssd": ZeroInfinity(kind="zero_infinity", parameters="ssd"),
    "steps kept": ZeroInfinity(kind="zero_infinity", resume="last_step"),
}
CASES = [*QUICK.items(), *(pytest.param(*item, marks=pytest.mark.slow, id=item[0]) for item in SLOW.items())]
ON_DEVICE = [
    *interrupted_loops.DOWN,
    *(name for name in interrupted_loops.AT_END if name != "smart_infinity"),
]
"""Techniques whose weights are all resident between steps."""
pytestmark = pytest.mark.usefixtures("one_thread", "ssd")


def started(technique: Technique) -> tuple[Workload, nn.Module, Any, Tuned]:
    workload, model, optimizer = build(ZOO["gpt"])
    return workload, model, optimizer, apply(model, optimizer, config_of(ZOO["gpt"], technique), strict=False)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("name", "technique"), CASES)
def test_next_step_updates_loaded_weights(name: str, technique: Technique, whole: bool) -> None:
    """The optimizer's next step changes nothing, at a rate of zero: the weights must be those that were
    loaded.
    """
    workload, model, optimizer, tuned = started(technique)
    wanted = copy.deepcopy(model.state_dict())
    for step in range(2):
        one_step(workload, model, optimizer, tuned, seed=SEED + step)
    assert not any(
        torch.equal(value, wanted[key])
        for key, value in model.state_dict().items()
        if value.is_floating_point()
    )
    if whole:
        model.load_state_dict(wanted)
    else:
        for part, module in model.named_children():
            module.load_state_dict(
                {k.removeprefix(f"{part}."): v for k, v in wanted.items() if k.startswith(f"{part}.")}
            )
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for step in range(2 if technique.kind == "zero_offload" else 1):
        one_step(workload, model, optimizer, tuned, seed=SEED + 9 + step)
    assert [key for key, value in model.state_dict().items() if not torch.equal(value, wanted[key])] == []
    tuned.finish()


def test_updaters_refuse_weights_that_they_do_not_have() -> None:
    workload, model, optimizer, tuned = started(SmartInfinity(kind="smart_infinity", domains=1))
    wanted = copy.deepcopy(tuned.state_dict())
    one_step(workload, model, optimizer, tuned, seed=SEED)
    model.load_state_dict(wanted["model"])
    with pytest.raises(ApplyError, match="own load_state_dict") as refused:
        one_step(workload, model, optimizer, tuned, seed=SEED + 1)
    assert "Tuned.load_state_dict" in str(refused.value)
    optimizer.zero_grad()
    tuned.load_state_dict(wanted)
    one_step(workload, model, optimizer, tuned, seed=SEED + 2)


def test_copied_or_pickled_model_has_no_load_hooks() -> None:
    _, model, optimizer, _ = started(QUICK["own"])
    hosts = [host.detach().clone() for group in optimizer.param_groups for host in group["params"]]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    zeros = {key: torch.zeros_like(value) for key, value in model.state_dict().items()}
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other.load_state_dict(zeros)
        assert all(not value.any() for value in other.state_dict().values())
    assert all(
        map(torch.equal, hosts, (host for group in optimizer.param_groups for host in group["params"]))
    )


def test_parameter_added_after_apply_raises() -> None:
    for technique in (QUICK["own"], QUICK["ssd"], SmartInfinity(kind="smart_infinity", domains=1)):
        workload, model, optimizer, tuned = started(technique)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(7))]})
        with pytest.raises(
            ApplyError, match=r"added to the optimizer after apply(?s:.)*\(7,\)(?s:.)*before memtune.apply"
        ):
            one_step(workload, model, optimizer, tuned, seed=SEED)


@pytest.mark.parametrize(
    "technique", [QUICK["ssd"], Lohan(kind="lohan"), SmartInfinity(kind="smart_infinity", domains=1)]
)
def test_learning_rate_set_after_a_load_is_used(technique: Technique) -> None:
    """A load makes new groups: those that the update refers to are still the optimizer's."""
    workload, model, optimizer, tuned = started(technique)
    one_step(workload, model, optimizer, tuned, seed=SEED)
    tuned.load_state_dict(copy.deepcopy(tuned.state_dict()))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = copy.deepcopy(model.state_dict())
    one_step(workload, model, optimizer, tuned, seed=SEED + 1)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@torch.no_grad()
def write(model: interrupted_loops.Net, inside: bool) -> None:
    model.first.weight.mul_(0.5)
    model.first.bias.data[1:3].add_(0.25)  # one row of the data alias, which has a version of its own
    model.last.weight.data = model.last.weight.clamp(-0.1, 0.1)
    model.last.bias.data = model.last.bias.clone()
    model.last.bias.data.mul_(0.5)
    if inside:
        model.blocks[1].up.weight.zero_()  # type: ignore[union-attr, operator]
        model.blocks[2].norm.weight.data.mul_(0.5)  # type: ignore[union-attr, operator]


def trained(
    model: interrupted_loops.Net, optimizer: torch.optim.Optimizer, tuned: Tuned | None, inside: bool
) -> dict[str, Tensor]:
    for index in range(4):
        if tuned is not None and index % 2:
            tuned.step([interrupted_loops.batch(index)])  # updates inside backward
        else:
            optimizer.zero_grad()
            interrupted_loops.loss(model, interrupted_loops.batch(index)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        write(model, inside)
    return interrupted_loops.weights(model)


@pytest.mark.drawn(9)
@pytest.mark.parametrize(
    "name", [*interrupted_loops.ALL, *(name for name in interrupted_loops.AT_END if name != "smart_infinity")]
)
def test_updates_start_from_user_writes(name: str) -> None:
    inside = name in ON_DEVICE
    interrupted_loops.assert_equal(
        trained(*interrupted_loops.made(name), inside), trained(*interrupted_loops.build(), None, inside)
    )


@torch.no_grad()
def write_and_put_back(model: interrupted_loops.Net) -> None:
    """Replace `data` and restore it: the memory is the same afterwards, and its version starts again."""
    model.first.weight.data = model.first.weight.data.mul_(0.5)
    shown = model.last.weight.data
    model.last.weight.data = torch.zeros_like(shown)
    shown.mul_(0.5)
    model.last.weight.data = shown


def test_write_through_restored_data_alias_is_found() -> None:
    model, optimizer, _ = interrupted_loops.made("ratio")
    plain, others = interrupted_loops.build()
    for index in range(3):
        for each, updates in ((model, optimizer), (plain, others)):
            interrupted_loops.step(each, updates, index)
            write_and_put_back(each)
    interrupted_loops.assert_equal(interrupted_loops.weights(model), interrupted_loops.weights(plain))


def test_updaters_in_processes_refuse_the_step_after_a_write() -> None:
    model, optimizer, tuned = interrupted_loops.made("smart_infinity")
    with pytest.raises(ApplyError, match=r"MT318 4 weights were loaded(.|\n)*or written on the device"):
        trained(model, optimizer, tuned, False)


@pytest.mark.parametrize("name", ["l2l", "per_gradient", "lohan", "one by one"])
def test_write_to_weights_after_their_updates_in_backward_raises(name: str) -> None:
    """The second half of a sharpness-aware step takes a perturbation off the weights again."""
    model, optimizer, tuned = interrupted_loops.made(name)
    with tuned.micro_batch(last=True):
        interrupted_loops.loss(model, interrupted_loops.batch(0)).backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for each in model.parameters():
            each.sub_(0.1)
    with pytest.raises(ApplyError, match="were written on the device while an update of theirs is running"):
        optimizer.step()


def test_write_to_a_weight_with_a_deferred_update_raises() -> None:
    model, optimizer = interrupted_loops.build()
    states: dict[str, Any] = {"kind": "zero_offload", "delayed": True, "delay_after": 1}
    tuned = apply(
        model,
        optimizer,
        {"settings": {"offload": {"states": states}}},
        loss=interrupted_loops.loss,
        strict=False,
    )
    tuned.step([interrupted_loops.batch(0)])
    write(model, True)  # its update is over
    tuned.step([interrupted_loops.batch(1)])
    write(model, True)
    with pytest.raises(
        ApplyError, match="MT318 6 weights were written on the device while an update of theirs is running"
    ):
        tuned.step([interrupted_loops.batch(2)])


# -- on gloo ranks -------------------------------------------------------------------------------------------


def kept(states: str) -> list[str]:
    """Return weights that differ from those on one rank, after steps between which each rank writes them."""
    model, optimizer = interrupted_loops.build()
    settings = {"sharding": {"states": {"kind": states}}, "offload": {"states": {"kind": "optimizer_cpu"}}}
    tuned = apply(model, optimizer, {"settings": settings}, loss=interrupted_loops.loss, strict=False)
    for index in range(3):
        interrupted_loops.step(model, optimizer, index)
        with torch.no_grad():
            for weight in (model.first.weight, model.blocks[1].up.weight):  # type: ignore[union-attr]
                weight.mul_(0.5)  # type: ignore[operator]
            model.last.weight.data.mul_(0.5)
    plain, others = interrupted_loops.build()
    for index in range(3):
        interrupted_loops.step(plain, others, index)
        with torch.no_grad():
            for weight in (plain.first.weight, plain.blocks[1].up.weight, plain.last.weight):  # type: ignore[union-attr]
                weight.mul_(0.5)  # type: ignore[operator]
    found, wanted = tuned.state_dict()["model"], interrupted_loops.weights(plain)
    return [name for name in wanted if not torch.allclose(found[name], wanted[name], rtol=0, atol=1e-6)]


@pytest.mark.slow
@pytest.mark.parametrize("states", ["zero1", "zero2", "fsdp"])
def test_ranks_start_from_user_writes(states: str) -> None:
    assert run_ranks(kept, 2, states) == [[], []]
