"""Rooms: imports run one way, others import from a room's door, passes and planners know no torch.

Everything is read from the source, so that lazy imports count too.
"""

from __future__ import annotations

import ast
import gc
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from memtune import errors
from memtune._door import read_exports

ROOT = Path(__file__).parents[1]
PACKAGES = ("memtune", "autotune", "executors", "search_spaces")

# From the bottom to the top: a room imports from its own line and from the lines above it. Files of memtune/
# itself count as rooms. Rooms of search_spaces are one room here: the catalogue.
ORDER = """
errors units progress _native _door _optional _replaced random_seeds garbage
safe_pickle
program
device
workload
hardware
effects
runtime
ssd memory
technique
refusals
deferred_init
compile
activations.offload
activations.recompute
activations.capture
activations.tiling
activations.schedules
activations.eviction
parallel.ranks
parallel.sharding
parallel.collectives
parallel.replicas
parallel.model
parallel.pipeline
offload.core
offload.gradients
offload.optimizer
offload.parameters
offload.chunks
offload.tiles
offload.layer_major
offload.multiplexed
offload.ssd_states
offload.near_storage
offload.experts
search_spaces
config
checkpointer
audit
api
executors
executors.ray
autotune.translate
autotune.record
autotune.record_parallel
autotune.predict
autotune.space
autotune.search
autotune.ui
autotune.report
scaffold
testing
cli
interactive
__main__
"""
LEVEL = {room: level for level, line in enumerate(ORDER.split("\n")) for room in line.split()}
LIGHT_UP_TO = LEVEL["api"]
"""Rooms up to here are what a training image holds."""
LIGHT = {"torch", "numpy", "pydantic", "ruamel", "memtune"}
GPU_KERNELS = (
    "memtune.parallel.collectives.quantization_triton",
    "memtune.activations.offload.compression_triton",
)
PLAIN = ("_pass", "_planner", "_plan", "_pattern")
"""Stems of files that work on plain data: they import neither torch nor a file that does."""


@dataclass(frozen=True)
class Import:
    """One import of one name: which module imports what from where."""

    importer: str
    module: str
    name: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.name or 'all'} of {self.module}"


def sources() -> dict[str, Path]:
    """Return the file of each module of the package; rglob does not enter the links."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[
                ".".join(parts if package == "memtune" else ("memtune", *parts)).removesuffix(".__init__")
            ] = path
    return found


SOURCES = sources()
IS_ROOM = {name for name, path in SOURCES.items() if path.name == "__init__.py"}


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of each module: parsed by the first test, not where tests are collected."""
    gc.disable()  # each collection would traverse all trees so far, two thirds of the time
    found = {name: ast.parse(path.read_text(), str(path)) for name, path in SOURCES.items()}
    gc.freeze()
    gc.enable()
    return found


