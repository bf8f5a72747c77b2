"""The user's `model.py`: accepted forms, and the message for each mistake."""

import hashlib
import sys
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode

from memtune.errors import WorkloadError
from memtune.workload.workload import Workload, batch_size_of, shapes_of, split_batch, to_device

ZOO = Path(__file__).parents[1] / "zoo"
BAD = ZOO / "bad"

GOOD = """
import torch
from torch import nn
def model(): return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
def batch(size): return torch.randn(size, 8)
def loss(model, batch): return model(batch).square().mean()
"""


def written(folder: Path, text: str, name: str = "model.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def message(function, *args) -> WorkloadError:
    with pytest.raises(WorkloadError) as caught:
        function(*args)
    error = caught.value
    assert error.code.startswith("MT1")
    assert error.fix
    assert error.exit_code == 2
    assert "Traceback" not in str(error)
    return error


@pytest.mark.parametrize("path", sorted(ZOO.glob("*.py")), ids=lambda path: path.stem)
def test_workload_trains_each_zoo_model(path):
    workload = Workload.load(path)
    torch.manual_seed(0)
    model = workload.build_model()
    workload.check_batch()
    assert sum(param.numel() for param in model.parameters()) <= 3_000_000
    optimizer = workload.make_optimizer(model)
    batch, losses = workload.make_batch(4), []
    for _ in range(4):
        loss = workload.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    names = workload.find_blocks(model)
    assert len(names) >= 2
    assert all(any(True for _ in model.get_submodule(name).parameters()) for name in names)


# file, code, and words that the whole message must hold
AT_LOAD = [
    ("no_model", "MT101", ["no model()", "class Net", "train()", "def model()"]),
    ("no_loss", "MT101", ["no loss()", "def loss(model, batch)"]),
    ("model_is_instance", "MT101", ["a Linear, not a function", "def model()"]),
    ("model_takes_arguments", "MT101", ["model()", "0 arguments", "'width'"]),
    ("import_error", "MT102", ["line 3", "no_such_module_for_memtune", "install"]),
    ("import_raises", "MT102", ["line 5", "KeyError", "learning_rate"]),
    ("exits", "MT112", ["line 6", "exit status 3", "__main__"]),
    ("global_batch_text", "MT121", ["'32'", "positive whole number"]),
]


@pytest.mark.parametrize(("stem", "code", "words"), AT_LOAD, ids=[case[0] for case in AT_LOAD])
def test_load_reports_unusable_file(stem, code, words):
    error = message(Workload.load, BAD / f"{stem}.py")
    assert error.code == code
    assert [word for word in words if word not in str(error)] == []


def model_of(workload):
    return workload.build_model()


def batch_of(workload):
    return workload.check_batch()


def loss_of(workload):
    return workload.loss(workload.build_model(), workload.make_batch(2))


def optimizer_of(workload):
    return workload.make_optimizer(workload.build_model())


def blocks_of(workload):
    return workload.find_blocks(workload.build_model())


AT_CALL = [
    ("not_a_module", model_of, "MT115", ["a tuple of 2", "without the optimizer"]),
    ("no_parameters", model_of, "MT115", ["nothing to train", "0 parameters"]),
    ("all_frozen", model_of, "MT115", ["nothing to train", "2 parameters, all frozen", "requires_grad"]),
    ("scripted", model_of, "MT115", ["torch.jit", "before torch.jit.script"]),
    ("model_raises", model_of, "MT114", ["line 8", "TypeError", 'nn.Linear(8, "four")']),
    ("batch_raises", batch_of, "MT116", ["batch(2)", "line 12", "IndexError"]),
    ("batch_ignores_size", batch_of, "MT117", ["ignores its size", "(8, 8)"]),
    ("batch_no_tensor", batch_of, "MT116", ["a list of 2", "no tensor"]),
    ("shapes", loss_of, "MT118", ["line 17", "2x8 and 16x4", "model(inputs)", "(2, 8), (2, 4)"]),
    ("loss_vector", loss_of, "MT119", ["shape (2,)", "loss.mean()"]),
    ("loss_float", loss_of, "MT119", ["the float", ".item()"]),
    ("loss_no_grad", loss_of, "MT119", ["without gradient", "no_grad"]),
    ("optimizer_none", optimizer_of, "MT120", ["returned None", "Optimizer"]),
    ("blocks_names", blocks_of, "MT122", ["item 1", "a Linear", "no submodule", "Submodules: 0, 1"]),
]


@pytest.mark.parametrize(("stem", "use", "code", "words"), AT_CALL, ids=[case[0] for case in AT_CALL])
def test_call_reports_wrong_return_value(stem, use, code, words):
    error = message(use, Workload.load(BAD / f"{stem}.py"))
    assert error.code == code
    assert [word for word in words if word not in str(error)] == []


def test_load_reports_syntax_error_with_line(tmp_path):
    error = message(Workload.load, written(tmp_path, "import torch\n\ndef model()\n    return 1\n"))
    assert (error.code, "line 3" in error.what, error.evidence) == ("MT102", True, "line 3:  def model()")


def test_load_reports_missing_and_other_files(tmp_path):
    written(tmp_path, GOOD, "train.py")
    assert "train.py" in message(Workload.load, tmp_path / "model.py").evidence
    written(tmp_path, "x", "model.txt")
    assert "'.txt' file" in message(Workload.load, tmp_path / "model.txt").what
    assert "a directory" in message(Workload.load, tmp_path).what


@pytest.mark.parametrize("value", ["0", "-4", "True", "8.0", "'8'"])
def test_load_rejects_invalid_global_batch(tmp_path, value):
    assert message(Workload.load, written(tmp_path, f"{GOOD}\nglobal_batch = {value}")).code == "MT121"


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ("torch.zeros(size, 16, dtype=torch.int64)", 16),
        ("{'tokens': torch.zeros(size, 16, dtype=torch.int64), 'weights': torch.ones(size, 16)}", 16),
        ("torch.zeros(size, 13), torch.zeros(size, 26, dtype=torch.int64)", None),
        ("torch.zeros(size, 3, 8, 8), torch.zeros(size, dtype=torch.int64)", None),
    ],
    ids=["tokens", "weighted tokens", "categories", "images"],
)
def test_tokens_per_sample_counts_tokens_but_not_categories(batch, tokens, tmp_path):
    text = f"{GOOD}\ndef batch(size): return {batch}"
    assert Workload.load(written(tmp_path, text)).tokens_per_sample() == tokens


