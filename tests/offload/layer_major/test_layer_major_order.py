"""Layer-major order: models that are refused, loops of the user's own, evaluation and checkpoints."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
from support.suites.layer_major_suite import CHAIN, config, in_place, trained
from support.zoo_paths import ZOO
from torch import Tensor, nn

from memtune.api import Tuned, apply
from memtune.errors import ApplyError
from memtune.search_spaces.offload.states.harmony import Harmony
from memtune.testing import differences
from memtune.testing.training import build

pytestmark = pytest.mark.usefixtures("one_thread")
PLAN = {"offload.states": {"forward": [[0, 1]], "backward": [[0, 1], [1, 3]], "swapped_bytes": 0}}


class Net(nn.Module):
    """Three blocks between an embedding and a head; `between` runs after each block but the last."""

    def __init__(
        self, block: Callable[[], nn.Module], between: Callable[[Tensor], Tensor], skip: bool = False
    ) -> None:
        super().__init__()
        self.inp, self.blocks, self.out = (
            nn.Linear(4, 4),
            nn.ModuleList(block() for _ in range(3)),
            nn.Linear(4, 1),
        )
        self.between, self.skip = between, skip

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.inp(x)
        seen = []
        for block in self.blocks:
            x = self.between(block(x))
            seen.append(x)
        made: Tensor = self.out(x + first if self.skip else x + seen[0] if self.between is _look_back else x)
        return made


def _look_back(x: Tensor) -> Tensor:
    return x


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.fc(x) + torch.rand(())
        return made


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x *= 2
        made: Tensor = self.fc(x)
        return made


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def tuned(net: nn.Module) -> Tuned:
    optimizer = torch.optim.AdamW(net.parameters())
    settings = {"offload": {"states": {"kind": "harmony"}}}
    return apply(
        net,
        optimizer,
        {"settings": settings, "plan": PLAN},
        loss=lambda model, x: model(x).sum(),
        strict=False,
    )


@pytest.mark.parametrize(
    ("net", "why"),
    [
        (lambda: Net(block, lambda x: x + 1), "aten.add.Tensor uses the output of blocks.0 outside"),
        (lambda: Net(Noisy, lambda x: x), "draws random numbers"),
        (lambda: Net(InPlace, lambda x: x), "changes its argument in place"),
        (lambda: Net(block, _look_back), "uses the output of blocks.0 outside"),
        (lambda: Net(block, lambda x: x, skip=True), "(inp|made).* before the blocks"),
        (
            lambda: Net(lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)), lambda x: x),
            r"dropout \(blocks.0.1\)",
        ),
        (
            lambda: Net(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), lambda x: x),
            "blocks.0.1 updates its",
        ),
    ],
    ids=["between", "noisy", "in_place", "look_back", "skip", "dropout", "batch_norm"],
)
def test_layer_major_refuses_blocks_that_are_no_chain(net: Callable[[], nn.Module], why: str) -> None:
    """The error at `apply` or in the first step names the module or op."""
    model = net()
    with pytest.raises(ApplyError, match="one after the other") as caught:
        tuned(model).step([torch.randn(3, 4) for _ in range(2)])
    assert re.search(why, str(caught.value), re.IGNORECASE), caught.value


def test_layer_major_runs_plain_blocks() -> None:
    run = tuned(Net(block, lambda x: x))
    run.step([torch.randn(3, 4) for _ in range(2)])
    assert run.audit()


def test_layer_major_allows_evaluation_and_checkpoints_but_no_user_loop() -> None:
    """Outside of a step blocks are loaded one by one; a forward that records for backward is refused."""
    technique = Harmony(kind="harmony", backward=2)
    workload, model, optimizer = build(CHAIN)
    run = apply(model, optimizer, config(technique, 2), loss=workload.loss)
    batches = [workload.make_batch(2) for _ in range(2)]
    run.step(batches)
    with torch.no_grad():
        before = workload.loss(model, batches[0])
    with pytest.raises(ApplyError, match="has all micro-batches"):
        workload.loss(model, batches[0])
    with pytest.raises(ApplyError, match="has all micro-batches"), run.micro_batch(last=True):
        pass
    state = copy.deepcopy(run.state_dict())
    _, plain, _ = build(CHAIN)
    plain.load_state_dict(state["model"])
    assert torch.equal(workload.loss(plain, batches[0]).detach(), before)
    run.step(batches)
    run.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(workload.loss(model, batches[0]), before)


@pytest.mark.parametrize("model", ["autocast", pytest.param("hf_llama", marks=pytest.mark.slow)])
def test_packs_run_under_the_autocast_and_arguments_of_the_user(model: str) -> None:
    """Autocast is on in packs as in the user's code, and arguments of Hugging Face's blocks reach them."""
    technique = Harmony(kind="harmony", backward=1)
    assert not differences(trained(technique, 2, 2, ZOO[model]), in_place(2, 2, ZOO[model]))