def imports_of(name: str) -> Iterator[Import]:
    """Yield every import in the module `name`, one for each imported name."""
    for node in ast.walk(trees()[name]):
        if isinstance(node, ast.Import):
            yield from (Import(name, alias.name, "", node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: imports are absolute"
            yield from (Import(name, node.module or "", alias.name, node.lineno) for alias in node.names)


@cache
def all_imports() -> list[Import]:
    return [each for name in SOURCES for each in imports_of(name)]


def room_of(module: str) -> str:
    """Return the room of a module, without `memtune.`; a file of memtune/ itself is its own room."""
    room = module if module in IS_ROOM else module.rpartition(".")[0]
    if room == "memtune":
        return module.removeprefix("memtune.")
    return "search_spaces" if room.startswith("memtune.search_spaces") else room.removeprefix("memtune.")


def target_of(each: Import) -> str | None:
    """Return the module that an import reaches inside memtune: a submodule, or the module that it names."""
    full = f"{each.module}.{each.name}"
    return full if full in SOURCES else each.module if each.module in SOURCES else None


def home_of(each: Import) -> str | None:
    """Return the file that defines what an import reaches, through the door of its room."""
    target = target_of(each)
    return read_exports(target).get(each.name, target) if target in IS_ROOM else target


@cache
def imports_inside() -> list[Import]:
    """Return the imports of memtune's own modules."""
    return [
        each
        for each in all_imports()
        if target_of(each) not in (None, "memtune") and each.importer != "memtune"
    ]


def test_order_names_every_room() -> None:
    assert {room_of(name) for name in SOURCES} - {
        "memtune",
        "activations",
        "parallel",
        "offload",
        "autotune",
    } <= set(LEVEL)


def test_imports_run_one_way_between_rooms() -> None:
    upward = [
        str(each)
        for each in imports_inside()
        if (mine := room_of(each.importer)) != (theirs := room_of(target_of(each)))
        and not each.importer.endswith(("activations", "parallel", "offload", "autotune"))
        and LEVEL[theirs] > LEVEL[mine]
    ]
    assert not upward, "\n".join(upward)


def test_other_rooms_import_from_the_door() -> None:
    """Files of one room import each other; all other files import from the room, and only its exports."""
    around = []
    for each in imports_inside():
        target = target_of(each)
        mine = each.importer if each.importer in IS_ROOM else each.importer.rpartition(".")[0]
        theirs = target if target in IS_ROOM else target.rpartition(".")[0]
        if (
            mine == theirs
            or theirs in ("memtune", "memtune.cli")
            or theirs.startswith("memtune.search_spaces")
        ):
            continue
        if not each.name:
            continue  # `import memtune.runtime.seam` registers operators and uses no name
        if each.module != theirs and target not in IS_ROOM:
            around.append(f"{each}: import it from {theirs}")
        elif each.module == theirs and each.name not in exported(theirs):
            around.append(f"{each}: {theirs} does not export it")
    assert not around, "\n".join(around)


def exported(room: str) -> set[str]:
    """Return the names that a room exports: through its door, else those in `__all__`."""
    if exports := read_exports(room):
        return set(exports)
    for node in trees()[room].body:
        if isinstance(node, ast.Assign) and [getattr(each, "id", "") for each in node.targets] == ["__all__"]:
            return set(ast.literal_eval(node.value))
    return set()


def defines(module: str, name: str) -> bool:
    """Return whether `module` has a function or class `name`."""
    return any(getattr(each, "name", "") == name for each in trees()[module].body)


DOORS = sorted(name for name in IS_ROOM if "open_door" in SOURCES[name].read_text())


@pytest.mark.parametrize("room", DOORS)
def test_door_reexports_names_of_files_that_exist(room: str) -> None:
    exports = read_exports(room)
    under_check = next(node for node in trees()[room].body if isinstance(node, ast.If))
    names = [alias for each in under_check.body if isinstance(each, ast.ImportFrom) for alias in each.names]
    # `import A` alone is no re-export for type checkers of those who use memtune.
    assert [each.name for each in names if each.asname != each.name] == []
    # An attribute of a package that is also a submodule would hide the export once the submodule is loaded.
    hidden = {
        name
        for name, home in exports.items()
        if f"{room}.{name}" in SOURCES and (home != f"{room}.{name}" or defines(home, name))
    }
    assert not hidden
    missing = {name: home for name, home in exports.items() if home not in SOURCES}
    assert not missing


@pytest.mark.parametrize(
    "room", sorted(IS_ROOM - {"memtune"} - {each for each in IS_ROOM if "search_spaces." in each})
)
def test_room_has_a_page_with_invariants_and_how_to_add(room: str) -> None:
    lines = SOURCES[room].with_name("README.md").read_text().splitlines()
    assert any(line.startswith("## Invariants") for line in lines)
    assert any(line.startswith(("## Adding", "## How to add", "## To add")) for line in lines)


@pytest.mark.parametrize(
    "room", sorted(IS_ROOM - {"memtune"} - {each for each in IS_ROOM if "search_spaces" in each})
)
def test_page_of_a_room_names_its_files(room: str) -> None:
    folder = SOURCES[room].parent
    page = folder.joinpath("README.md").read_text()
    assert [
        path.name for path in folder.glob("*.py") if not path.stem.startswith("__") and path.stem not in page
    ] == []


@pytest.mark.parametrize("room", sorted(name for name in IS_ROOM if "." in name))
def test_room_has_a_folder_of_tests_of_its_name(room: str) -> None:
    if room.endswith("_common"):
        return  # base classes, tested by the techniques in the folder above
    parts = [part.lstrip("_") for part in room.split(".")[1:]]
    folder = ROOT.joinpath("tests", *parts)
    assert list(folder.rglob("test_*.py")) or folder.with_name(f"test_{folder.name}.py").exists()


def test_stems_name_one_file() -> None:
    """Except for techniques, whose stem is their `kind`: the null ones, and a paper on two axes."""
    by_stem: dict[str, list[str]] = {}
    for name, path in SOURCES.items():
        if path.name != "__init__.py" and not is_technique(name):
            by_stem.setdefault(path.stem, []).append(name)
    assert {stem: names for stem, names in by_stem.items() if len(names) > 1} == {}


def test_open_door_loads_an_export_and_names_what_it_does_not_export() -> None:
    hardware = importlib.import_module("memtune.hardware")
    assert hardware.Hardware.__module__ == "memtune.hardware.spec"
    with pytest.raises(AttributeError, match="exports no 'nothing'"):
        _ = hardware.nothing


def test_passes_and_planners_know_no_torch() -> None:
    """Planning runs on plain data: passes and planners import neither torch nor a file that imports torch."""
    with_torch = {name for name, tree in trees().items() if imports_torch(tree)}
    plain = {name for name in SOURCES if name.endswith(PLAIN) or name.startswith("memtune.program.")}
    wrong = [
        str(each)
        for each in all_imports()
        if each.importer in plain and each.module.partition(".")[0] == "torch"
    ]
    wrong += [
        f"{each}, which imports torch"
        for each in imports_inside()
        if each.importer in plain and home_of(each) in with_torch and not inside_type_checking(each)
    ]
    assert not wrong, "\n".join(wrong)


def imports_torch(tree: ast.Module) -> bool:
    """Return whether loading the module loads torch: an import inside a function does not."""
    modules = [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    return any(name.partition(".")[0] == "torch" for name in modules)


def inside_type_checking(each: Import) -> bool:
    """Return whether the import stands under `if TYPE_CHECKING:`."""
    return any(
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
        and node.lineno <= each.line <= node.body[-1].end_lineno
        for node in trees()[each.importer].body
    )


def is_technique(module: str | None) -> bool:
    """Return whether a module is a file of search_spaces/<axis>/, no package and no helper (`_name`)."""
    parts = (module or "").split(".")
    return (
        parts[:2] == ["memtune", "search_spaces"]
        and len(parts) > 3
        and module not in IS_ROOM
        and not any(part.startswith("_") for part in parts)
    )


def test_techniques_do_not_import_one_another() -> None:
    pairs = [
        str(each)
        for each in imports_inside()
        if is_technique(each.importer) and is_technique(target_of(each))
    ]
    assert not pairs, "\n".join(pairs)


def test_light_runtime_imports_only_what_a_training_image_has() -> None:
    allowed = LIGHT | set(sys.stdlib_module_names)
    heavy = []
    for each in all_imports():
        top = each.module.partition(".")[0]
        if (
            each.importer in ("memtune", *IS_ROOM)
            or LEVEL[room_of(each.importer)] > LIGHT_UP_TO
            or top in allowed
        ):
            continue
        if top == "scipy" and each.importer.endswith("_planner"):
            continue  # only a search plans
        if top == "triton" and each.importer in GPU_KERNELS:
            continue  # torch's CUDA builds bring Triton, and the file is imported for tensors on a GPU alone
        heavy.append(str(each))
    assert not heavy, "\n".join(heavy)


@pytest.mark.parametrize(
    ("package", "homes"),
    [
        ("ray", ("memtune.executors.ray",)),
        ("optuna", ("memtune.autotune",)),
        (
            "scipy",
            (
                "memtune.activations.schedules",
                "memtune.offload.multiplexed",
                "memtune.parallel.pipeline",
                "memtune.autotune",
            ),
        ),
        ("typer", ("memtune.cli",)),
        ("textual", ("memtune.autotune.ui",)),
    ],
)
def test_large_packages_have_their_homes(package: str, homes: tuple[str, ...]) -> None:
    users = [each for each in all_imports() if each.module.partition(".")[0] == package]
    strays = [str(each) for each in users if not each.importer.startswith(homes)]
    assert not strays, "\n".join(strays)


def test_error_code_has_one_exit_code():
    """A script that sees MT301 must not have to guess whether nothing fits or a package is missing."""
    exits: dict[str, dict[int, str]] = {}
    for name, tree in trees().items():
        calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
        for call in calls:
            raised = getattr(errors, call.func.id, None) if isinstance(call.func, ast.Name) else None
            codes = [
                each.value.value
                for each in call.keywords
                if each.arg == "code" and isinstance(each.value, ast.Constant)
            ]
            if isinstance(raised, type) and codes:
                exits.setdefault(codes[0], {})[raised.exit_code] = f"{name}:{call.lineno}"
    assert len(exits) > 60
    assert {code: where for code, where in exits.items() if len(where) > 1} == {}
