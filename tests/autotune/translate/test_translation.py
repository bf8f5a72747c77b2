"""A CPU recording translated to CUDA, held against torch's own meta kernels and autograd formulas of CUDA's
ops.

The truth without a GPU: the same model written with CUDA's aten ops runs on fake CPU tensors, so what they
return is torch's meta registration and what is saved is torch's derivative formula. Translating the ordinary
model must give the same bytes.
"""

from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.graph_equality import assert_same_graph
from support.zoo_paths import ZOO

from memtune.activations.schedules.region_pass import not_foreseen, region_of
from memtune.autotune.record.recorder import record
from memtune.autotune.translate import translation_table as table
from memtune.autotune.translate.translation import translate, unknown_ops
from memtune.hardware.spec import find
from memtune.program.step import Kind, Phase, Recording, Tier
from memtune.workload.workload import Workload

MODEL = """
import torch, torch.nn.functional as F
from torch import nn
A = torch.ops.aten
DTYPE, DROP, HEADS, KV, SEQ, DIM = torch.{dtype}, {drop}, 4, {kv}, 24, 64

def attend(q, k, v):
    if not {cuda}:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=DROP, is_causal=True, enable_gqa=KV != HEADS)
    if "{kernel}" == "flash":
        return A._scaled_dot_product_flash_attention(q, k, v, DROP, True)[0]
    if "{kernel}" == "cudnn":
        return A._scaled_dot_product_cudnn_attention(q, k, v, None, True, DROP, True)[0]
    return A._scaled_dot_product_efficient_attention(q, k, v, None, True, DROP, True)[0]

def drop(x):
    return torch.native_dropout(x, 0.1, True)[0] if {cuda} else F.dropout(x, 0.1)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(DIM, DIM, dtype=DTYPE), nn.Linear(DIM, 2 * KV * DIM // HEADS, dtype=DTYPE)
        self.out = nn.Linear(DIM, DIM, dtype=DTYPE)
    def forward(self, x):
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = (p.unflatten(-1, (KV, -1)).transpose(1, 2) for p in self.kv(x).chunk(2, dim=-1))
        return x + drop(self.out(attend(q, k, v).transpose(1, 2).flatten(2)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def model(): return Net()
def batch(size): return torch.randn(size, SEQ, DIM, dtype=DTYPE)
def loss(model, batch): return model(batch).float().square().mean()
def optimizer(params):
    return torch.optim.{optimizer}(params, lr=1e-3{extra}{foreach})
"""


_RECORDINGS: dict[str, Recording] = {}


def recorded(
    tmp_path: Path,
    *,
    cuda: bool,
    kernel: str = "flash",
    dtype: str = "bfloat16",
    drop: float = 0.0,
    kv: int = 4,
    seq: int = 24,
    optimizer: str = "AdamW",
    extra: str = "",
) -> Recording:
    """The model recorded once a session; `cuda` writes it with CUDA's ops, `tmp_path` is where its file is
    put.
    """
    text = MODEL.replace("24, 64", f"{seq}, 64").format(
        cuda=cuda,
        kernel=kernel,
        dtype=dtype,
        drop=drop,
        kv=kv,
        optimizer=optimizer,
        extra=extra,
        foreach=", foreach=True" if cuda else "",
    )
    path = tmp_path / f"model_{cuda}.py"
    path.write_text(text)
    if text not in _RECORDINGS:
        _RECORDINGS[text] = record(Workload.load(path), target="cuda")
    return _RECORDINGS[text]


def profile(
    recording: Recording, size: int, until: Phase | None = Phase.OPTIMIZER
) -> list[tuple[str, str, int]]:
    """Op, module and live device bytes of every op before `until`, scratch and step counters left out."""
    step = recording.at(size)
    bytes_ = np.where(step.storages.kind == Kind.WORKSPACE, 0, step.storages.bytes)
    bytes_[list(recording.hints[recording.small].step_counters)] = 0
    bytes_[(step.storages.kind == Kind.BUFFER) & (step.storages.bytes <= 8)] = (
        0  # constants of the optimizer's own code
    )
    live = step.with_storages(bytes=bytes_).live_bytes()
    rows = np.flatnonzero(step.ops.phase < (99 if until is None else until))
    return [(step.names[step.ops.name[i]], step.modules[step.ops.module[i]], int(live[i])) for i in rows]


