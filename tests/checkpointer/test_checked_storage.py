"""A checkpoint is data: no byte of it is trusted, and none of it is run."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.gloo import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from memtune.api import Tuned, apply
from memtune.errors import MemtuneError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Touch:
    """A value whose unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def tuned(seed: int, settings: dict[str, Any] | None = None) -> Tuned:
    return apply(*build(seed), {"settings": settings or {}}, strict=False)


def weights(found: Tuned) -> list[torch.Tensor]:
    return [value.clone() for value in found.model.state_dict().values()]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    tuned(1).save(folder)
    return folder


def write_plain(folder: Path, **more: Any) -> None:
    model, optimizer = build(1)
    state, optim = get_state_dict(model, optimizer)
    optim["param_groups"][0].update(more)
    dcp.save({"model": state, "optim": optim}, checkpoint_id=str(folder), no_dist=True)


def damage(folder: Path, file: str, at: int, mask: int) -> None:
    data = bytearray((folder / file).read_bytes())
    data[at] ^= mask
    (folder / file).write_bytes(data)


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_load_detects_every_drawn_flip(checkpoint: Path, tmp_path: Path, file: str) -> None:
    found, draw = tuned(2), random.Random(4)
    before = weights(found)
    size = (checkpoint / file).stat().st_size
    folder = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    for at in {0, size - 1, *draw.sample(range(size), 60)}:
        mask = 1 << draw.randrange(8)
        damage(folder, file, at, mask)
        with pytest.raises(MemtuneError) as error:
            found.load(folder)
        assert error.value.code == "MT373", at
        damage(folder, file, at, mask)
        if file == ".metadata":
            assert all(map(torch.equal, weights(found), before))
    found.load(folder)
    assert all(map(torch.equal, weights(found), weights(tuned(1))))


def test_load_detects_every_truncation(checkpoint: Path, tmp_path: Path) -> None:
    found = tuned(2)
    before = weights(found)
    folder = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    for name, cuts in ((".metadata", range(1, 60)), ("__0_0.distcp", (1, 500, 20_000))):
        whole = (folder / name).read_bytes()
        for cut in cuts:
            (folder / name).write_bytes(whole[:-cut])
            with pytest.raises(MemtuneError, match=r"MT373|MT141"):
                found.load(folder)
        (folder / name).write_bytes(whole)
    assert all(map(torch.equal, weights(found), before))


@pytest.mark.parametrize("where", ["metadata", "value"])
def test_load_runs_no_code(tmp_path: Path, where: str) -> None:
    folder, mark = tmp_path / "checkpoint", tmp_path / "ran"
    write_plain(folder, **({"lr": Touch(mark)} if where == "value" else {}))
    if where == "metadata":
        (folder / ".metadata").write_bytes(pickle.dumps(Touch(mark)))
    with pytest.raises(MemtuneError, match="MT142" if where == "metadata" else "MT373"):
        tuned(2).load(folder)
    assert not mark.exists()


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "a/../b", ".."])
def test_load_refuses_files_outside_of_the_folder(tmp_path: Path, path: str) -> None:
    folder = tmp_path / "checkpoint"
    write_plain(folder)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    for each in metadata.storage_data.values():
        each.relative_path = path
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(MemtuneError, match="is no file of this folder"):
        tuned(2).load(folder)


def test_load_refuses_sizes_beyond_what_is_stored(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    write_plain(folder)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    state: Any = metadata.state_dict_metadata["optim.state.0.weight.exp_avg"]
    state.size, state.chunks = torch.Size([2**40]), []
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(MemtuneError, match=f"has {2**42} bytes"):
        tuned(2).load(folder)


def damaged_on_one_rank(folder: str) -> str:
    """Return the error of loading a checkpoint in which one item of rank 1 is damaged."""
    settings = {"sharding": {"states": {"kind": "zero3"}}}
    tuned(1, settings).save(folder)
    if dist.get_rank() == 0:
        path = Path(folder, "__1_0.distcp")
        damage(path.parent, path.name, path.stat().st_size - 700, 1)
    dist.barrier()
    try:
        tuned(2, settings).load(folder)
    except MemtuneError as error:
        return str(error)
    return ""


def test_load_raises_on_all_ranks_if_one_finds_damage(tmp_path: Path) -> None:
    said = run_ranks(damaged_on_one_rank, 2, str(tmp_path / "checkpoint"))
    assert said[0] == said[1]
    assert "in __1_0.distcp has the checksum" in said[0]
