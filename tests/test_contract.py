"""Imports run one way, and techniques know nothing of each other: read from the source, so that lazy imports count too."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from memtune import errors

ROOT = Path(__file__).parents[1]
PACKAGES = ("memtune", "autotune", "executors", "search_spaces")

# From top to bottom; a module may import from its own line and from those below. What no line names stands on the last.
LAYERS = (
    ("memtune.cli", "memtune.tui", "memtune.testing", "memtune.__main__", "memtune.autotune.tui", "memtune.autotune.report"),
    ("memtune.autotune",),
    ("memtune.executors",),
    ("memtune._apply", "memtune.config"),
    ("memtune.search_spaces",),
    ("memtune.technique", "memtune.runtime", "memtune.ops"),
    ("memtune.program", "memtune.workload", "memtune.hardware", "memtune.errors", "memtune.units", "memtune._native"),
)
LIGHT = {"torch", "numpy", "pydantic", "ruamel", "memtune"}
LIGHT_FROM = 3  # the layers from _apply, config down are what a training image holds


@dataclass(frozen=True)
class Import:
    """One import statement: who imports whom, and where it stands."""

    importer: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


def sources() -> dict[str, Path]:
    """Dotted module name → file, for every Python file of the package; rglob does not enter the links."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts if package == "memtune" else ("memtune", *parts))
            found[name.removesuffix(".__init__")] = path
    return found


def imports_of(name: str, path: Path, known: dict[str, Path]) -> Iterator[Import]:
    """Every import in `path`; `from package import module` counts as the module."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (Import(name, alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            assert node.level == 0, f"{name}:{node.lineno}: imports are absolute"
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield Import(name, full if full in known or base == "memtune" else base, node.lineno)


def all_imports() -> list[Import]:
    known = sources()
    return [found for name, path in known.items() for found in imports_of(name, path, known)]


def layer(module: str) -> int:
    """Number of the line in LAYERS with the longest name that is `module` or holds it."""
    fits = [(len(name), row) for row, names in enumerate(LAYERS) for name in names if f"{module}.".startswith(f"{name}.")]
    return max(fits)[1] if fits else len(LAYERS) - 1


def is_technique(module: str, known: dict[str, Path]) -> bool:
    """A file of search_spaces/<axis>/ that is neither a package nor a helper (`_name`)."""
    path = known.get(module)
    return (
        path is not None
        and module.startswith("memtune.search_spaces.")
        and not path.stem.startswith("_")
        and path.parent != ROOT / "search_spaces"
    )


def test_the_sources_are_found() -> None:
    known = sources()
    assert {"memtune", "memtune.errors", "memtune.autotune", "memtune.executors", "memtune.search_spaces"} <= set(known)
    assert len(set(known.values())) == len(known)


def test_imports_run_from_top_to_bottom() -> None:
    inside = [found for found in all_imports() if found.target.startswith("memtune.") and found.importer != "memtune"]
    upward = [str(found) for found in inside if layer(found.importer) > layer(found.target)]
    assert not upward, "\n".join(upward)


def test_no_technique_imports_another() -> None:
    known = sources()
    pairs = [found for found in all_imports() if is_technique(found.importer, known) and is_technique(found.target, known)]
    assert not pairs, "\n".join(map(str, pairs))


GPU_KERNELS = "memtune.runtime.quantised_triton"


def test_light_runtime_imports_only_what_a_training_image_has() -> None:
    allowed = LIGHT | set(sys.stdlib_module_names)
    light = [found for found in all_imports() if layer(found.importer) >= LIGHT_FROM]
    light = [
        found for found in light if not (found.importer.startswith("memtune.planners.") and found.target.startswith("scipy."))
    ]
    # torch's CUDA builds bring Triton along, and the file is imported for tensors on a GPU alone.
    light = [found for found in light if (found.importer, found.target.partition(".")[0]) != (GPU_KERNELS, "triton")]
    heavy = [str(found) for found in light if found.target.partition(".")[0] not in allowed]
    assert not heavy, "\n".join(heavy)


@pytest.mark.parametrize(
    ("package", "homes"),
    [
        ("ray", ("memtune.executors",)),
        ("optuna", ("memtune.autotune",)),
        ("scipy", ("memtune.planners",)),
        ("typer", ("memtune.cli",)),
        ("textual", ("memtune.tui", "memtune.autotune.tui")),
    ],
)
def test_each_large_package_has_its_home(package: str, homes: tuple[str, ...]) -> None:
    users = [found for found in all_imports() if found.target.partition(".")[0] == package]
    strays = [str(found) for found in users if not found.importer.startswith(homes)]
    assert not strays, "\n".join(strays)


def test_an_error_code_means_one_exit_code():
    """A script that sees MT301 must not have to guess whether nothing fits or a package is missing."""
    exits: dict[str, dict[int, str]] = {}
    for name, path in sources().items():
        calls = (node for node in ast.walk(ast.parse(path.read_text(), str(path))) if isinstance(node, ast.Call))
        for call in calls:
            raised = getattr(errors, call.func.id, None) if isinstance(call.func, ast.Name) else None
            codes = [each.value.value for each in call.keywords if each.arg == "code" and isinstance(each.value, ast.Constant)]
            if isinstance(raised, type) and codes:
                exits.setdefault(codes[0], {})[raised.exit_code] = f"{name}:{call.lineno}"
    assert len(exits) > 60
    assert {code: where for code, where in exits.items() if len(where) > 1} == {}
