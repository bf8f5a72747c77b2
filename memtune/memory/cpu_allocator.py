"""The exact, near-free CPU ledger: replaces torch's CPU allocator by one that counts and enforces a budget.

`cpu_allocator.cpp` needs torch's allocator interface, so it cannot ship in a wheel for every torch version:
it is compiled once per torch version, with the host's C++ compiler, into the user's cache directory. If that
fails `available()` returns the reason and `memtune.memory.ledger.ModeLedger` is used instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
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
from memtune.runtime import DEVICE, TIERS, Tier, memory_tiers

_SOURCE = Path(__file__).with_name("cpu_allocator.cpp")
_BUILD_TIMEOUT_S = 300
_lock = threading.Lock()
_installed = False


def cache_dir() -> Path:
    """Return the cache directory.

    `$MEMTUNE_CACHE`, else `$XDG_CACHE_HOME/memtune`, else `~/.cache/memtune`.
    """
    if own := os.environ.get("MEMTUNE_CACHE"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "memtune"


def _compile_command() -> list[str]:
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        raise EnvironmentFault("no C++ compiler was found", fix="install g++ or set CXX", code="MT411")
    root = Path(torch.__file__).parent
    # As in torch's own build: names of symbols with std::string depend on it.
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    return [
        *compiler.split(),
        "-O2",
        "-std=c++20",
        "-fPIC",
        "-shared",
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        f"-I{root / 'include'}",
        f"-L{root / 'lib'}",
        "-lc10",
        "-ldl",
    ]


def _library_path() -> Path:
    # By the source too: an update of memtune must not load the old build.
    key = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    return (
        cache_dir()
        / "native"
        / f"cpu_ledger-torch{torch.__version__}-{sysconfig.get_config_var('SOABI')}-{key}.so"
    )


def _ensure_built(target: Path) -> None:
    """Compile the ledger to `target` if it is not there; one of the processes that start together does."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks: each process compiles
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _build(target)


def _build(target: Path) -> None:
    """Compile the ledger to `target`; concurrent builds are safe, as rename is atomic."""
    command = _compile_command()
    # In the same file system, or the rename would be a copy that others see half done.
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        run = subprocess.run(
            # Libraries after the source: linkers drop those that nothing before them needs.
            [*command[:-4], str(_SOURCE), *command[-4:], "-o", str(made)],
            capture_output=True,
            text=True,
            timeout=_BUILD_TIMEOUT_S,
            check=False,
        )
        if run.returncode != 0:
            errors = (
                [line for line in run.stderr.splitlines() if "error" in line]
                or run.stderr.splitlines()
                or ["no output"]
            )
            raise EnvironmentFault(
                f"{command[0]} could not compile memtune's CPU ledger against torch {torch.__version__}",
                evidence=errors[0].strip(),
                fix="install a C++20 compiler (g++ 10 or newer) or set CXX",
                code="MT412",
            )
        os.replace(made, target)


@functools.cache
def _load() -> ctypes.PyDLL | EnvironmentFault:
    """Return the compiled ledger, or the fault that prevents it; decided once per process."""
    path = _library_path()
    try:
        _ensure_built(path)
        # PyDLL keeps the GIL: every call here is shorter than releasing and acquiring it.
        library = ctypes.PyDLL(str(path))
    except EnvironmentFault as fault:
        return fault
    except (OSError, subprocess.SubprocessError) as error:
        return EnvironmentFault(
            "memtune's CPU ledger could not be built or loaded", evidence=str(error), code="MT413"
        )
    int64, address = ctypes.c_int64, ctypes.c_void_p
    # Undeclared, ctypes passes and returns C ints: 32 bits, too few for sizes and addresses.
    for name, arguments, result in (
        ("install", [], None),
        ("live", [ctypes.c_int], int64),
        ("peak", [ctypes.c_int], int64),
        ("reset_peak", [], None),
        ("set_budget", [ctypes.c_int, int64], None),
        ("set_tier", [ctypes.c_int], None),
        ("tier_of", [address], ctypes.c_int),
        ("set_source", [address, address], None),
        ("source_live", [], int64),
    ):
        function = getattr(library, f"memtune_ledger_{name}")
        function.argtypes, function.restype = arguments, result
    return library


def _library() -> ctypes.PyDLL:
    loaded = _load()
    if isinstance(loaded, EnvironmentFault):
        raise loaded
    return loaded


def available() -> EnvironmentFault | None:
    """Return why the native ledger cannot be used (no compiler), else None; compiles it at first use."""
    loaded = _load()
    return loaded if isinstance(loaded, EnvironmentFault) else None


def install() -> None:
    """Make the ledger torch's CPU allocator for the rest of the process; idempotent.

    Storages made before are not counted, so call it before the model is built.

    Raises:
        EnvironmentFault: It could not be compiled or loaded; `available()` tells without raising.
    """
    global _installed
    library = _library()
    with _lock:
        if not _installed:
            library.memtune_ledger_install()
            # From here on tiers are kept with the blocks, so that moving one changes the counters at once.
            memory_tiers.connect(library.memtune_ledger_set_tier, library.memtune_ledger_tier_of)
            _installed = True


def installed() -> bool:
    """Return whether torch allocates through the ledger in this process."""
    return _installed


def live_bytes(tier: Tier = DEVICE) -> int:
    """Return the bytes that torch holds in `tier` now, as requested from the allocator."""
    return int(_library().memtune_ledger_live(TIERS.index(tier)))


def peak_bytes(tier: Tier = DEVICE) -> int:
    """Return the peak of live bytes in `tier` since the start or the last `reset_peak`."""
    return int(_library().memtune_ledger_peak(TIERS.index(tier)))


def reset_peak() -> None:
    """Reset the peaks of all tiers to the live bytes."""
    _library().memtune_ledger_reset_peak()


def set_budget(budget_bytes: int | None, tier: Tier = DEVICE) -> None:
    """Raise `torch.OutOfMemoryError` for requests that would bring `tier` above it; None: no limit."""
    _library().memtune_ledger_set_budget(TIERS.index(tier), -1 if budget_bytes is None else budget_bytes)


def set_source(take: int | None, give: int | None) -> None:
    """Allocate the device tier's storages by the C function at address `take`; None: by malloc again.

    Each block is freed through the `give` of its source, even if the source has changed since.

    Args:
        take: `void* (int64_t bytes)`; null when it has no memory.
        give: `void (void*)`.
    """
    _library().memtune_ledger_set_source(take, give)


def source_live_bytes() -> int:
    """Return the bytes of the device tier that the source of `set_source` serves now, not malloc."""
    return int(_library().memtune_ledger_source_live())


def counted(storage: torch.UntypedStorage) -> bool:
    """Return whether `storage`'s bytes came from the ledger, so that `live_bytes` includes them."""
    return int(_library().memtune_ledger_tier_of(storage._cdata)) >= 0
