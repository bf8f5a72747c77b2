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


def strays(source: str) -> Iterator[str]:
    """Yield the uses of `torch.cuda`, `is_cuda` and the word "cuda", which only conditions and calls need."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name("torch"), attr="cuda"):
                yield f"{node.lineno}: torch.cuda"
            case ast.Attribute(attr="is_cuda"):
                yield f"{node.lineno}: is_cuda"
            case ast.Import(names=names) if any(each.name.startswith("torch.cuda") for each in names):
                yield f"{node.lineno}: import torch.cuda"
            case ast.ImportFrom(module=str(module)) if module.startswith("torch.cuda"):
                yield f"{node.lineno}: from torch.cuda"
            case ast.ImportFrom(module="torch", names=names) if any(each.name == "cuda" for each in names):
                yield f"{node.lineno}: from torch import cuda"
            case ast.Constant(
                value="cuda" | "CUDA" | "AutogradCUDA" | "hip" | "xpu" | "XPU" | "npu" | "nccl"
            ):
                yield f"{node.lineno}: {node.value!r}"


def test_only_the_device_room_names_devices() -> None:
    assert len(SOURCES) > 300
    found = [
        f"{path.relative_to(ROOT)}:{each}" for path in SOURCES for each in strays(path.read_text("utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "torch.cuda.synchronize()",
        "from torch import cuda",
        "import torch.cuda.nvtx",
        "x.is_cuda",
        "if device.type == 'cuda': pass",
        "sizes = {'cpu': 1, 'cuda': 2}",
        "backend = 'nccl'",
        "library.impl(name, kernel, 'CUDA')",
    ],
)
def test_each_way_to_name_a_device_is_found(source: str) -> None:
    assert list(strays(source))
    assert not list(strays(f'"""A docstring: {source}."""'))
