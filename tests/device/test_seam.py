"""Only memtune/device knows devices: no other file names CUDA in code that runs."""

from __future__ import annotations

import ast
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


NAMES = ("cuda", "CUDA", "AutogradCUDA", "hip", "xpu", "XPU", "npu", "nccl")
OWN_ALLOCATOR = ROOT / "memtune" / "memory" / "cuda_arena.py"
"""Puts memtune's allocator under CUDA's functions in torch, whose names it has to know."""


def strays(source: str) -> Iterator[str]:
    """Yield the uses of `torch.cuda`, `is_cuda` and the word "cuda", which only conditions and calls need."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr=str(name)) if name in ("cuda", "is_cuda") or name.startswith("_cuda_"):
                yield f"{node.lineno}: {name}"
            case ast.Import(names=names) if any("cuda" in each.name.split(".") for each in names):
                yield f"{node.lineno}: import of cuda"
            case ast.ImportFrom(module=str(module), names=names) if "cuda" in (
                *module.split("."),
                *(each.name for each in names),
            ):
                yield f"{node.lineno}: from {module}"
            case ast.Constant(value=str(text)) if text in NAMES or text.startswith(("cuda:", "_cuda_")):
                yield f"{node.lineno}: {text!r}"


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
    ],
)
def test_device_is_found_by_its_names(source: str) -> None:
    assert list(strays(source))
    assert not list(strays(f'"""A docstring: {source}."""'))
