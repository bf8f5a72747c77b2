"""Objects given to memtune.search as a model.py that a fresh process can load."""

from __future__ import annotations

import importlib
import sys
import threading
from pathlib import Path

import pytest
import torch
from support.zoo_paths import ZOO
from torch import nn

from memtune.errors import UsageError
from memtune.executors import probe
from memtune.interactive.objects import workload_of
from memtune.workload import Workload

pytest.importorskip("cloudpickle")
WIDTH = 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.b(self.a(x).relu())


def batch(size):
    return torch.randn(size, WIDTH)


def loss(model, batch):
    assert isinstance(model, Net)
    return model(batch).square().mean()


class Holder:
    model, batch, loss = staticmethod(Net), staticmethod(batch), staticmethod(loss)


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # The classes above are then of a module that no other process can import, as those of a notebook.
    for each in (Net, batch, loss, Holder):
        monkeypatch.setattr(each, "__module__", "__main__")
        monkeypatch.setattr(sys.modules["__main__"], each.__name__, each, raising=False)


@pytest.mark.parametrize(
    ("model", "more"),
    [
        (Net, {"batch": batch, "loss": loss}),
        (lambda: Net(), {"batch": batch, "loss": loss}),
        (Net(), {"batch": torch.randn(3, WIDTH), "loss": loss}),
        (Holder, {}),
        (Holder(), {}),
    ],
    ids=["class", "function", "model and one batch", "holder class", "holder"],
)
def test_workload_of_objects_trains(model, more):
    workload = Workload.load(workload_of(model, **more))
    built, samples = workload.build_model(), workload.make_batch(5)
    assert samples.shape == (5, WIDTH)
    workload.loss(built, samples).backward()
    assert built.a.weight.grad is not None
    assert workload.build_model() is not built


def test_fresh_process_loads_a_model_with_its_weights():
    net = Net()
    path = workload_of(net, batch=batch, loss=loss, optimizer=torch.optim.SGD)
    report = probe(path)
    assert set(report.functions) == {"model", "batch", "loss", "optimizer"}
    assert Path(path).stem == "Net"
    assert torch.equal(Workload.load(path).build_model().a.weight, net.a.weight)
    stored = [each for each in Path(path).parent.iterdir() if each.is_file()]
    assert len(stored) == 3
    assert not any(each.stat().st_mode & 0o077 for each in stored)
    assert workload_of(net, batch=batch, loss=loss, optimizer=torch.optim.SGD) == path
    with torch.no_grad():
        net.a.weight.add_(1)
    assert workload_of(net, batch=batch, loss=loss, optimizer=torch.optim.SGD) != path


def test_module_of_the_user_does_not_answer_imports_of_torch(tmp_path, monkeypatch):
    # torch tries `from cuda.bindings import runtime` before it has all its names.
    (tmp_path / "cuda.py").write_text("from torch import nn")
    monkeypatch.syspath_prepend(tmp_path)
    assert probe(workload_of(Net, batch=batch, loss=loss)).imports_torch


def test_path_and_module_are_the_file_itself(tmp_path, monkeypatch):
    assert workload_of(ZOO["gpt"]) == str(ZOO["gpt"])
    (tmp_path / "my_model.py").write_text(ZOO["gpt"].read_text())
    monkeypatch.syspath_prepend(tmp_path)
    assert workload_of(importlib.import_module("my_model")) == str(tmp_path / "my_model.py")


@pytest.mark.parametrize(
    ("model", "more", "words"),
    [
        (Net, {}, "batch and loss missing"),
        (Net(), {"batch": batch}, "loss missing"),
        (3, {"batch": batch, "loss": loss}, "int, neither a module nor a function"),
        (Net, {"batch": batch, "loss": 3}, "loss is a int, not a function"),
        (Net, {"batch": "text", "loss": loss}, "str without tensors"),
        (Net().to("meta"), {"batch": batch, "loss": loss}, "meta device"),
        ("model.py", {"batch": batch}, "the file has its own"),
        (sys, {}, "has no file"),
    ],
)
def test_unusable_objects_are_one_message(model, more, words):
    with pytest.raises(UsageError, match=words) as caught:
        workload_of(model, **more)
    assert caught.value.fix


def test_object_that_cannot_be_stored_is_named():
    lock = threading.Lock()

    def guarded(size):
        with lock:
            return batch(size)

    with pytest.raises(UsageError, match="batch cannot be sent to the processes") as caught:
        workload_of(Net, batch=guarded, loss=loss)
    assert "inside the function" in caught.value.fix
