"""Freed host memory stays in the process."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import memtune
from memtune.device import keep_freed_pages

_STEPS = """
import resource, torch
from memtune.device import keep_freed_pages
torch.set_num_threads(1)

def faults(mib):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(mib * 2**18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults(64)
returned = faults(64)
keep_freed_pages()
# Small blocks between the first tensors may move one to fresh pages.
kept = min(faults(64) for _ in range(4))
print(returned, kept)
"""


@pytest.mark.skipif(not keep_freed_pages(), reason="the C library has no mallopt")
def test_keep_freed_pages_reuses_the_pages_of_freed_tensors() -> None:
    done = subprocess.run([sys.executable, "-c", _STEPS], capture_output=True, text=True, check=True)
    returned, kept = map(int, done.stdout.split())
    # Four tensors of 64 MiB are 65,536 pages of 4 KiB; a system with large pages faults less often.
    assert returned > 50 * max(kept, 1)


def test_apply_keeps_freed_pages_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setattr("memtune.api.keep_freed_pages", lambda: calls.append(None))
    model = nn.Linear(2, 2)
    memtune.apply(model, torch.optim.AdamW(model.parameters()), {"settings": {}})
    assert len(calls) == 1
