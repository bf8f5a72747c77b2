"""Only memtune/device knows devices: no other file names CUDA in code that runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in ("memtune", "autotune", "executors", "search_spaces")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not path.is_relative_to(ROOT / "memtune" / "device")
]


_TYPES = "cuda|hip|rocm|xpu|npu|mps|nccl|rccl|xccl|hccl|privateuse1|privateuseone"
ATTRIBUTE = re.compile(rf"(is_)?({_TYPES})(_available)?|is_({_TYPES})_\w+|_cuda_\w+")
"""Of torch or a tensor: `torch.xpu`, `x.is_cuda`, `dist.is_nccl_available`, `torch._C._cuda_emptyCache`."""
WORD = re.compile(rf"(?i)(?<![a-z0-9_])(is_)?({_TYPES})(?![a-z0-9_])|^_cuda_|^Autograd(cuda|xpu)$")
"""In a text without spaces; texts with spaces are messages."""
OWN_ALLOCATOR = ROOT / "memtune" / "memory" / "cuda_arena.py"
"""Puts memtune's allocator under CUDA's functions in torch, whose names it has to know."""
SOURCE_FILE = re.compile(r"aten/src/|torch/csrc/")
"""Files of torch in which a figure was found."""


def strays(source: str) -> Iterator[str]:
    """Yield the uses of `torch.cuda`, `is_cuda` and the word "cuda", and of other devices' names, which only
    conditions and calls need.
    """
    tree = ast.parse(source)
    texts = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=str(name)) if ATTRIBUTE.fullmatch(name):
                yield f"{node.lineno}: {name}"
            case ast.Import(names=names) if any(_is_device_module(each.name) for each in names):
                yield f"{node.lineno}: import of a device's module"
            case ast.ImportFrom(module=str(module), names=names) if any(
                _is_device_module(f"{module}.{each.name}") for each in names
            ):
                yield f"{node.lineno}: from {module}"
            case ast.Constant(value=str() | bytes() as value) if id(node) not in texts:
                text = value if isinstance(value, str) else value.decode("latin1")
                if WORD.search(text) and not re.search(r"\s", text.strip()) and not SOURCE_FILE.match(text):
                    yield f"{node.lineno}: {text!r}"


def _is_device_module(name: str) -> bool:
    return any(ATTRIBUTE.fullmatch(part) for part in name.split("."))


def test_only_the_device_room_names_devices() -> None:
    assert len(SOURCES) > 300
    found = [
        f"{path.relative_to(ROOT)}:{each}"
        for path in SOURCES
        for each in strays(path.read_text("utf-8"))
        if path != OWN_ALLOCATOR or "_cuda_" not in each
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "torch.cuda.synchronize()",
        "from torch import cuda",
        "import torch.cuda.nvtx",
        "from torch.backends import cuda",
        "torch.backends.cuda.matmul.allow_tf32",
        "if torch.version.cuda: pass",
        "torch._C._cuda_emptyCache()",
        "torch.device(f'cuda:{rank}')",
        "x.is_cuda",
        "if device.type == 'cuda': pass",
        "sizes = {'cpu': 1, 'cuda': 2}",
        "backend = 'nccl'",
        "library.impl(name, kernel, 'CUDA')",
        "importlib.import_module('torch.cuda')",
        "getattr(x, 'is_cuda')",
        "dist.init_process_group('cpu:gloo,cuda:nccl')",
        "if re.match('cuda|hip', kind): pass",
        "if device.type in 'xpu,npu': pass",
        "if b'cuda' in name: pass",
        "if torch.version.hip: pass",
        "torch.xpu.synchronize()",
        "x.is_xpu",
        "dist.is_nccl_available()",
        "match kind:\n    case 'npu': pass",
    ],
)
def test_device_is_found_by_its_names(source: str) -> None:
    assert list(strays(source))
    assert not list(strays(f'"""A docstring: {source}."""'))


def test_messages_and_settings_may_name_a_device() -> None:
    assert not list(
        strays('print("torch.cuda has more"); read("PYTORCH_CUDA_ALLOC_CONF"); a = "cudaMallocAsync"')
    )
