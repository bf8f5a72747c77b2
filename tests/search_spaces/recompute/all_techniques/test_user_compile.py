"""The user's own torch.compile over blocks that memtune runs in Python."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memtune.api import apply
from memtune.config import load_config
from memtune.ssd import offload_dir

SETTINGS = {
    "full": "recompute: {kind: full}",
    "selective": "recompute: {kind: selective}",
    "copy_out": "offload: {activations: {kind: copy_out, min_bytes: 128}}",
    "l2l": "offload: {states: {kind: l2l}}",
    "zero_infinity": "offload: {states: {kind: zero_infinity, parameters: ssd}}",
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def trained(settings: str, compiled: str, path: Path) -> list[float]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    if settings:
        path.write_text(f"memtune: 1\nsettings:\n  execution: {{micro_batch: 4}}\n  {SETTINGS[settings]}\n")
        apply(model, optimizer, load_config(path))
    for block in model[:3] if compiled == "blocks" else ():
        block.compile(backend="aot_eager")
    run = torch.compile(model, backend="aot_eager") if compiled == "model" else model
    losses = []
    for step in range(3):
        loss = run(torch.full((4, 32), 0.1 * (step + 1))).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.drawn(5)
@pytest.mark.parametrize("compiled", ["model", "blocks"])
@pytest.mark.parametrize("settings", [*SETTINGS])
def test_user_compile_runs_changed_blocks_between_its_graphs(
    settings: str, compiled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo traced memtune's own code: assertions of torch, or blocks that recompiled until its limit."""
    monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))
    path = tmp_path / "tuned.yaml"
    plain = trained("", "", path)
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert trained(settings, compiled, path) == pytest.approx(plain, rel=1e-5)
    told = [str(each.message) for each in caught if "torch.compile does not compile" in str(each.message)]
    assert len(told) == 1
    assert all("execution: {compile: blocks}" in each for each in told)
