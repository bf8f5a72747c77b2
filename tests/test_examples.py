"""Examples are workloads that learn, import no memtune, and have their documented size."""

import ast
import re
from pathlib import Path

import pytest
import torch

from memtune.autotune.record import record
from memtune.testing.training import device_under_test, differences, one_step, train_under
from memtune.units import parse_bytes
from memtune.workload.workload import Workload

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALLER = {
    "gpt": {"MEMTUNE_GPT_SIZE": "tiny"},
    "cnn": {"MEMTUNE_CNN_WIDTH": "8", "MEMTUNE_CNN_IMAGE": "16", "MEMTUNE_CNN_DEPTH": "1"},
    "contrastive": {},
    "diffusion": {},
    "experts": {},
    "long_context": {},
    "lora": {},
    "recurrent": {},
    "vit": {},
    "hf_llama": {"MEMTUNE_LLAMA_DIM": "64", "MEMTUNE_LLAMA_LAYERS": "2", "MEMTUNE_LLAMA_SEQ": "32"},
}


pytestmark = pytest.mark.usefixtures("one_thread")


def trained(workload: Workload, steps: int, size: int) -> list[float]:
    torch.manual_seed(0)
    model = workload.build_model().to(device_under_test())
    optimizer = workload.make_optimizer(model)
    found = (
        one_step(workload, model, optimizer, None, seed=step, micro_batches=1, size=size)
        for step in range(steps)
    )
    return [loss.item() for loss, _ in found]


@pytest.mark.any_device
@pytest.mark.parametrize("stem", SMALLER)
def test_example_learns_and_repeats_under_a_seed(stem, monkeypatch):
    for name, value in SMALLER[stem].items():
        monkeypatch.setenv(name, value)
    workload = Workload.load(EXAMPLES / f"{stem}.py")
    workload.check_batch()
    losses = trained(workload, 30, 8)
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
    assert losses[:3] == trained(workload, 3, 8)


@pytest.mark.any_device
@pytest.mark.drawn(3)
@pytest.mark.parametrize("stem", SMALLER)
def test_example_trains_the_same_under_recompute_and_offload(stem, monkeypatch):
    for name, value in SMALLER[stem].items():
        monkeypatch.setenv(name, value)
    path = EXAMPLES / f"{stem}.py"
    offload = {"activations": {"kind": "copy_out", "min_bytes": 0}, "states": {"kind": "optimizer_cpu"}}
    settings = {"recompute": {"kind": "full"}, "offload": offload}
    assert differences(train_under(path, {"settings": settings}), train_under(path, None)) == []


@pytest.mark.parametrize(
    ("stem", "millions", "blocks"), [("gpt", (27, 33), 36), ("cnn", (0.5, 1), 6), ("hf_llama", (4, 8), 8)]
)
def test_example_has_its_documented_size(stem, millions, blocks):
    workload = Workload.load(EXAMPLES / f"{stem}.py")
    with torch.device("meta"):
        model = workload.build_model()
    low, high = millions
    assert low <= sum(param.numel() for param in model.parameters()) / 1e6 <= high
    assert len(workload.find_blocks(model)) == blocks
    assert workload.global_batch is not None
    assert workload.global_batch % 8 == 0


@pytest.mark.parametrize(
    ("size", "billions"), [("tiny", 0.00022), ("124m", 0.124), ("350m", 0.35), ("1.3b", 1.3), ("7b", 6.7)]
)
def test_gpt_sizes_match_their_names(size, billions, monkeypatch):
    monkeypatch.setenv("MEMTUNE_GPT_SIZE", size)
    with torch.device("meta"):
        model = Workload.load(EXAMPLES / "gpt.py").build_model()
    assert sum(param.numel() for param in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.1)


def test_gpt_settings_change_the_program(monkeypatch):
    chosen = {
        "LAYERS": "3",
        "DIM": "32",
        "HEADS": "2",
        "SEQ": "16",
        "VOCAB": "100",
        "DROPOUT": "0.1",
        "TIED": "0",
        "BATCH": "12",
    }
    for name, value in chosen.items():
        monkeypatch.setenv(f"MEMTUNE_GPT_{name}", value)
    workload = Workload.load(EXAMPLES / "gpt.py")
    model = workload.build_model()
    assert workload.global_batch == 12
    assert len(workload.find_blocks(model)) == 3
    assert model.wte.weight.shape == (100, 32)
    assert model.head.weight is not model.wte.weight
    assert model.drop.p == 0.1
    inputs, targets = workload.make_batch(5)
    assert inputs.shape == (5, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert int(inputs.max()) < 100


def test_gpt_activations_are_worth_saving():
    workload = Workload.load(EXAMPLES / "gpt.py")
    model = workload.build_model()
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    size = 2  # activations grow with the batch: one rank of two has global_batch / 2 samples
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = workload.loss(model, workload.make_batch(size))
    weights_bytes = 4 * sum(param.numel() for param in model.parameters())
    assert loss.requires_grad
    assert sum(saved.values()) / size * workload.global_batch / 2 > 1.2 * weights_bytes


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_workload_imports_no_memtune(path):
    tree = ast.parse(path.read_text())
    if not any(isinstance(node, ast.FunctionDef) and node.name == "model" for node in tree.body):
        pytest.skip("it applies a config, and so imports memtune")
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in imported if name.partition(".")[0] == "memtune"]


def test_plain_setting_exceeds_the_limit_in_the_docstring():
    path = EXAMPLES / "vit.py"
    found = re.search(r"search examples/vit.py --device cpu --max-memory (\w+)", path.read_text())
    workload = Workload.load(path)
    assert record(workload).at(workload.global_batch).peak_bytes() > 1.1 * parse_bytes(found[1])
