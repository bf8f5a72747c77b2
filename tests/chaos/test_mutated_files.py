"""Random changes of files that others give: they load, or one MemtuneError says why not; no code runs."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from ruamel.yaml import YAML

from memtune.checkpointer.checked_storage import CheckedReader
from memtune.config import load_config
from memtune.errors import MemtuneError
from memtune.safe_pickle import load
from memtune.search_spaces import all_techniques

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


NUMBERS = [True, -1, 0, 1, 2**31, 2**64, -(2**70), 0.5, -0.0, 1e-320, 1e308, float("inf"), float("nan")]
TEXTS = [
    "",
    "none",
    "fsdp",
    "8GiB",
    "-1GiB",
    "1e999",
    "\u2028",
    "h.{0..3}",
    "h.{9..1}",
    "{0..99999999}",
    "../x",
]
GROUPS = [[], {}, [[]], {"kind": None}, {"kind": []}, {"": {}}, ["a"] * 1000]
VALUES: list[Any] = [None, *NUMBERS, *TEXTS, *GROUPS]
"""Values for a key of a config, of other types and beyond all bounds."""
KINDS = [each.model_fields["kind"].default for each in all_techniques()]


def mutated_settings(draw: random.Random) -> bytes:
    """Return `CONFIG`, still YAML, with one to three values or keys changed, moved or left out."""
    config = YAML(typ="safe").load(CONFIG)
    for _ in range(draw.choice((1, 1, 2, 3))):
        node: Any = config
        while True:
            key = draw.choice(list(node))
            if not isinstance(node[key], dict) or not node[key] or draw.random() < 0.2:
                break
            node = node[key]
        match draw.randrange(5):
            case 0:
                del node[key]
            case 1:
                node[draw.choice(["kind", "degree", "n", ""])] = deepcopy(draw.choice(VALUES))
            case 2:
                node[key] = {
                    "kind": draw.choice(KINDS),
                    draw.choice(["n", "degree", "update"]): draw.choice(VALUES),
                }
            case 3:
                node[key] = {"kind": draw.choice(KINDS)}
            case _:
                node[key] = deepcopy(draw.choice(VALUES))
        if not config:
            break
    return json.dumps(config).encode()  # JSON is YAML


def test_mutated_configs_load_or_raise_one_error(tmp_path: Path) -> None:
    draw, file, loaded = random.Random(5 + SEED), tmp_path / "tuned.yaml", 0
    for index in range(150 * SCALE):
        file.write_bytes(mutated(CONFIG, draw) if index % 2 else mutated_settings(draw))
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