CASES = [
    ("flash", "bfloat16", 0.0, 4, "a100"),
    ("flash", "float16", 0.1, 4, "a100"),
    ("flash", "bfloat16", 0.1, 2, "rtx-4090"),
    ("efficient", "float32", 0.0, 4, "a100"),
    ("efficient", "float32", 0.1, 4, "h100"),
    ("cudnn", "bfloat16", 0.0, 4, "h200"),
    ("cudnn", "bfloat16", 0.125, 4, "b200"),
]


@pytest.mark.drawn(4)
@pytest.mark.parametrize(("kernel", "dtype", "drop", "kv", "gpu"), CASES)
def test_translated_attention_and_dropout_save_tensors_of_cuda_ops(
    tmp_path: Path, kernel: str, dtype: str, drop: float, kv: int, gpu: str
) -> None:
    plain = recorded(tmp_path, cuda=False, dtype=dtype, drop=drop, kv=kv)
    truth = recorded(tmp_path, cuda=True, kernel=kernel, dtype=dtype, drop=drop, kv=kv)
    ours = translate(plain, find(gpu))
    seeds = (
        2 * 16 if kernel == "efficient" else 0
    )  # on the host in truth, on a device of its own in the meta registration
    for size in (2, 5):
        got, want = profile(ours, size), profile(truth, size)
        assert [row[:2] for row in got] == [row[:2] for row in want]
        assert max(b[2] - a[2] for a, b in zip(got, want, strict=True)) == seeds
        assert min(b[2] - a[2] for a, b in zip(got, want, strict=True)) == 0
    assert truth.step.saved_bytes() - ours.step.saved_bytes() == seeds
    assert any(f"{kernel} attention × 2" in note for note in ours.notes)
    # Order and lifetimes of saved tensors: plans address tensors by them.
    for column in ("packed_before", "is_output", "call", "held_until", "unpacked_before"):
        assert np.array_equal(getattr(ours.step.saves, column), getattr(truth.step.saves, column)), column
    # Compression packs floating-point numbers only.
    floats = [each.storages.float_bytes[each.saves.storage] for each in (ours.step, truth.step)]
    assert np.array_equal(*floats)
    sizes = [each.storages.bytes[each.saves.storage] for each in (ours.step, truth.step)]
    off = sizes[0] != sizes[1]
    assert set(sizes[0][off]) <= {0}  # seeds again
    assert off.sum() == (4 if kernel == "efficient" else 0)


@pytest.mark.parametrize(("kernel", "dtype", "drop", "kv", "gpu"), CASES)
def test_translated_schedule_addresses_match_live_ops(
    tmp_path: Path, kernel: str, dtype: str, drop: float, kv: int, gpu: str
) -> None:
    """The region of the translated step and the one that the runtime captures of CUDA's ops are one graph."""
    plain = recorded(tmp_path, cuda=False, dtype=dtype, drop=drop, kv=kv)
    recorded(tmp_path, cuda=True, kernel=kernel, dtype=dtype, drop=drop, kv=kv)
    assert_same_graph(translate(plain, find(gpu)).step, tmp_path / "model_True.py")


def test_output_of_efficient_attention_has_an_order_of_memory_of_its_own(tmp_path: Path) -> None:
    """Queries may have the length before the samples, as in `nn.MultiheadAttention`: CUDA's kernel does not
    keep that order, so what follows copies its output.
    """
    text = MODEL.replace(
        "return x + drop(self.out(attend(q, k, v).transpose(1, 2).flatten(2)))",
        "q, k, v = (each.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for each in (q, k, v))\n"
        "        return x + self.out(attend(q, k, v).permute(2, 0, 1, 3).flatten(2).transpose(0, 1))",
    )
    sizes = {"dtype": "float32", "drop": 0.0, "kv": 4, "optimizer": "SGD", "extra": "", "foreach": ""}
    plain, cuda = tmp_path / "plain.py", tmp_path / "cuda.py"
    plain.write_text(text.format(cuda=False, kernel="", **sizes))
    cuda.write_text(text.format(cuda=True, kernel="efficient", **sizes))
    assert_same_graph(translate(record(Workload.load(plain), target="cuda"), find("a100")).step, cuda)


