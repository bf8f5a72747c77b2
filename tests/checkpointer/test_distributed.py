"""Checkpoints saved under one sharding of the model's state and loaded under another, or without memtune."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.gloo import run_ranks
from support.ranks.data_parallel_steps import SAMPLES, TiedNet, loss
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from memtune.api import Tuned, apply
from memtune.errors import MemtuneError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
STEPS = 2
TWO: dict[str, dict[str, Any]] = {
    "ddp": {"sharding": {"states": {"kind": "ddp"}}},
    "zero1": {"sharding": {"states": {"kind": "zero1"}}},
    "zero2": {"sharding": {"states": {"kind": "zero2"}}},
    "zero3": {"sharding": {"states": {"kind": "zero3"}}},
    "amsp 2,1,2": {"sharding": {"states": {"kind": "amsp", "parameters": 2, "gradients": 1, "optimizer": 2}}},
    "fsdp, host": {
        "sharding": {"states": {"kind": "fsdp"}},
        "offload": {"states": {"kind": "optimizer_cpu"}},
    },
    "zero1, host": {
        "sharding": {"states": {"kind": "zero1"}},
        "offload": {"states": {"kind": "optimizer_cpu"}},
    },
}
FOUR: dict[str, dict[str, Any]] = {
    **{name: TWO[name] for name in ("ddp", "zero1", "zero2", "zero3", "fsdp, host")},
    "fsdp of two": {"sharding": {"states": {"kind": "fsdp", "degree": 2}}},
    "mics": {"sharding": {"states": {"kind": "mics", "group": 2}}},
    "paro IIG": {"sharding": {"states": {"kind": "paro", "strategy": "IIG", "group": 2}}},
    "paro NIG": {"sharding": {"states": {"kind": "paro", "strategy": "NIG", "group": 2}}},
    "paro ING": {"sharding": {"states": {"kind": "paro", "strategy": "ING", "group": 2}}},
    "amsp 2,4,4": {"sharding": {"states": {"kind": "amsp", "parameters": 2, "gradients": 4, "optimizer": 4}}},
}
PAIRS = [
    ("zero3", "zero1"),
    ("zero1", "amsp 2,1,2"),
    ("amsp 2,1,2", "fsdp, host"),
    ("zero1, host", "zero3"),
    ("zero2", "ddp"),
]
_OTHER = {each: (*FOUR,)[(index + 5) % len(FOUR)] for index, each in enumerate(FOUR)}
GRID = list(
    dict.fromkeys(
        [*_OTHER.items(), *zip(*(random.Random(s).choices([*FOUR], k=10) for s in (1, 2)), strict=True)]
    )
)


def batches(step: int) -> list[torch.Tensor]:
    return list(torch.randint(11, (SAMPLES, 5), generator=torch.Generator().manual_seed(step)).chunk(SAMPLES))


def build(seed: int = 3) -> tuple[TiedNet, torch.optim.Optimizer]:
    """Return a model with AdamW in two parameter groups, one without decay."""
    torch.manual_seed(seed)
    model = TiedNet()
    rest = [p for name, p in model.named_parameters() if p.requires_grad and name != "scale"]
    return model, torch.optim.AdamW(
        [{"params": rest}, {"params": [model.scale], "weight_decay": 0.0}], lr=0.05
    )


def tuned(settings: dict[str, Any], seed: int = 3) -> Tuned:
    return apply(*build(seed), {"settings": settings}, loss=loss, strict=False)


def train(found: Tuned, first: int) -> list[float]:
    """Return mean losses over all ranks of `STEPS` steps of two micro-batches."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    losses = []
    for step in range(first, first + STEPS):
        mine = torch.cat(batches(step)[rank * SAMPLES // ranks : (rank + 1) * SAMPLES // ranks])
        value = found.step(mine.chunk(2))
        if ranks > 1:
            dist.all_reduce(value)
        losses.append(float(value) / ranks)
    return losses


def plain_train(model: TiedNet, optimizer: torch.optim.Optimizer, first: int) -> list[float]:
    losses = []
    for step in range(first, first + STEPS):
        value = loss(model, torch.cat(batches(step)))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(value.detach()))
    return losses


@pytest.fixture(scope="module")
def wanted() -> list[float]:
    """Return the losses of an uninterrupted run."""
    model, optimizer = build()
    return plain_train(model, optimizer, 0) + plain_train(model, optimizer, STEPS)


# -- functions that run on each rank -------------------------------------------------------------------------


def saved(folder: str, kinds: dict[str, Any]) -> dict[str, Any]:
    """Train under each kind and save to a folder of its name; return what each rank wrote."""
    out: dict[str, Any] = {}
    for name, settings in kinds.items():
        found = tuned(settings)
        train(found, 0)
        found.save(f"{folder}/{name}")
        found.export(f"{folder}/{name}.safetensors")
        out[name] = found.state_dict()
    return out


def resumed(folder: str, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    found = tuned(settings, seed=7)
    found.load(f"{folder}/{name}")
    return {
        "losses": train(found, STEPS),
        "audit": found.audit(),
        "lr": found.optimizer.param_groups[1]["weight_decay"],
    }


def resumed_from_whole(state: dict[str, Any], settings: dict[str, Any]) -> list[float]:
    found = tuned(settings, seed=7)
    found.load_state_dict(state)
    return train(found, STEPS)


def refused(folder: str) -> list[str]:
    """Return the errors for checkpoints of another model, of other groups, and for none; the weights must not
    change.
    """
    found = tuned(TWO["zero3"])
    before = {name: value.full_tensor().clone() for name, value in found.model.state_dict().items()}
    said = []
    for each in ("wider", "one group", "nothing"):
        try:
            found.load(f"{folder}/{each}")
        except MemtuneError as error:
            said.append(str(error))
    assert all(
        torch.equal(value.full_tensor(), before[name]) for name, value in found.model.state_dict().items()
    )
    return said


def everything(folder: str) -> dict[str, Any]:
    state = saved(folder, {name: settings for name, settings in TWO.items() if name in dict(PAIRS)})
    return {
        "state": state,
        "pairs": {(a, b): resumed(folder, a, TWO[b]) for a, b in PAIRS},
        "plain": {name: resumed(folder, "plain", TWO[name]) for name in ("zero3", "zero1, host")},
        "whole": {
            name: resumed_from_whole(state["zero1"], TWO[name])
            for name in ("zero3", "amsp 2,1,2", "zero1, host")
        },
        "refused": refused(folder),
    }


# -- tests ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with checkpoints of each kind, of a script without memtune, and of unfit ones."""
    found = tmp_path_factory.mktemp("checkpoints")
    write_plain(found / "plain", *build())
    wider, _ = build()
    wider.scale = torch.nn.Parameter(torch.ones(1, 7))
    write_plain(found / "wider", wider, torch.optim.AdamW(wider.parameters()), steps=False)
    model, _ = build()
    write_plain(
        found / "one group", model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    )
    return found


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(everything, 2, str(folder), deadline_s=900)


def write_plain(
    folder: Path, model: TiedNet, optimizer: torch.optim.Optimizer, *, steps: bool = True
) -> None:
    if steps:
        plain_train(model, optimizer, 0)
    state, optim = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optim": optim}, checkpoint_id=str(folder), no_dist=True)


def plain_resumed(folder: Path) -> list[float]:
    """Return the losses of a script without memtune that resumes."""
    model, optimizer = build(seed=7)
    state, optim = get_state_dict(model, optimizer)
    whole = {"model": state, "optim": optim}
    dcp.load(whole, checkpoint_id=str(folder), no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=whole["model"], optim_state_dict=whole["optim"])
    return plain_train(model, optimizer, STEPS)


def close(got: list[float], wanted: list[float]) -> None:
    assert got == pytest.approx(wanted[STEPS:], rel=1e-6)


@pytest.mark.parametrize("pair", PAIRS, ids=" → ".join)
def test_load_under_another_sharding_continues_training(
    ranks: list[Any], wanted: list[float], pair: tuple[str, str]
) -> None:
    for rank in ranks:
        close(rank["pairs"][pair]["losses"], wanted)
        assert rank["pairs"][pair]["lr"] == 0.0


@pytest.mark.parametrize("name", dict(PAIRS))
def test_checkpoint_loads_without_memtune(
    ranks: list[Any], wanted: list[float], folder: Path, name: str
) -> None:
    close(plain_resumed(folder / name), wanted)


def test_load_reads_checkpoints_of_plain_scripts(ranks: list[Any], wanted: list[float]) -> None:
    for rank in ranks:
        for run in rank["plain"].values():
            close(run["losses"], wanted)


def test_load_state_dict_continues_training(ranks: list[Any], wanted: list[float]) -> None:
    for rank in ranks:
        for losses in rank["whole"].values():
            close(losses, wanted)


@pytest.mark.parametrize("kind", ["none", "optimizer_cpu", "zero_infinity"])
def test_one_process_loads_a_checkpoint_of_several(
    ranks: list[Any],
    wanted: list[float],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    monkeypatch.setenv("MEMTUNE_OFFLOAD_DIR", str(tmp_path))
    settings = {"offload": {"states": {"kind": kind}}}
    found = tuned(settings, seed=7)
    found.load(folder / "zero3")
    close(train(found, STEPS), wanted)
    assert found.audit()
    other = tuned(settings, seed=8)
    other.load_state_dict(copy.deepcopy(ranks[0]["state"]["zero2"]))
    other.save(tmp_path / "again")
    close(train(other, STEPS), wanted)
    close(plain_resumed(tmp_path / "again"), wanted)


def test_ranks_write_only_their_parts(ranks: list[Any], folder: Path) -> None:
    for name, divided in (("zero3", ("model.", "optim.")), ("zero1", ("optim.",)), ("plain", ())):
        for key, found in dcp.FileSystemReader(folder / name).read_metadata().state_dict_metadata.items():
            if not isinstance(found, TensorStorageMetadata) or not found.size:
                continue
            half = -(-found.size[0] // 2)
            rows = [half, found.size[0] - half] if key.startswith(divided) else [found.size[0]]
            assert sorted(chunk.sizes[0] for chunk in found.chunks if chunk.sizes[0]) == sorted(
                row for row in rows if row
            ), (
                name,
                key,
            )


def test_exported_weights_equal_the_state_dict(ranks: list[Any], folder: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    for name in dict(PAIRS):
        found = safetensors.load_file(folder / f"{name}.safetensors")
        weights = ranks[0]["state"][name]["model"]
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[key], value) for key, value in weights.items())


def test_unfit_checkpoint_raises_before_any_change(ranks: list[Any]) -> None:
    for rank in ranks:
        wider, groups, nothing = rank["refused"]
        assert "MT371" in wider
        assert "scale has shape (1, 6) here and (1, 7) there" in wider
        assert "MT371" in groups
        assert "parameter groups differ" in groups
        assert "MT373" in nothing


def test_failed_export_leaves_the_file_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    file.write_bytes(b"before")
    found = tuned({})
    found.model.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
    with pytest.raises(MemtuneError, match=r"MT375(.|\n)*complex64(.|\n)*tuned\.save"):
        found.export(file)
    assert file.read_bytes() == b"before"
    assert [each.name for each in tmp_path.iterdir()] == [file.name]


# -- all shardings -------------------------------------------------------------------------------------------


def the_grid(folder: str) -> dict[str, Any]:
    saved(folder, FOUR)
    return {
        "pairs": {(a, b): resumed(folder, a, FOUR[b])["losses"] for a, b in GRID},
        "plain": {name: resumed(folder, "plain", FOUR[name])["losses"] for name in FOUR},
    }


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_load_under_every_sharding_continues_training(folder: Path, wanted: list[float]) -> None:
    found = run_ranks(the_grid, 4, str(folder), deadline_s=3500)
    assert len(GRID) >= len(FOUR) + 8
    for rank in found:
        for losses in (*rank["pairs"].values(), *rank["plain"].values()):
            close(losses, wanted)
    for name in FOUR:
        close(plain_resumed(folder / name), wanted)