def test_loss_rejects_integer_tensor(tmp_path):
    text = GOOD.replace("model(batch).square().mean()", "model(batch).sum().long()")
    assert "torch.int64" in message(loss_of, Workload.load(written(tmp_path, text))).what


@pytest.mark.skipif(torch.cuda.is_available(), reason="the code runs on the GPU")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("nn.Linear(8, 4))", "nn.Linear(8, 4)).cuda()"),
        ("nn.Linear(8, 4))", 'nn.Linear(8, 4)).to("xpu")'),
        ("model(batch)", 'model(batch.to("cuda"))'),
    ],
)
def test_code_for_a_gpu_is_answered_with_what_to_leave_out(tmp_path, old, new):
    workload = Workload.load(written(tmp_path, GOOD.replace(old, new)))
    assert "leave out .cuda()" in message(lambda: loss_of(workload)).fix


def test_op_without_a_cpu_kernel_is_answered_with_another_op(tmp_path):
    attention = (
        "def loss(model, batch):\n"
        "    from torch.nn.attention.flex_attention import flex_attention\n"
        "    q = model[0](batch)[None, None]\n"
        "    return flex_attention(q, q, q).mean()\n"
    )
    workload = Workload.load(written(tmp_path, GOOD + attention))
    assert "runs on the CPU" in message(lambda: loss_of(workload)).fix


def test_optimizer_of_the_model_groups_parameters_by_name(tmp_path):
    text = (
        GOOD
        + """
def optimizer(model):
    names = dict(model.named_parameters())
    kept = [each for name, each in names.items() if name.endswith("bias")]
    rest = [each for name, each in names.items() if not name.endswith("bias")]
    return torch.optim.AdamW([{"params": rest, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}])
"""
    )
    groups = optimizer_of(Workload.load(written(tmp_path, text))).param_groups
    assert [each["weight_decay"] for each in groups] == [0.1, 0.0]
    assert all(len(each["params"]) > 0 for each in groups)


def test_make_optimizer_rejects_closure(tmp_path):
    text = GOOD + "\ndef optimizer(params): return torch.optim.LBFGS(params)"
    assert "LBFGS.step needs closure" in message(optimizer_of, Workload.load(written(tmp_path, text))).what


def test_make_optimizer_rejects_foreign_parameters(tmp_path):
    text = GOOD + "\ndef optimizer(params): return torch.optim.SGD([nn.Parameter(torch.ones(1))])"
    assert "none of the parameters" in message(optimizer_of, Workload.load(written(tmp_path, text))).what


