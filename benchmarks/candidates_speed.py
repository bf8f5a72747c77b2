"""Candidates rewritten and scored per second: a 24-block GPT, recorded on fake tensors, on one core.

    python benchmarks/candidates_speed.py [--json] [--layers 24] [--ranks 1] [--device cuda] [--without
        planned,tsplit]

Of a space that a search samples, the search's first sample is scored; `--without` omits techniques, for
instance those whose planners solve for every candidate. A candidate is one choice for every slot; candidates
with equal programs (allocator knobs, a degree that is all ranks) share a simulation, so the table also counts
distinct programs. Rates are per CPU second of this process, which other work on the machine does not change;
`seconds` is wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

MODEL = """
import torch, torch.nn.functional as F
from torch import nn
LAYERS, DIM, HEADS, SEQ, VOCAB = {layers}, 256, 4, 128, 1024

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.ln_1(x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.h = nn.Embedding(VOCAB, DIM), nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens)
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))

def model():
    return GPT()

def batch(size):
    tokens = torch.randint(VOCAB, (size, SEQ + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

def loss(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
"""  # noqa: E501


def measure(layers: int, ranks: int, device: str, without: frozenset[str]) -> dict[str, object]:
    """Build the space of the GPT on `ranks` H100 (or CPU processes) and score a search's first candidates
    once each.
    """
    from dataclasses import replace

    import torch

    from memtune import hardware
    from memtune.autotune.record.recorder import record
    from memtune.autotune.space.candidates import Rewriter
    from memtune.autotune.space.scoring import Scorer
    from memtune.autotune.space.search_space import ENUMERATE_UP_TO, SAMPLE, build_space
    from memtune.garbage import rare_collections
    from memtune.technique import Reason, Target
    from memtune.workload.workload import Workload

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gpt.py"
        path.write_text(MODEL.replace("{layers}", str(layers)))
        recording = record(Workload.load(path))
    target = hardware.detect("cpu") if device == "cpu" else hardware.find("h100-80g")
    scorer = Scorer(Rewriter(recording, Target(target, ranks, 80 << 30)))
    space = build_space(scorer.rewriter, 32 * ranks)
    kept = {
        slot: tuple(each for each in techniques if each.kind not in without)
        for slot, techniques in space.slots.items()
    }
    space = replace(space, slots=kept)
    choices = list(space) if space.size <= ENUMERATE_UP_TO else space.sample(SAMPLE, 0)
    scored = refused = 0
    predictions: dict[int, object] = {}  # one object per program
    started, cpu_started = time.perf_counter(), time.process_time()
    with rare_collections():
        for choice in choices:
            found = scorer.score(choice)
            if isinstance(found, Reason):
                refused += 1
            else:
                scored += 1
                predictions[id(found.prediction)] = found.prediction
    cpu_s, seconds = time.process_time() - cpu_started, time.perf_counter() - started
    return {
        "schema": 3,
        "layers": layers,
        "ranks": ranks,
        "device": device,
        "ops": recording.step.ops.n,
        "record_s": round(recording.record_s, 2),
        "without": sorted(without),
        "space": space.size,
        "candidates": scored + refused,
        "refused": refused,
        "programs": len(predictions),
        "passes": scorer.rewriter.n_passes,
        "seconds": round(seconds, 3),
        "cpu_s": round(cpu_s, 3),
        "candidates_per_s": round((scored + refused) / cpu_s),
        "programs_per_s": round(len(predictions) / cpu_s),
        "torch": torch.__version__,
    }


def main() -> None:
    """Print the table, or the numbers with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--without", default="", metavar="KIND,...", help="techniques that are left out")
    asked = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    numbers = measure(asked.layers, asked.ranks, asked.device, frozenset(asked.without.split(",")) - {""})
    if asked.json:
        print(json.dumps(numbers))
        return
    for name, value in numbers.items():
        print(f"{name:18} {value}")


if __name__ == "__main__":
    main()
