"""A forward that takes another branch in its second run: right gradients to the bit, or an error that names
the op.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from memtune.api import apply
from memtune.errors import ApplyError
from memtune.search_spaces.recompute.attention_boundary import AttentionBoundary
from memtune.search_spaces.recompute.attention_output import AttentionOutput
from memtune.search_spaces.recompute.balanced import Balanced
from memtune.search_spaces.recompute.checkmate import Checkmate
from memtune.search_spaces.recompute.coop import Coop
from memtune.search_spaces.recompute.dtr import Dtr
from memtune.search_spaces.recompute.every_nth import EveryNth
from memtune.search_spaces.recompute.full import Full
from memtune.search_spaces.recompute.megtaichi import Megtaichi
from memtune.search_spaces.recompute.planned import Planned
from memtune.search_spaces.recompute.selective import Selective
from memtune.technique import Technique
from memtune.testing.drift_check import plain_program, target_of
from memtune.testing.training import SEED, build, config_of, one_step, plain

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn

DIM = 32
OTHER = ""  # the branch that a run inside backward takes; a forward takes the plain one

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.other, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        branch = OTHER if torch._C._current_autograd_node() is not None else ""
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        if branch == "fewer":
            return x
        up = self.other if branch == "weight" else self.up
        y = up((self.n1 if branch == "norm" else self.n2)(x))
        y = y * (3.0 if branch == "factor" else 2.0)
        y = y - 1.0 if branch == "sub" else y + (4.0 if branch == "term" else 1.0)
        y = F.silu(y) if branch == "op" else F.gelu(y, approximate="tanh" if branch == "knob" else "none")
        if branch == "more":
            y = torch.tanh(y)
        return x + self.down(y)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(DIM, 64)

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return self.head(x)

def model():
    return Net()

def batch(size):
    return torch.randn(size, 24, DIM), torch.randint(64, (size, 24))

def loss(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
"""  # noqa: E501
RUN_AGAIN: tuple[Technique, ...] = (
    Full(),
    EveryNth(),
    Selective(),
    AttentionOutput(),
    Balanced(),
    Planned(share=0.0, offload=False, by_schedule=False),
    Planned(share=0.3, by_schedule=False),
)
SCHEDULED: tuple[Technique, ...] = (
    AttentionBoundary(),
    Checkmate(share=0.3),
    Dtr(ratio=0.3),
    Coop(ratio=0.5),
    Megtaichi(ratio=0.5),
    Dtr(ratio=0.8, online=True),
)
BRANCHES = {
    "op": "SiluBackward0",
    "weight": r"other\.weight",
    "norm": r"n1\.bias",
    "factor": "MulBackward0 of 3.0",
    "sub": "SubBackward0",
    "term": "computed other values .* AddBackward0",
    "knob": "GeluBackward0 of tanh",
    "more": "TanhBackward0",
    "fewer": r"without \w+Backward0",
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("branch") / "other_branch.py"
    file.write_text(MODEL)
    return file


def outcome(path: Path, technique: Technique, branch: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the message of one step, "right" if its gradients are those of the plain model."""
    assert technique.fits(plain_program(path), target_of(technique)) is None
    workload, model, optimizer = build(path)
    tuned = apply(model, optimizer, config_of(path, technique), strict=False)
    monkeypatch.setattr(sys.modules[type(model).__module__], "OTHER", branch)
    try:
        _, gradients = one_step(workload, model, optimizer, tuned, seed=SEED + 1, micro_batches=2, size=2)
    except ApplyError as error:
        return f"{error.code} {error}"
    wanted = plain(path).gradients[0]
    alike = gradients.keys() == wanted.keys() and all(
        torch.equal(gradients[name], wanted[name]) for name in wanted
    )
    return "right" if alike else "wrong"


def cases(techniques: tuple[Technique, ...], quick: dict[type[Technique], tuple[str, ...]]) -> list[object]:
    """Return each of `techniques` with each branch; all but the `quick` ones are slow."""
    return [
        pytest.param(
            technique,
            branch,
            id=f"{technique.kind}-{i}-{branch}",
            marks=() if branch in quick.get(type(technique), ()) else pytest.mark.slow,
        )
        for i, technique in enumerate(techniques)
        for branch in BRANCHES
    ]


@pytest.mark.parametrize(
    ("technique", "branch"),
    cases(RUN_AGAIN, {Full: ("op", "weight", "factor", "term", "fewer"), Selective: ("weight",)}),
)
def test_second_run_of_block_names_divergent_op(
    path: Path, technique: Technique, branch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = outcome(path, technique, branch, monkeypatch)
    if not isinstance(technique, Full) and got == "right":
        return  # what it keeps spared it the branch
    assert got.startswith("MT307")
    assert re.search(BRANCHES[branch], got), got


@pytest.mark.parametrize(("technique", "branch"), cases(SCHEDULED, {Dtr: ("op",)}))
def test_schedule_does_not_run_model_code_again(
    path: Path, technique: Technique, branch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert outcome(path, technique, branch, monkeypatch) == "right"


@pytest.mark.parametrize("technique", [Selective()], ids=lambda each: each.kind)
def test_same_branch_gives_right_gradients(
    path: Path, technique: Technique, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert outcome(path, technique, "", monkeypatch) == "right"


def test_number_that_changes_in_later_step_is_detected(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that autograd records distinguishes it, and the two steps before were right."""
    workload, model, optimizer = build(path)
    tuned = apply(model, optimizer, config_of(path, Full()), strict=False)
    for branch in ("", "", "term"):
        monkeypatch.setattr(sys.modules[type(model).__module__], "OTHER", branch)
        if not branch:
            one_step(workload, model, optimizer, tuned, seed=SEED, micro_batches=2, size=2)
    with pytest.raises(ApplyError, match=r"MT307 .* computed other values when it was run again"):
        one_step(workload, model, optimizer, tuned, seed=SEED, micro_batches=2, size=2)


def test_compiled_block_that_diverges_names_torch_compile(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._dynamo.utils

    monkeypatch.setitem(torch._dynamo.utils.counters["frames"], "total", 1)
    try:
        assert "execution: {compile: …} in the config" in outcome(path, RUN_AGAIN[0], "op", monkeypatch)
    finally:
        torch._dynamo.utils.counters.pop("frames")