@pytest.mark.parametrize(("seq", "mask"), [(32, "bool"), (24, "bool"), (24, "float32")])
def test_translated_attention_mask_is_made_and_padded(tmp_path: Path, seq: int, mask: str) -> None:
    """Efficient attention pads a mask to rows of 16; CPU takes it as it is."""
    text = MODEL.format(
        cuda=False, kernel="", dtype="float32", drop=0.1, kv=4, optimizer="SGD", extra="", foreach=""
    )
    text = text.replace("4, 24, 64", f"4, {seq}, 64").replace(
        "def attend(", f"MASK = torch.ones(1, 1, SEQ, SEQ).to(torch.{mask})\n\ndef attend("
    )
    text = text.replace("F.dropout(x, 0.1)", "x").replace(
        "            x = block(x)", "            x = block(x, mask)"
    )
    text = text.replace("def forward(self, x)", "def forward(self, x, mask)").replace(
        "attend(q, k, v)", "attend(q, k, v, mask)"
    )
    text = text.replace("model(batch)", "model(*batch)")
    text = text.replace(
        "return torch.randn(size, SEQ, DIM, dtype=DTYPE)",
        "return torch.randn(size, SEQ, DIM), MASK.expand(size, 1, SEQ, SEQ).contiguous()",
    )
    plain, cuda = tmp_path / "plain.py", tmp_path / "cuda.py"
    plain.write_text(text.replace("is_causal=True, enable_gqa=KV != HEADS", "attn_mask=mask"))
    cuda.write_text(
        text.replace(
            "        return F.scaled_dot_product_attention(q, k, v, dropout_p=DROP, is_causal=True,"
            " enable_gqa=KV != HEADS)",
            "        if mask.dtype == torch.bool:\n"
            "            kept, lost = (A.scalar_tensor(each, dtype=DTYPE) for each in (0.0, float('-inf')))\n"
            "            mask = torch.where(mask, kept, lost)\n"
            "        mask = mask.expand(-1, HEADS, -1, -1)\n"
            "        mask = F.pad(mask, (0, -SEQ % 16))[..., :SEQ] if SEQ % 16 else mask\n"
            "        return A._scaled_dot_product_efficient_attention(q, k, v, mask, True, DROP, False)[0]",
        )
    )
    assert_same_graph(translate(record(Workload.load(plain), target="cuda"), find("a100")).step, cuda)


@pytest.mark.parametrize(("name", "kernel"), [("head", "flash_attention"), ("lstm", "_cudnn_rnn")])
def test_ops_that_represent_several_are_not_frozen(tmp_path: Path, name: str, kernel: str) -> None:
    """Heads of 10 are padded by extra ops, and cuDNN's weights are copied to another layout; schedules
    support neither.
    """
    plain, path = (
        record(Workload.load(ZOO["lstm"]), target="cuda") if name == "lstm" else None,
        tmp_path / "head.py",
    )
    text = MODEL.format(
        cuda=False, kernel="", dtype="bfloat16", drop=0.0, kv=4, optimizer="SGD", extra="", foreach=""
    )
    path.write_text(text.replace("24, 64", "24, 40"))
    step = translate(plain or record(Workload.load(path), target="cuda"), find("a100")).step
    region = region_of(step)
    assert not isinstance(region, str), region
    assert kernel in not_foreseen(step, region)
    whole = translate(recorded(tmp_path, cuda=False), find("a100")).step
    region = region_of(whole)
    assert not isinstance(region, str), region
    assert not not_foreseen(whole, region)


def test_translated_rms_norm_saves_layer_norm_tensors_except_mean(tmp_path: Path) -> None:
    """Both are one CUDA op: input, weight and fp32 statistics are saved. CPU has that op for layer norm
    alone.
    """
    recordings = []
    for norm in ("layer_norm", "rms_norm"):
        path = tmp_path / f"{norm}.py"
        text = MODEL.format(
            cuda=False, kernel="", dtype="bfloat16", drop=0.0, kv=4, optimizer="SGD", extra="", foreach=""
        )
        text = text.replace("self.q(x)", f"self.q(F.{norm}(x, (DIM,), self.scale))").replace(
            "        self.q, self.kv",
            "        self.scale = nn.Parameter(torch.ones(DIM, dtype=DTYPE))\n        self.q, self.kv",
        )
        path.write_text(text)
        recordings.append(translate(record(Workload.load(path), target="cuda"), find("a100")))
    layer, rms = (each.step for each in recordings)
    rows = 2 * 24
    assert any("fused RMS norm × 2" in note for note in recordings[1].notes)
    assert "aten.rsqrt.default" not in [rms.names[i] for i in rms.ops.name]
    assert layer.saves.n == rms.saves.n + 2  # the means of two norms
    forward = np.flatnonzero(layer.ops.phase == Phase.FORWARD)
    assert np.array_equal(forward, np.flatnonzero(rms.ops.phase == Phase.FORWARD))
    difference = layer.live_bytes()[forward] - rms.live_bytes()[forward]
    assert sorted(set(difference.tolist())) == [0, 4 * rows, 2 * 4 * rows]


