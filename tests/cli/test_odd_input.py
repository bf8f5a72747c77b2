"""`memtune plan` on odd input: unknown hardware, nodes that do not divide, tensors of no size, a model of one
op.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memtune import cli

HEAD = "import torch\nfrom torch import nn\n"
NO_SIZE = (
    HEAD + "def model(): return nn.Linear(8, 8)\ndef batch(size): return torch.randn(size, 0, 8)\n"
    "def loss(model, batch): return model(batch).sum()\n"
)
ONE_OP = (
    HEAD + "class M(nn.Module):\n    def __init__(self):\n        super().__init__(); self.w ="
    " nn.Parameter(torch.ones(4))\n    def forward(self, x): return self.w.sum()\ndef model(): return"
    " M()\ndef batch(size): return torch.randn(size, 4)\ndef loss(model, batch): return model(batch)\n"
)


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["--gpu-type", "h100-81g"], "MT208", "use h100-80g"),
        (["--gpu-type", "h100-80g", "--gpus", "8", "--nodes", "3"], "MT124", "--gpus 6"),
    ],
)
def test_unavailable_machine_is_one_message(
    more: list[str], code: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(ONE_OP)
    assert cli.run(["plan", str(tmp_path / "model.py"), *more]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert code in said.err
    assert words in said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize("text", [NO_SIZE, ONE_OP], ids=["no size", "one op"])
def test_plan_accepts_tiny_models(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(text)
    line = [
        "plan",
        str(tmp_path / "model.py"),
        "--gpu-type",
        "h100-80g",
        "--axes",
        "recompute",
        "--global-batch",
        "4",
        "--json",
    ]
    assert cli.run(line) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["front"][0]["peak_allocated_bytes"] >= 16
