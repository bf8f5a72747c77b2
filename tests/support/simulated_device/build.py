"""Compilation of the simulated device, once per version of torch and of the sources."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from memtune.errors import EnvironmentFault

_ROOT = Path(__file__).resolve().parents[3]
_CSRC = _ROOT / "csrc"
_HEADERS = ("rows.h", "simulator/allocator.h", "simulator/caching_allocator.h", "simulator/free_list.h")
_BUILD_TIMEOUT_S = 900
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-w")


def _sources() -> list[Path]:
    return [
        *sorted((_CSRC / "simulated_device").glob("*.cpp")),
        _CSRC / "simulator" / "caching_allocator.cpp",
    ]


def library_path() -> Path:
    """Return where the library for this torch and these sources is, whether or not it is built.

    In `$MEMTUNE_CACHE`, else in `build/` of the checkout.
    """
    files = [*_sources(), *(_CSRC / "simulated_device").glob("*.h"), *(_CSRC / name for name in _HEADERS)]
    contents = b"".join(path.read_bytes() for path in sorted(files))
    key = hashlib.sha256(contents + " ".join(_FLAGS).encode()).hexdigest()[:16]
    name = f"simulated_device-torch{torch.__version__}-{sysconfig.get_config_var('SOABI')}-{key}.so"
    return Path(os.environ.get("MEMTUNE_CACHE") or _ROOT / "build") / "simulated_device" / name


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or ["no output"]
        raise EnvironmentFault(
            f"{command[0]} could not compile the simulated device against torch {torch.__version__}",
            evidence=errors[0].strip(),
            fix="install a C++20 compiler (g++ 10 or newer) or set CXX",
            code="MT412",
        )


def build() -> Path:
    """Compile the library unless the cache has it, and return its path.

    Takes about a minute on two cores. Concurrent builds are safe, as rename is atomic.

    Raises:
        EnvironmentFault: There are no sources (an installed package has none), no compiler, or it failed.
    """
    if not (_CSRC / "simulated_device").is_dir():
        raise EnvironmentFault(
            "the simulated device is built from memtune's sources, which an installed package lacks",
            fix="use a checkout of memtune",
            code="MT413",
        )
    target = library_path()
    if target.exists():
        return target
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        raise EnvironmentFault("no C++ compiler was found", fix="install g++ or set CXX", code="MT411")
    torch_root = Path(torch.__file__).parent
    includes = ["-I", str(_CSRC)]
    for folder in (torch_root / "include", torch_root / "include/torch/csrc/api/include"):
        includes += ["-isystem", str(folder)]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder_name:
        folder = Path(folder_name)
        objects = {source: folder / f"{source.stem}.o" for source in _sources()}
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            compile_all = [
                pool.submit(_run, [*compiler.split(), *_FLAGS, *includes, "-c", str(source), "-o", str(made)])
                for source, made in objects.items()
            ]
        for compiled in compile_all:
            compiled.result()
        linked = folder / target.name
        # memtune's own allocator looks for CUDA's driver by this name.
        name = "-Wl,-soname,libcuda.so.1"
        libraries = [f"-L{torch_root / 'lib'}", "-lc10", "-ltorch_cpu"]
        _run([*compiler.split(), "-shared", name, *map(str, objects.values()), *libraries, "-o", str(linked)])
        os.replace(linked, target)
    return target