def test_attention_without_kernel_is_recorded_as_composite(tmp_path: Path) -> None:
    """Grouped queries in float32: CUDA runs torch's composite, which keeps the scaled and repeated operands
    and the weights.
    """
    text = MODEL.format(
        cuda=False, kernel="", dtype="float32", drop=0.0, kv=2, optimizer="SGD", extra="", foreach=""
    )
    text = text.replace("x + drop(", "x + (")
    plain, forced = tmp_path / "plain.py", tmp_path / "forced.py"
    plain.write_text(text)
    forced.write_text(
        text.replace(
            "        return F.scaled",
            "      with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):\n        return F.scaled",
        )
    )
    ours = translate(record(Workload.load(plain), target="cuda"), find("h100"))
    truth = record(Workload.load(forced), target="cpu")
    assert any("math attention × 2" in note for note in ours.notes)
    names = [
        [each.step.names[i] for i in each.step.ops.name[each.step.ops.phase < Phase.OPTIMIZER]]
        for each in (ours, truth)
    ]
    assert names[0] == names[1]
    assert ours.step.saved_bytes() == truth.step.saved_bytes()


@pytest.mark.parametrize(
    ("optimizer", "extra"),
    [("AdamW", ""), ("SGD", ", momentum=0.9, weight_decay=0.1"), ("RMSprop", ", momentum=0.5")],
)
def test_translated_optimizer_is_foreach(tmp_path: Path, optimizer: str, extra: str) -> None:
    ours = translate(recorded(tmp_path, cuda=False, optimizer=optimizer, extra=extra), find("a100"))
    truth = recorded(tmp_path, cuda=True, optimizer=optimizer, extra=extra)
    start = len(profile(ours, 2))
    got, want = (profile(each, 2, until=None) for each in (ours, truth))
    assert [row[0] for row in got] == [row[0] for row in want]
    steps = ours.step.ops.resource[start:]
    same = [
        a[2] == b[2]
        for (a, b), on in zip(zip(got[start:], want[start:], strict=True), steps, strict=True)
        if on == 0
    ]
    assert same
    assert all(same)
    made = (ours.step.storages.producer >= start) & (ours.step.storages.tier == Tier.DEVICE)
    assert (ours.step.storages.owner[made] >= 0).all()  # a sharding pass divides them


def test_foreach_recording_preserves_values() -> None:
    translated = translate(record(Workload.load(ZOO["moe"]), target="cuda"), find("a100"))
    assert translated.rung == "real-step"
    assert "aten._foreach_sqrt.default" in translated.step.names


def test_attention_backend_choice_equals_torch() -> None:
    call = table.Attention(2, 8, 128, 64, 8, 128, 64, "bfloat16")
    chosen = {
        "h100": ("cudnn", call),
        "a100": ("flash", call),
        "v100": ("math", call),
        "mi300x": ("flash", call),
    }
    for gpu, (kernel, each) in chosen.items():
        assert table.attention_kernel(each, find(gpu).architecture).name == kernel, gpu
    for changes, kernel in [
        ({"dtype": "float32"}, "efficient"),
        ({"masked": True}, "efficient"),
        ({"D": 20, "E": 20}, "flash"),
        ({"D": 288, "E": 288}, "efficient"),
        ({"causal": True, "K": 64}, "efficient"),
        ({"dense": False}, "math"),
        ({"dtype": "float64"}, "math"),
        ({"G": 2}, "flash"),
        ({"G": 2, "masked": True}, "math"),
        ({"G": 2, "dtype": "float32"}, "math"),
        ({"D": 20, "E": 20, "masked": True}, "math"),
    ]:
        assert table.attention_kernel(replace(call, **changes), "sm80").name == kernel, changes
    assert (
        table.attention_kernel(replace(call, dropout=0.1), "sm90").name == "flash"
    )  # cuDNN knows sixteenths
    latent = replace(call, D=192, E=128)
    assert table.attention_kernel(latent, "sm90").name == "cudnn"
    assert table.attention_kernel(latent, "sm80").name == "efficient"
    wide = replace(call, D=208, E=208)
    assert table.attention_kernel(wide, "sm80").name == "flash"
    assert table.attention_kernel(wide, "sm89").name == "efficient"