@pytest.mark.parametrize(
    "raised", ["torch.OutOfMemoryError('full')", "RuntimeError('CUDA out of memory: it is full')"]
)
def test_call_passes_out_of_memory_through(raised, tmp_path):
    text = GOOD.replace("return model(batch)", f"raise {raised}; return model(batch)")
    with pytest.raises(RuntimeError, match="full"):
        loss_of(Workload.load(written(tmp_path, text)))


def test_workload_fields_identify_the_file(tmp_path):
    path = written(tmp_path, f"{GOOD}\nglobal_batch = 32")
    workload = Workload.load(path)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert (workload.path, workload.name, workload.source_sha256, workload.global_batch) == (
        path,
        None,
        sha256,
        32,
    )
    assert workload.described() == {
        "file": "model.py",
        "name": None,
        "source_sha256": sha256,
        "global_batch": 32,
    }
    assert workload == Workload.load(path)


IN_A_CLASS = """
import torch
from torch import nn
class Task:
    global_batch = 4
    def __init__(self, width=8): self.width = width
    def model(self): return nn.Linear(self.width, 4)
    def batch(self, size): return torch.randn(size, self.width)
    def loss(self, model, batch): return model(batch).square().mean()
wide = Task(16)
class Strict(Task):
    def __init__(self, width): super().__init__(width)
"""


@pytest.mark.parametrize(("name", "width"), [("Task", 8), ("wide", 16)])
def test_load_name_selects_class_or_instance(tmp_path, name, width):
    workload = Workload.load(f"{written(tmp_path, IN_A_CLASS)}:{name}")
    assert (workload.name, workload.global_batch) == (name, 4)
    assert workload.build_model().weight.shape == (4, width)
    assert workload.make_batch(3).shape == (3, width)
    assert loss_of(workload).requires_grad


def test_load_reports_missing_or_failing_name(tmp_path):
    path = written(tmp_path, IN_A_CLASS)
    assert "class Task, wide, class Strict" in message(Workload.load, f"{path}:tsk").evidence
    assert "constructor without arguments" in message(Workload.load, f"{path}:Strict").fix


def test_load_allows_neighbour_imports_and_writes_no_bytecode(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    written(tmp_path, "WIDTH = 8", "neighbour_of_model.py")
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass C:\n    a:"
        " int = 1\n"
    )
    path = written(tmp_path, f"{text}import neighbour_of_model\nassert __name__ != '__main__'\n{GOOD}")
    Workload.load(path)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["model.py", "neighbour_of_model.py"]


def test_make_batch_is_real_and_on_cpu_under_any_mode():
    workload = Workload.load(ZOO / "gpt.py")
    with FakeTensorMode(), torch.device("meta"):
        inputs, _ = workload.make_batch(2)
        model = workload.build_model()
    assert type(inputs) is torch.Tensor
    assert inputs.device.type == "cpu"
    assert all(param.device.type == "meta" for param in model.parameters())


def test_buckets_are_in_order_of_bytes_and_the_largest_is_the_worst_batch(tmp_path):
    text = f"{GOOD}\nimport torch\ndef buckets(size): return [torch.ones(n * size, 3) for n in (2, 5, 1)]"
    workload = Workload.load(written(tmp_path, text))
    assert [each.shape[0] for each in workload.make_buckets(4)] == [4, 8, 20]
    assert workload.make_worst_batch(4).shape[0] == workload.largest_batch(4).shape[0] == 20
    middle = workload.of_bucket(1)
    assert middle.make_batch(4).shape[0] == 8
    assert middle.largest_batch(4) is None


def test_drawn_batches_are_the_extremes_of_draws_that_do_not_change_random_state(tmp_path):
    varying = GOOD.replace("torch.randn(size", "torch.randn(size * int(torch.randint(4, 40, ()))")
    assert varying != GOOD
    workload = Workload.load(written(tmp_path, varying))
    before = torch.get_rng_state()
    found = workload.drawn_batches(4)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.smallest.nbytes == found.least_bytes < found.most_bytes == found.largest.nbytes
    assert torch.equal(workload.largest_batch(4), found.largest)
    assert Workload.load(written(tmp_path, GOOD)).drawn_batches(4) is None


@pytest.mark.parametrize("returned", ["None", "[]", "[torch.ones(3, 3)]", "torch.ones(size)"])
def test_malformed_buckets_raise(tmp_path, returned):
    text = f"{GOOD}\nimport torch\ndef buckets(size): return {returned}"
    with pytest.raises(WorkloadError, match=r"buckets\(4\)|batch\(size\) ignores"):
        Workload.load(written(tmp_path, text)).make_buckets(4)


