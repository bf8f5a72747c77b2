"""memtune init: the written file trains, its guesses are marked, its errors are one message."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from pathlib import Path

import pytest
import torch

from memtune import cli
from memtune.errors import EnvironmentFault, MemtuneError, UsageError
from memtune.scaffold.draft import MARK
from memtune.scaffold.hub_model import hub_draft, is_hub_target
from memtune.scaffold.model_writer import write_model_file
from memtune.scaffold.python_model import python_draft
from memtune.workload import Workload

EXAMPLES = Path(__file__).parents[2] / "examples"
NETS = """
import torch
from torch import nn
from .parts import Block
import constants  # a neighbour, by its bare name

class GPT(nn.Module):
    def __init__(self, vocab_size, width=16, block_size=12):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, width), nn.Embedding(block_size, width)
        self.h, self.head = nn.ModuleList(Block(width) for _ in range(2)), nn.Linear(width, vocab_size)
    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe.weight[: idx.shape[1]]
        for each in self.h:
            x = each(x)
        logits = self.head(x)
        if targets is None:
            return logits, None
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""
PARTS = "from torch.nn import Linear\nclass Block(Linear):\n  def __init__(s, d): super().__init__(d, d)"
OTHERS = """
import torch
from torch import nn

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 10)
    def forward(self, images):
        return self.head(self.stem(images).mean((2, 3)))

class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.times = nn.Conv2d(3, 3, 3, padding=1), nn.Embedding(1000, 3)
    def forward(self, x, timestep):
        return self.conv(x) + self.times(timestep)[:, :, None, None]

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(50, 8), nn.Linear(8, 5)
    def forward(self, words):
        return self.head(self.words(words))

class Needy(nn.Module):
    def __init__(self, strategy): super().__init__()

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
    def forward(self, graph): return self.layer(graph.nodes)

def build(): return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))
def number(): return 3
made = nn.Linear(2, 2)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    before = set(sys.modules)
    (tmp_path / "project").mkdir()
    for name, text in {
        "__init__": "",
        "parts": PARTS,
        "constants": "",
        "nets": NETS,
    }.items():
        (tmp_path / "project" / f"{name}.py").write_text(text)
    (tmp_path / "others.py").write_text(OTHERS)
    importlib.invalidate_caches()
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("project", "others", "parts", "constants", "vit"):
            del sys.modules[name]


def trained(text: str) -> Workload:
    """Write a file, check it and train one step of it."""
    Path("model.py").write_text(text)
    workload = Workload.load("model.py")
    workload.check_batch()
    model = workload.build_model()
    optimizer = workload.make_optimizer(model)
    workload.loss(model, workload.make_batch(2)).backward()
    optimizer.step()
    return workload


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (
            "project.nets:GPT",
            ["VOCAB_SIZE = 1000  # CHECK", "torch.randint(1000, (size, 12))", "targets=targets", "output[1]"],
        ),
        ("project/nets.py", ["idx, targets = batch", "from project.nets import GPT"]),
        ("project.nets", ["idx, targets = batch", "from project.nets import GPT"]),
        ("others.Classifier", ["images = torch.randn(size, 3, 224, 224)", "torch.randint(10, (size,))"]),
        ("others:Denoiser", ["timestep = torch.randint(1000, (size,))", "square().mean()"]),
        ("others.py:Tagger", ["torch.randint(5, (size, 128))", "flatten(0, 1)"]),
        ("others:build", ["return build()", "torch.randn(size, 6)"]),
        pytest.param(
            f"{EXAMPLES / 'vit.py'}:model",
            ["from vit import model as build_model", "return build_model()"],
            id="vit.py:model",
        ),
    ],
)
def test_own_code_becomes_a_file_that_trains(target, words, folder, capfd):
    text = python_draft(target, Path("model.py")).text("model.py")
    assert [each for each in words if each not in text] == []
    assert f"{MARK} shape and values" in text
    assert capfd.readouterr().err == ""  # of guesses that failed on fake tensors
    trained(text)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nothing.here:Net", "cannot be imported"),
        ("others:Nets", "It has: Classifier, Denoiser"),
        ("others", "5 classes that could be the model"),
        ("others:Needy", "needs strategy, which memtune init cannot guess"),
        ("others:Odd", "No input was found that Odd.forward"),
        ("others:number", "returned a int"),
        ("others:made", "exists already"),
        ("missing.py:Net", "no file missing.py"),
    ],
)
def test_unusable_target_is_one_message(target, words, folder):
    with pytest.raises(UsageError) as caught:
        python_draft(target, Path("model.py"))
    assert words in str(caught.value)
    assert caught.value.fix


def test_misspelt_class_is_answered_with_the_nearest(folder):
    with pytest.raises(UsageError) as caught:
        python_draft("others:Denoisr", Path("model.py"))
    assert caught.value.fix == "memtune init others:Denoiser"


def test_file_in_another_folder_finds_the_package_of_the_current_one(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("other") / "model.py"
    out.write_text(python_draft("project.nets:GPT", out).text(str(out)))
    sys.path[:] = [each for each in sys.path if each != str(folder)]
    for name in [each for each in sys.modules if each.startswith("project")]:
        del sys.modules[name]
    assert Workload.load(str(out)).build_model() is not None


SMALL = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {
                **SMALL,
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "max_position_embeddings": 24,
            },
            ["LlamaForCausalLM(config)", "SEQ = 24  # CHECK", "VOCAB = 60", "'hidden_size': 16"],
        ),
        ({**SMALL, "model_type": "bert"}, ["BertForMaskedLM(config)  # CHECK: the config names no class"]),
        (
            {**SMALL, "model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 32},
            ["IMAGE = 32", '"pixel_values": images'],
        ),
        (
            {
                "model_type": "whisper",
                "architectures": ["WhisperForConditionalGeneration"],
                **{"vocab_size": 60, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1},
                **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 8},
                **{"max_source_positions": 20, "max_target_positions": 12, "pad_token_id": 0},
                **{"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3},
            },
            [
                "SEQ = 12  # CHECK",
                "MEL = 8",
                "FRAMES = 40",
                '"input_features": torch.randn(size, MEL, FRAMES)',
            ],
        ),
    ],
    ids=lambda each: each["model_type"] if isinstance(each, dict) else "",
)
def test_hugging_face_config_becomes_a_file_that_trains_without_network(config, words, folder):
    pytest.importorskip("transformers")
    (folder / "config.json").write_text(json.dumps(config))
    assert is_hub_target("config.json")
    text = hub_draft("config.json").text("model.py")
    assert [each for each in words if each not in text] == []
    with torch.random.fork_rng():
        trained(text)


@pytest.mark.parametrize(
    ("target", "kind", "words"),
    [
        (
            "someone/model",
            EnvironmentFault,
            "not in the cache and cannot be downloaded (HF_HUB_OFFLINE is set)",
        ),
        ("config.json", UsageError, "no config that transformers"),
        ("LlamaForSpeaking", None, ""),
        ("folder/nets.py:GPT", None, ""),
    ],
)
def test_unusable_hub_target_is_one_message(target, kind, words, folder):
    pytest.importorskip("transformers")
    (folder / "config.json").write_text('{"model_type": "of the future"}')
    assert is_hub_target(target) is (kind is not None)
    if kind is not None:
        with pytest.raises(kind) as caught:
            hub_draft(target)
        assert words in str(caught.value)
        assert isinstance(caught.value, MemtuneError)


def test_failed_download_prints_no_retries_and_resets_the_log(monkeypatch, caplog):
    transformers = pytest.importorskip("transformers")
    log = logging.getLogger("huggingface_hub.utils")

    def unreachable(name: str) -> None:
        log.warning("Retrying in 1s [Retry 1/5].")
        raise OSError("no network")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    before = log.getEffectiveLevel()
    with pytest.raises(EnvironmentFault, match="cannot be downloaded"):
        hub_draft("someone/model")
    assert caplog.text == ""
    assert log.getEffectiveLevel() == before


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("LlamaForCausalLMM", "LlamaForCausalLM"),
        ("brt", "bert"),
        ("notes.txt", "neither a Python file nor a config.json"),
    ],
)
def test_mistyped_name_is_one_message_with_the_nearest(target, words, folder):
    pytest.importorskip("transformers")
    (folder / "notes.txt").touch()
    with pytest.raises(UsageError) as caught:
        write_model_file(target, folder / "model.py")
    assert words in str(caught.value)
    assert not (folder / "model.py").exists()


def test_package_without_a_model_names_its_modules(tmp_path, monkeypatch):
    (tmp_path / "empty_package").mkdir()
    for name in ("__init__", "nets"):
        (tmp_path / "empty_package" / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError) as caught:
        python_draft("empty_package", tmp_path / "model.py")
    assert "Its modules: nets." in caught.value.evidence
    assert caught.value.fix == "memtune init empty_package.nets:Name"


@pytest.mark.parametrize("line", [["", "--out", "m.py"], ["bert", "--out", "/nonexistent/m.py"]])
def test_init_checks_its_arguments_before_torch_loads(line, capsys):
    assert cli.run(["init", *line]) in (2, 3)
    said = capsys.readouterr().err
    assert "loading" not in said
    assert "Fix:" in said


def test_class_of_transformers_without_transformers_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(EnvironmentFault, match="transformers is needed"):
        is_hub_target("LlamaForCausalLM")
    assert not is_hub_target("build")


def test_init_writes_checks_and_lists_the_guesses(folder, capsys):
    assert cli.run(["init", "others:build", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["parameters"] == 49
    assert all(MARK in each for each in document["checks"])
    lines = Path("model.py").read_text().splitlines()
    assert all(lines[int(each.partition(":")[0]) - 1].strip() in each for each in document["checks"])
    assert cli.run(["init", "others:build"]) == 2
    assert "--force" in capsys.readouterr().err


def test_missing_config_file_is_no_hub_id():
    with pytest.raises(UsageError, match=r"no file nope/mine\.json"):
        hub_draft("nope/mine.json")
