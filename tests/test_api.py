"""`apply` refuses a config or model that it was not made for before it changes the model."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memtune import apply
from memtune.autotune.record.recorder import record
from memtune.autotune.space.candidates import Choice, Rewriter
from memtune.config.apply_checks import fingerprint
from memtune.config.tuned_config import MadeFor, TunedConfig
from memtune.errors import ApplyError, ConfigError
from memtune.hardware import cpu_threads, detect
from memtune.program import Program
from memtune.technique import Target
from memtune.workload import Workload


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    return model, torch.optim.SGD(model.parameters(), 0.1)


@pytest.mark.parametrize("strict", [True, False])
def test_apply_refuses_blocks_of_another_model(strict: bool) -> None:
    model, optimizer = built()
    blocks = ["h.{0..3}"] if strict else ["h.0", "h.1"]
    with pytest.raises(ConfigError, match="another model") as caught:
        apply(
            model,
            optimizer,
            TunedConfig(made_for=MadeFor(model="sha256:0", parameters=7, blocks=blocks)),
            strict=strict,
        )
    assert caught.value.code == "MT206"
    assert "7 parameters" in caught.value.evidence
    assert fingerprint(model) in caught.value.evidence
    apply(model, optimizer, {"settings": {}})  # nothing was left behind


def test_second_apply_raises() -> None:
    model, optimizer = built()
    apply(model, optimizer, {"settings": {}})
    with pytest.raises(ApplyError, match="tuned already") as caught:
        apply(model, optimizer, {"settings": {}})
    assert caught.value.code == "MT304"


BOTH = """
import torch
from torch import nn

class Both(torch.optim.Optimizer):
    def __init__(self, params):
        params = list(params)
        super().__init__(params, {})
        half = len(params) // 2
        self.both = [torch.optim.Adam(params[:half]), torch.optim.SGD(params[half:])]

    def step(self):
        for each in self.both:
            each.step()

def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

def batch(size):
    return torch.randn(size, 4)

def loss(model, x):
    return model(x).pow(2).mean()

optimizer = Both
"""
"""Its optimizer steps one for each half of the parameters."""


@pytest.mark.parametrize(
    "settings",
    [
        {"sharding": {"states": {"kind": "fsdp"}}},
        {"offload": {"states": {"kind": "optimizer_cpu"}}},
        {"offload": {"states": {"kind": "zero_infinity", "parameters": "host"}}},
    ],
)
def test_apply_refuses_to_replace_the_parameters_of_optimizers_in_one(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "model.py"
    path.write_text(BOTH)
    file = runpy.run_path(str(path))
    model = file["model"]()
    optimizer = file["optimizer"](model.parameters())
    with pytest.raises(ApplyError, match="the optimizer steps Adam, SGD") as caught:
        apply(model, optimizer, {"settings": settings})
    assert caught.value.code == "MT376"
    apply(model, optimizer, {"settings": {"recompute": {"kind": "full"}}})


def test_search_refuses_to_replace_the_parameters_of_optimizers_in_one(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(BOTH)
    recording = record(Workload.load(path))
    rewriter = Rewriter(recording, Target(detect("cpu"), ranks=2))
    for settings, fits in (
        ({"sharding": {"states": {"kind": "ddp"}}}, True),
        ({"sharding": {"states": {"kind": "zero1"}}}, False),
        ({"sharding": {"states": {"kind": "ddp"}}, "offload": {"states": {"kind": "zero_offload"}}}, False),
    ):
        found = rewriter.program(Choice.from_document({"execution": {"micro_batch": 2}, **settings}))
        assert isinstance(found, Program) is fits
        assert fits or "the optimizer steps Adam, SGD" in str(found)


def _fail(_: object) -> None:
    raise RuntimeError(f"on {torch.get_num_threads()} threads")


@pytest.mark.parametrize("fails", [False, True])
def test_apply_raises_torchruns_one_thread_to_the_ranks_share(monkeypatch, fails: bool) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("memtune.hardware.cpu_cores.usable_cores", lambda: 3)
    model, optimizer = built()
    with cpu_threads(1):
        if fails:
            monkeypatch.setattr("memtune.api.audit", _fail)
            with pytest.raises(RuntimeError, match="on 3 threads"):
                apply(model, optimizer, {"settings": {}})
        else:
            apply(model, optimizer, {"settings": {}})
        assert torch.get_num_threads() == (1 if fails else 3)


class Prepared(torch.optim.Optimizer):
    """A wrapper as Accelerate's: an Optimizer by type, without the state of one."""

    def __init__(self, optimizer: object) -> None:
        self.optimizer = optimizer

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)  # type: ignore[attr-defined]


def test_apply_takes_the_optimizer_out_of_wrappers() -> None:
    model, optimizer = built()
    prepared = Prepared(Prepared(optimizer))
    tuned = apply(model, prepared, {"settings": {"offload": {"states": {"kind": "zero_offload"}}}})
    assert tuned.optimizer is optimizer
    before = model[0].weight.detach().clone()  # type: ignore[index]
    model(torch.ones(2, 4)).sum().backward()
    prepared.step()
    assert not torch.equal(model[0].weight, before)  # type: ignore[index]


def test_apply_refuses_wrapper_of_no_optimizer() -> None:
    model, _ = built()
    with pytest.raises(ApplyError, match="Prepared is not a torch optimizer"):
        apply(model, Prepared(None), {"settings": {}})


def test_audit_refuses_recompute_of_nothing_unless_other_stages_have_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))  # they save their inputs, which others make
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    config = {"settings": {"recompute": {"kind": "full"}}, "made_for": {"blocks": ["0", "1"]}}
    tuned = apply(model, optimizer, config, loss=lambda m, x: m(x).square().mean(), strict=False)
    tuned.step([torch.randn(2, 8)])
    with pytest.raises(ApplyError, match="nothing in them is recomputed"):
        tuned.audit()
    monkeypatch.setattr(tuned._context.placement, "remote_parameters", object())  # of another stage
    assert tuned.audit()["activations"]["recomputed_blocks"] == 2
