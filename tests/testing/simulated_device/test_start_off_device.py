"""A model three times as large as the device starts, trains, is saved and resumes on one rank."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.gloo import run_ranks
from support.simulated_device import races
from torch import Tensor, nn

import memtune
from memtune.api import Tuned
from memtune.device import memory_statistics
from memtune.search_spaces.offload.states import elixir, l2l, patrickstar, stronghold, zero_infinity
from memtune.ssd import offload_dir
from memtune.technique import Technique
from memtune.testing.training import config_of
from memtune.workload import Workload

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("one_thread")]
FILE = Path(__file__).parents[2] / "support" / "models" / "weights_in_blocks.py"
HERE = torch.device(torch._C._get_privateuse1_backend_name(), 0)
WEIGHTS_BYTES, CAPACITY_BYTES = 12 << 20, 4 << 20
IN_HOST_MEMORY = zero_infinity.ZeroInfinity(parameters="host", optimizer="host")
TECHNIQUES = {
    "l2l": l2l.L2L(),
    "l2l, layer-major": l2l.L2L(order="layer_major"),
    "stronghold": stronghold.Stronghold(window=2),
    "zero_infinity, host": IN_HOST_MEMORY,
    "zero_infinity, ssd": zero_infinity.ZeroInfinity(parameters="ssd", gradients="ssd"),
    "zero_infinity, tiles": zero_infinity.ZeroInfinity(parameters="host", tiles=2),
    "patrickstar": patrickstar.PatrickStar(),
    "elixir": elixir.Elixir(),
}


@pytest.fixture
def small_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))
    gc.collect()  # models of earlier tests, in cycles, would take part of the few MiB
    torch.accelerator.memory.empty_cache()
    memory_statistics.limit(HERE, CAPACITY_BYTES)
    torch.accelerator.memory.reset_peak_memory_stats(HERE)
    yield
    gc.collect()  # a model in cycles keeps its memory on the device
    memory_statistics.limit(HERE, None)


def started(technique: Technique, *, is_deferred: bool) -> Tuned:
    workload, config = Workload.load(FILE), config_of(FILE, technique, device="sim")
    torch.manual_seed(7)
    model = memtune.deferred(workload.build_model) if is_deferred else workload.build_model()
    assert sum(each.nbytes for each in model.parameters()) > WEIGHTS_BYTES
    optimizer = workload.make_optimizer(model)
    return memtune.apply(model, optimizer, config, loss=workload.loss, strict=False, device=HERE)


def steps(tuned: Tuned, numbers: range) -> list[Tensor]:
    workload, losses = Workload.load(FILE), []
    for number in numbers:
        torch.manual_seed(number)
        losses.append(tuned.step([workload.make_batch(2) for _ in range(2)]).cpu())
    return losses


def state_on_cpu(name: str) -> dict[str, Any]:
    """Return the weights of the plain model after three steps; of tiles, those of the same tiles."""
    # Some CPUs sum the products of a tile's rows in another order than those of the whole weight.
    config = config_of(FILE, TECHNIQUES[name], device="cpu") if "tiles" in name else {"settings": {}}
    workload = Workload.load(FILE)
    torch.manual_seed(7)
    model = workload.build_model()
    optimizer = workload.make_optimizer(model)
    tuned = memtune.apply(model, optimizer, config, loss=workload.loss, strict=False)
    steps(tuned, range(3))
    return tuned.state_dict()["model"]


def test_whole_model_does_not_fit(small_device: None) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        Workload.load(FILE).build_model().to(HERE)


@pytest.mark.parametrize("name", TECHNIQUES)
def test_starts_trains_and_resumes(name: str, small_device: None, tmp_path: Path) -> None:
    """Deferred; in the bits of the CPU after three steps, and again after a load into a model from CPU."""
    tuned = started(TECHNIQUES[name], is_deferred=True)
    assert torch.accelerator.memory.max_memory_allocated(HERE) < CAPACITY_BYTES
    steps(tuned, range(3))
    wanted, found = state_on_cpu(name), tuned.state_dict()["model"]
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key].cpu(), each) for key, each in wanted.items())
    tuned.save(tmp_path / "saved")
    went_on = steps(tuned, range(3, 5))
    del tuned, found
    gc.collect()
    again = started(TECHNIQUES[name], is_deferred=False)
    again.load(tmp_path / "saved")
    assert steps(again, range(3, 5)) == went_on
    again.audit()


def trained_on_ranks(states: str, is_deferred: bool, frozen: str) -> tuple[list[float], list[str]]:
    """Return the losses of a rank, and the races; parameters whose name has `frozen` in it are frozen."""
    device = torch.device(HERE.type, dist.get_rank())
    memory_statistics.limit(device, 2 * CAPACITY_BYTES)
    workload = Workload.load(FILE)
    torch.manual_seed(7)
    model = memtune.deferred(workload.build_model) if is_deferred else workload.build_model()
    freeze(model, frozen)
    settings = {"sharding": {"states": {"kind": states}}, "offload": {"states": l2l.L2L().model_dump()}}
    optimizer = workload.make_optimizer(model)
    tuned = memtune.apply(
        model, optimizer, {"settings": settings}, loss=workload.loss, strict=False, device=device
    )
    return [float(loss) for loss in steps(tuned, range(2))], races()


def freeze(model: nn.Module, part: str) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not part or part not in name)


@pytest.mark.parametrize(
    ("states", "is_deferred", "frozen"),
    [("ddp", False, ""), ("ddp", True, ""), ("fsdp", True, ""), ("ddp", False, "bias")],
)
def test_ranks_start_off_the_device(states: str, is_deferred: bool, frozen: str) -> None:
    """Both have the same batches, so their losses are one rank's up to the order of sums."""
    workload = Workload.load(FILE)
    torch.manual_seed(7)
    model = workload.build_model()
    freeze(model, frozen)
    optimizer = workload.make_optimizer(model)
    plain = memtune.apply(model, optimizer, {"settings": {}}, loss=workload.loss)
    wanted = [float(loss) for loss in steps(plain, range(2))]
    for losses, found in run_ranks(trained_on_ranks, 2, states, is_deferred, frozen, device="sim"):
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert found == []


def test_failed_apply_leaves_the_model_on_the_host(
    small_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(context: Any) -> None:
        raise RuntimeError("injected")

    workload = Workload.load(FILE)
    model = workload.build_model()
    wanted = {key: each.clone() for key, each in model.state_dict().items()}
    monkeypatch.setattr("memtune.api.audit", fail)
    with pytest.raises(RuntimeError, match="injected"):
        memtune.apply(
            model,
            workload.make_optimizer(model),
            config_of(FILE, IN_HOST_MEMORY),
            strict=False,
            device=HERE,
        )
    found = model.state_dict()
    assert all(each.device.type == "cpu" for each in found.values())
    assert all(torch.equal(found[key], each) for key, each in wanted.items())