@pytest.mark.parametrize(
    ("changes", "splits"),
    [
        ({}, 1),  # 2 × 32 × 8 blocks of queries fill 216 slots
        ({"B": 1, "H": 4, "Q": 512, "K": 512}, 4),  # 32 blocks: 4 parts of 128 keys
        ({"B": 1, "H": 4, "Q": 512, "K": 512, "dropout": 0.1}, 1),
        ({"B": 1, "H": 4, "Q": 512, "K": 512, "multiprocessors": 16}, 1),
        ({"B": 1, "H": 1, "Q": 64, "K": 8192}, 64),  # one block: as many parts as there are blocks of keys
        ({"B": 1, "H": 12, "Q": 512, "K": 1024}, 2),  # 96 blocks: 192 of 216 slots
    ],
)
def test_flash_attention_splits_keys_for_few_queries(changes: dict[str, Any], splits: int) -> None:
    call = replace(table.Attention(2, 32, 512, 128, 32, 512, 128, "bfloat16"), **changes)
    assert table.flash_splits(call) == splits
    scratch = table.ATTENTION["flash"].forward_scratch(call)
    assert scratch == (0 if splits == 1 else splits * call.B * call.H * call.Q * 4 * (128 + 1))


def test_scratch_of_small_micro_batches_vanishes_at_larger_ones(tmp_path: Path) -> None:
    """Flash attention splits the keys only of a batch that leaves multiprocessors idle."""
    recording = recorded(tmp_path, cuda=False, seq=640)
    small, other = sorted(recording.hints)[:2]
    ours = translate(recording, find("a100"))
    call = table.Attention(small, 4, 640, 16, 4, 640, 16, "bfloat16", multiprocessors=108)
    assert table.flash_splits(replace(call, B=small)) > 1
    assert table.flash_splits(replace(call, B=other)) == 1
    step = ours.at(small)
    scratch = np.flatnonzero((step.storages.kind == Kind.WORKSPACE) & (step.storages.producer >= 0))
    in_forward = step.ops.phase[step.storages.producer[scratch]] == Phase.FORWARD
    forward = scratch[in_forward & (step.storages.bytes[scratch] > 0)]
    want = table.ATTENTION["flash"].forward_scratch(call)
    assert step.storages.bytes[forward].tolist() == [want] * 2
    for size in (other, other + 3):
        assert ours.at(size).storages.bytes[forward].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("config", "n_bytes"),
    [
        (None, 32 << 20),
        (":4096:8", 32 << 20),
        (":4096:2:16:8", 8519680),
        (":16:8", 131072),
        ("nonsense", 32 << 20),
    ],
)
def test_cublas_workspace_bytes(config: str | None, n_bytes: int) -> None:
    assert table.cublas_workspace_bytes("sm90", config) == n_bytes
    assert table.cublas_workspace_bytes("sm80") == 8519680


def test_cublas_workspaces_exist_before_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    plain = recorded(tmp_path, cuda=False)
    step = translate(plain, find("a100")).step
    mine = (step.storages.kind == Kind.WORKSPACE) & (step.storages.producer < 0)
    assert step.storages.bytes[mine].tolist() == [8519680] * 2
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    step = translate(plain, find("a100")).step
    assert (
        step.storages.bytes[(step.storages.kind == Kind.WORKSPACE) & (step.storages.producer < 0)].tolist()
        == [131072] * 2
    )


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", ["gpt", "lstm", "tobf16", "cnn_bn"])
def test_translation_is_valid_step_without_unknown_ops(name: str) -> None:
    plain = record(Workload.load(ZOO[name]), target="cuda")
    ours = translate(plain, find("h100"))
    for size in (2, 4, 7):
        ours.at(size).validate()
    assert unknown_ops(ours.step) == []
    assert translate(ours, find("h100")) is ours
    order = np.lexsort((1 - plain.step.saves.is_output.astype(int), plain.step.saves.packed_before))
    assert np.array_equal(order, np.arange(len(order)))  # what the translation sorts new saves into