def test_workload_defaults_to_adamw_and_accepts_blocks(tmp_path):
    workload = Workload.load(written(tmp_path, f"{GOOD}\ndef blocks(model): return [model[1], model[1]]"))
    model = workload.build_model()
    assert type(workload.make_optimizer(model)) is torch.optim.AdamW
    assert workload.find_blocks(model) == ["1"]


# --- batches ------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    note: str


def encoding(size):
    from transformers import BatchEncoding

    return BatchEncoding({"input_ids": torch.arange(size * 3).view(size, 3)})


CONTAINERS = {
    "tensor": lambda n: torch.arange(n * 2).view(n, 2),
    "tuple": lambda n: (torch.arange(n), torch.randn(n, 3)),
    "namedtuple": lambda n: Pair(torch.arange(n), torch.randn(n, 3)),
    "dict": lambda n: {"a": torch.arange(n), "b": [torch.randn(n, 2), 7]},
    "dataclass": lambda n: Sample(torch.arange(n), "kept"),
    "encoding": encoding,
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_split_batch_parts_concatenate_to_the_batch(kind):
    batch = CONTAINERS[kind](12)
    parts = split_batch(batch, 3)
    assert [type(part) for part in parts] == [type(batch)] * 3
    assert all(shape[0] == 4 for part in parts for shape in shapes_of(part))
    flat = [
        torch.utils._pytree.tree_leaves(dict(part) if kind == "encoding" else getattr(part, "x", part))
        for part in parts
    ]
    whole = torch.utils._pytree.tree_leaves(dict(batch) if kind == "encoding" else getattr(batch, "x", batch))
    for index, leaf in enumerate(whole):
        if isinstance(leaf, torch.Tensor):
            assert torch.equal(torch.cat([leaves[index] for leaves in flat]), leaf)
    moved = to_device(batch, "meta")
    assert type(moved) is type(batch)
    assert shapes_of(moved) == shapes_of(batch)


@given(parts=st.integers(1, 8), each=st.integers(1, 5), extra=st.integers(1, 9))
def test_split_batch_puts_each_sample_in_one_part(parts, each, extra):
    size = parts * each
    shared = torch.zeros(size + extra)
    split = split_batch({"x": torch.arange(size), "y": torch.arange(size), "shared": shared}, parts)
    assert torch.equal(torch.cat([part["x"] for part in split]), torch.arange(size))
    assert all(part["shared"] is shared for part in split)


def test_split_batch_splits_lists_of_samples():
    images, targets = torch.randn(4, 3, 8, 8), [{"boxes": torch.randn(i + 5, 4)} for i in range(4)]
    second = split_batch((images, targets), 2)[1]
    assert [target["boxes"].shape[0] for target in second[1]] == [7, 8]


def test_split_batch_returns_reason():
    assert "do not divide a batch of 6" in split_batch(torch.zeros(6, 2), 4)
    assert "no tensor" in split_batch(torch.zeros(16, 6), 2, size=6)  # time first, batch second
    assert "no tensor" in split_batch({"a": 1}, 2)
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    assert isinstance(split_batch(packed, 2), str)


def test_batch_size_of_is_most_frequent_first_dimension():
    assert (
        batch_size_of(
            {"mask": torch.zeros(9, 9), "x": torch.zeros(4, 3), "y": torch.zeros(4), "scale": torch.ones(())}
        )
        == 4
    )
    assert batch_size_of([1, "a"]) is None


def test_imports_are_not_the_model_files_of_other_searches(tmp_path):
    for name in ("first", "second"):
        written(tmp_path, GOOD, f"{name}.py")
    first, second = (Workload.load(tmp_path / f"{name}.py") for name in ("first", "second"))
    assert first.imports() == second.imports() == {}


def test_load_allows_relative_and_sibling_imports_in_a_package(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    inner = tmp_path / "package_with_sizes" / "nets"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").touch()
    written(inner.parent, "WIDTH = 4", "sizes.py")
    written(inner, "DEPTH = 2", "depth.py")
    relative = "from ..sizes import WIDTH\nfrom .depth import DEPTH\nimport depth\n"
    workload = Workload.load(written(inner, relative + GOOD))
    assert workload.build_model()[1].out_features == 4
    assert workload._file.holder.WIDTH * workload._file.holder.DEPTH == 8
