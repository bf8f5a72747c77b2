"""Random changes of files that others give: they load, or one MemtuneError says why not; no code runs."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from memtune.checkpointer.checked_storage import CheckedReader
from memtune.config import load_config
from memtune.errors import MemtuneError
from memtune.safe_pickle import load

SCALE = int(os.environ.get("MEMTUNE_CHAOS", "1"))
SEED = int(os.environ.get("MEMTUNE_SEED", "0"))
"""Other cases for each: a long run may be cut into several."""
CONFIG = b"""memtune: 1
settings:
  execution: {micro_batch: 8, accumulate: 4, order: {kind: program}, compile: false}
  recompute: {kind: every_nth, n: 3}
  split: {kind: tiled, mlp: 2}
  sharding:
    states: {kind: fsdp, degree: 8}
  offload:
    states: {kind: zero_infinity, parameters: ssd}
    activations: {kind: copy_out, target: cpu, ratio: 0.5}
  allocator: {kind: expandable_segments}
measured: {peak_bytes: 123, step_s: 1.5e-3}
"""
LONG = [b"0x" + b"f" * 6000, b"9" * 5000, b"1e999"]
MARKS = [b"[", b"{", b": ", b"- ", b"\n", b"\t", b"'", b"&a", b"*a", b"\x00", b"\xff", b"\xe2\x80\xa8"]
WORDS = [*LONG, *MARKS, b".nan", b"null", b"true", b"-1", b"{kind: dtr}", b"kind", b"!!python/name:os.system"]
SNAPSHOT = {
    "segments": [{"address": 1 << 40, "total_size": 2 << 20, "stream": 0, "blocks": [{"size": 512}]}],
    "device_traces": [[{"action": "alloc", "addr": 1 << 40, "size": 512, "stream": 0, "frames": []}]],
}


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Return `data` with one to four random changes: bytes flipped, cut, doubled, or words inserted."""
    for _ in range(draw.choice((1, 1, 2, 4))):
        at, end = sorted(draw.randrange(len(data) + 1) for _ in range(2))
        match draw.randrange(4):
            case 0:
                data = data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
            case 1:
                data = data[:at] + data[min(end, at + 30) :]
            case 2:
                data = data[:end] + data[at:]
            case _:
                data = data[:at] + draw.choice(WORDS) + data[min(end, at + 8) :]
    return data


def test_mutated_configs_load_or_raise_one_error(tmp_path: Path) -> None:
    draw, file, loaded = random.Random(5 + SEED), tmp_path / "tuned.yaml", 0
    for _ in range(150 * SCALE):
        file.write_bytes(mutated(CONFIG, draw))
        with contextlib.suppress(MemtuneError):
            load_config(file)
            loaded += 1
    print(f"{150 * SCALE} mutated configs: {loaded} loaded, 0 foreign exceptions")


def test_mutated_snapshots_load_or_raise_one_error() -> None:
    draw, whole = random.Random(6 + SEED), [pickle.dumps(SNAPSHOT, protocol=each) for each in (2, 4)]
    for index in range(500 * SCALE):
        with contextlib.suppress(MemtuneError):
            load(mutated(whole[index % 2], draw), "snapshot", fix="write it again")
    print(f"{500 * SCALE} mutated snapshots: 0 foreign exceptions")


def test_mutated_checkpoints_load_or_raise_one_error(tmp_path: Path) -> None:
    """Without checksums, as other scripts write them."""
    dcp.save({"model": {"weight": torch.ones(3, 4)}, "lr": 0.1}, checkpoint_id=str(tmp_path), no_dist=True)
    draw, file = random.Random(7 + SEED), tmp_path / ".metadata"
    whole = file.read_bytes()
    for _ in range(300 * SCALE):
        file.write_bytes(mutated(whole, draw))
        with contextlib.suppress(MemtuneError):
            CheckedReader(tmp_path)
    print(f"{300 * SCALE} mutated checkpoints: 0 foreign exceptions")