def test_translation_without_a_table_has_torchs_dropout_and_optimizer(tmp_path: Path) -> None:
    plain = recorded(tmp_path, cuda=False)
    ours = translate(plain, find("max1550"))
    used = {ours.step.names[i] for i in ours.step.ops.name}
    assert table.DROPOUT[0] in used
    assert not any("bernoulli" in name for name in used)
    assert "aten._foreach_addcdiv_.ScalarList" in used
    assert any(table.CPU_ATTENTION in name for name in used)
    counters = plain.hints[plain.small].step_counters
    states = ours.step.storages.kind == Kind.OPTIMIZER
    assert np.count_nonzero(ours.step.storages.tier[states] == Tier.HOST) == len(counters) > 0
    assert "memtune has no table of xpu's" in ours.notes[-1]


def test_translation_names_unknown_ops(tmp_path: Path) -> None:
    plain = recorded(tmp_path, cuda=False)
    names = tuple("mylib.fused.default" if name == "aten.add.Tensor" else name for name in plain.step.names)
    ours = translate(replace(plain, step=replace(plain.step, names=names)), find("a100"))
    assert any("no translation for mylib.fused.default" in note for note in ours.notes)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "drop"), [("bfloat16", 0.0), ("bfloat16", 0.1), ("float32", 0.0)])
def test_translated_live_bytes_equal_real_cuda_run(
    tmp_path: Path, device: str, dtype: str, drop: float
) -> None:
    """Op by op: what torch says is allocated on the device against the translated step."""
    if device == "cpu":
        pytest.skip("compares with the allocator of an accelerator")
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from memtune.hardware.spec import detect
    from memtune.runtime.training_step import train_step

    plain = recorded(tmp_path, cuda=False, dtype=dtype, drop=drop)
    ours, module = translate(plain, detect(device)).at(4), torch.get_device_module(device)
    rounded = ours.with_storages(
        bytes=-(-np.where(ours.storages.kind == Kind.WORKSPACE, 0, ours.storages.bytes) // 512) * 512
    )
    live = rounded.live_bytes()
    want = [
        (ours.names[ours.ops.name[i]], int(live[i]))
        for i in range(ours.ops.n)
        if ours.ops.phase[i] < Phase.OPTIMIZER
    ]
    workload = Workload.load(tmp_path / "model_False.py")
    model = workload.build_model().to(device)
    optimizer = workload.make_optimizer(model)
    batches = [workload.make_batch(4)]
    for _ in range(2):
        train_step(model, optimizer, workload.loss, batches, torch.device(device))
    workspaces = module.memory_allocated() - sum(
        -(-each.untyped_storage().nbytes() // 512) * 512
        for each in [
            *model.parameters(),
            *(t for state in optimizer.state.values() for t in state.values() if t.device.type == device),
        ]
    )
    got: list[tuple[str, int]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            got.append((str(func), module.memory_allocated() - workspaces))
            return out

    with Watch():
        train_step(model, optimizer, workload.loss, batches, torch.device(device))
    matches = difflib.SequenceMatcher(
        None, [a for a, _ in want], [b for b, _ in got], autojunk=False
    ).get_matching_blocks()
    pairs = [(want[m.a + i], got[m.b + i]) for m in matches for i in range(m.size)]
    assert len(pairs) > 0.5 * len(want)
    if device != "cuda":
        return  # a rehearsal: there is no table for this device
    assert len(pairs) >= 0.95 * len(want), sorted({a for a, _ in want} - {b for b, _ in got})
    off = [(a[0], a[1] - b[1]) for a, b in pairs if abs(a[1] - b[1]) > max(4096, 0.01 * b[1])]
    assert not off, off[:10]


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("target", "is_fused"), [("xpu", True), ("cuda", False)])
def test_grouped_attention_is_composed_only_for_devices_with_a_table(target: str, is_fused: bool) -> None:
    names = record(Workload.load(ZOO["hf_llama"]), target=target).step.names
    assert any(table.CPU_ATTENTION in name for name in names) is is_fused
