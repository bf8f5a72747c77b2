"""Importing memtune is light, and so is everything that a training image needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SEARCH_ONLY = {"ray", "optuna", "rich", "textual", "typer", "psutil", "filelock", "sqlalchemy", "scipy"}
NOT_LIGHT = {"cli", "tui", "testing", "__main__"}
GPU_KERNELS = "quantised_triton"  # imported for tensors on a GPU alone, where torch brings Triton along


def loaded_after(code: str, tmp_path: Path) -> set[str]:
    """Top-level names in sys.modules of a fresh interpreter that ran `code` in an unrelated folder."""
    script = f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def light_modules() -> list[str]:
    """Dotted names of the light runtime: memtune/*.py, memtune/runtime and search_spaces."""
    paths = [path for path in (ROOT / "memtune").glob("*.py") if path.stem not in NOT_LIGHT]
    paths += (path for path in (ROOT / "memtune" / "runtime").rglob("*.py") if path.stem != GPU_KERNELS)
    names = [path.relative_to(ROOT) for path in paths]
    names += [Path("memtune") / path.relative_to(ROOT) for path in (ROOT / "search_spaces").rglob("*.py")]
    return sorted(".".join(name.with_suffix("").parts).removesuffix(".__init__") for name in names)


def test_import_memtune_loads_nothing_heavy(tmp_path: Path) -> None:
    assert not loaded_after("import memtune; memtune.__version__; dir(memtune)", tmp_path) & (
        SEARCH_ONLY | {"torch", "numpy", "pydantic"}
    )


def test_updater_process_loads_no_torch(tmp_path: Path) -> None:
    """Each domain of `smart_infinity` has one: torch would take seconds of its start and 200 MiB."""
    assert "torch" not in loaded_after("import memtune.offload.near_storage.update_worker", tmp_path)


def test_readers_of_event_logs_load_no_torch(tmp_path: Path) -> None:
    """`memtune watch` and the report would take seconds to start."""
    code = "import memtune.autotune.search.search_events, memtune.autotune.ui.tui"
    assert "torch" not in loaded_after(code, tmp_path)


def test_light_runtime_loads_no_search_package_and_touches_no_device(tmp_path: Path) -> None:
    """A plan, imported after it, loads neither the study's packages nor a display's."""
    modules = light_modules()
    assert {"memtune.technique", "memtune.search_spaces", "memtune.runtime"} <= set(modules)
    code = f"""
import importlib, sys, torch
already = set(sys.modules)  # torch may load some of these on its own one day
for name in {modules}: importlib.import_module(name)
assert not torch.cuda.is_initialized()
assert not {SEARCH_ONLY} & (set(sys.modules) - already)
import memtune.autotune.search.plan_report
"""
    assert not loaded_after(code, tmp_path) & {"optuna", "ray", "textual", "rich"}
