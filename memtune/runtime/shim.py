"""The exact, near-free CPU ledger: torch's own CPU allocator, replaced by one that counts and has a budget.

`cpu_ledger.cpp` needs torch's allocator interface, so it cannot ship in a wheel that serves every torch version: it is compiled
once per torch, with the host's C++ compiler, into the user's cache directory. Where that is impossible `available()` says why
and `memtune.runtime.ledger.ModeLedger` takes its place.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
import threading
from pathlib import Path

import torch

from memtune.errors import EnvironmentFault
from memtune.runtime import tiers
from memtune.runtime.tiers import DEVICE, TIERS, Tier

_SOURCE = Path(__file__).with_name("cpu_ledger.cpp")
_BUILD_TIMEOUT_S = 300
_lock = threading.Lock()
_installed = False


def cache_dir() -> Path:
    """Where memtune keeps what can be made again: `$MEMTUNE_CACHE`, else `$XDG_CACHE_HOME/memtune`, else `~/.cache/memtune`."""
    if own := os.environ.get("MEMTUNE_CACHE"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "memtune"


def _compile_command() -> list[str]:
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        raise EnvironmentFault("no C++ compiler was found", fix="install g++ or set CXX", code="MT411")
    root = Path(torch.__file__).parent
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    return [
        *compiler.split(), "-O2", "-std=c++20", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-I{root / 'include'}",
        f"-L{root / 'lib'}", "-lc10", "-ldl",
    ]  # fmt: skip


def _library_path() -> Path:
    key = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    return cache_dir() / "native" / f"cpu_ledger-torch{torch.__version__}-{sysconfig.get_config_var('SOABI')}-{key}.so"


def _build(target: Path) -> None:
    """Compiles the ledger to `target`; two processes that do so at once both end with a whole file (rename is atomic)."""
    command = _compile_command()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        run = subprocess.run(
            [*command[:-4], str(_SOURCE), *command[-4:], "-o", str(made)],
            capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False,
        )  # fmt: skip
        if run.returncode != 0:
            errors = [line for line in run.stderr.splitlines() if "error" in line] or run.stderr.splitlines() or ["no output"]
            raise EnvironmentFault(
                f"{command[0]} could not compile memtune's CPU ledger against torch {torch.__version__}",
                evidence=errors[0].strip(), fix="install a C++20 compiler (g++ 10 or newer) or set CXX", code="MT412",
            )  # fmt: skip
        os.replace(made, target)


@functools.cache
def _load() -> ctypes.PyDLL | EnvironmentFault:
    """The compiled ledger, or why there is none; decided once per process."""
    path = _library_path()
    try:
        if not path.exists():
            _build(path)
        # PyDLL keeps the GIL: every call here is shorter than giving it up and taking it back.
        library = ctypes.PyDLL(str(path))
    except EnvironmentFault as fault:
        return fault
    except (OSError, subprocess.SubprocessError) as error:
        return EnvironmentFault("memtune's CPU ledger could not be built or loaded", evidence=str(error), code="MT413")
    int64, address = ctypes.c_int64, ctypes.c_void_p
    for name, arguments, result in (
        ("install", [], None), ("live", [ctypes.c_int], int64), ("peak", [ctypes.c_int], int64), ("reset_peak", [], None),
        ("set_budget", [ctypes.c_int, int64], None), ("set_tier", [ctypes.c_int], None), ("tier_of", [address], ctypes.c_int),
        ("set_source", [address, address], None), ("source_live", [], int64),
    ):  # fmt: skip
        function = getattr(library, f"memtune_ledger_{name}")
        function.argtypes, function.restype = arguments, result
    return library


def _library() -> ctypes.PyDLL:
    loaded = _load()
    if isinstance(loaded, EnvironmentFault):
        raise loaded
    return loaded


def available() -> EnvironmentFault | None:
    """Why the native ledger cannot be used here (no compiler, say), or None when it can; compiles it the first time."""
    loaded = _load()
    return loaded if isinstance(loaded, EnvironmentFault) else None


def install() -> None:
    """Makes the ledger torch's CPU allocator for the rest of the process; once is enough, more does nothing.

    Storages made before are not counted, so this belongs before the model is built.

    Raises:
        EnvironmentFault: It could not be compiled or loaded; `available()` tells without raising.
    """
    global _installed
    library = _library()
    with _lock:
        if not _installed:
            library.memtune_ledger_install()
            tiers.connect(library.memtune_ledger_set_tier, library.memtune_ledger_tier_of)
            _installed = True


def installed() -> bool:
    """Whether torch allocates through the ledger in this process."""
    return _installed


def live_bytes(tier: Tier = DEVICE) -> int:
    """Bytes that torch holds in `tier` now, as they were asked of the allocator."""
    return int(_library().memtune_ledger_live(TIERS.index(tier)))


def peak_bytes(tier: Tier = DEVICE) -> int:
    """The most bytes that were live in `tier` since the start or the last `reset_peak`."""
    return int(_library().memtune_ledger_peak(TIERS.index(tier)))


def reset_peak() -> None:
    """Starts the peaks of all tiers again from what is live now."""
    _library().memtune_ledger_reset_peak()


def set_budget(budget_bytes: int | None, tier: Tier = DEVICE) -> None:
    """A request that would bring `tier` above `budget_bytes` raises `torch.OutOfMemoryError` from now on; None: no limit."""
    _library().memtune_ledger_set_budget(TIERS.index(tier), -1 if budget_bytes is None else budget_bytes)


def set_source(take: int | None, give: int | None) -> None:
    """Storages of the device tier take their memory from the C function at address `take` from now on; None: from malloc again.

    What was taken goes back through `give`, also later on.

    Args:
        take: `void* (int64_t bytes)`; null when it has no memory.
        give: `void (void*)`.
    """
    _library().memtune_ledger_set_source(take, give)


def source_live_bytes() -> int:
    """Bytes of the device tier that the source of `set_source` serves now; all others are malloc's."""
    return int(_library().memtune_ledger_source_live())


def counted(storage: torch.UntypedStorage) -> bool:
    """Whether `storage`'s bytes came from the ledger, so that `live_bytes` holds them."""
    return int(_library().memtune_ledger_tier_of(storage._cdata)) >= 0
