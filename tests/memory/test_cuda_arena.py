"""The pluggable CUDA allocator's C functions over a fake driver: calls, and one message per refusal."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from memtune import _native

SOURCE = Path(__file__).parents[1] / "reference" / "libcuda.c"
COMPILER = shutil.which("cc") or shutil.which("gcc")
BEGIN = """
import ctypes, sys
from memtune import _native
driver, plugin = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(_native.__file__)
alloc, free, record = plugin.memtune_cuda_alloc, plugin.memtune_cuda_free, plugin.memtune_cuda_record_stream
pointer = ctypes.c_void_p
alloc.restype, alloc.argtypes = pointer, [ctypes.c_size_t, ctypes.c_int, pointer]
free.argtypes, record.argtypes = [pointer, ctypes.c_size_t, ctypes.c_int, pointer], [pointer, pointer]
tell = lambda what, value: driver.fake_driver_set(what.encode(), value)
MIB = 1 << 20
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("no C compiler")
    made = tmp_path_factory.mktemp("driver")
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-O1", str(SOURCE), "-o", str(made / "libcuda.so.1")], check=True
    )
    return made


def run(folder: Path, code: str, before: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", before + BEGIN + code], env=env, capture_output=True, text=True, check=False
    )


RIGHT = {
    "stitched_memory_is_written_and_read": """
blocks = [alloc(4 * MIB, 0, 1) for _ in range(32)]
for number, block in enumerate(blocks):
    ctypes.memset(block, number, 4 * MIB)
for block in blocks[::2]:
    free(block, 4 * MIB, 0, 1)
big = alloc(60 * MIB, 0, 1)
ctypes.memset(big, 77, 60 * MIB)
for number, block in list(enumerate(blocks))[1::2]:
    assert ctypes.string_at(block, 4 * MIB) == bytes([number]) * (4 * MIB)
assert ctypes.string_at(big, 60 * MIB) == bytes([77]) * (60 * MIB)
found = _native.arena_statistics(0)
assert found.reserved_bytes == 128 * MIB and found.states[2] == 1, found.states
calls = found.driver_calls
free(big, 60 * MIB, 0, 1)
assert alloc(60 * MIB, 0, 1) == big
assert _native.arena_statistics(0).driver_calls == calls
print("right")
""",
    "block_that_another_stream_works_on_waits_for_it": """
tell("pass", 0)
block = alloc(4 * MIB, 0, 1)
record(block, 2)
free(block, 4 * MIB, 0, 1)
assert _native.arena_statistics(0).allocated_bytes == 0  # as torch counts
other = alloc(4 * MIB, 0, 1)
assert other != block
tell("pass", 1)
assert alloc(4 * MIB, 0, 1) == block
print("right")
""",
    "free_without_context_uses_primary_context": """
import threading
block = alloc(4 * MIB, 0, None)
record(block, 2)
thread = threading.Thread(target=lambda: free(block, 4 * MIB, 0, None))
thread.start(); thread.join()
assert alloc(4 * MIB, 0, None) == block
print("right")
""",
    "block_recorded_on_its_own_stream_is_free_at_once": """
tell("pass", 0)
block = alloc(4 * MIB, 0, 1)
record(block, 1)
free(block, 4 * MIB, 0, 1)
assert alloc(4 * MIB, 0, 1) == block
print("right")
""",
}
"""Property of the allocator → code that ends well only with it."""


@pytest.mark.parametrize("name", RIGHT)
def test_allocator_does_as_named(folder: Path, name: str) -> None:
    """The replacement driver ends the process at a call outside of the device's context."""
    done = run(folder, RIGHT[name])
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("tell('capturing', 1); alloc(4 * MIB, 0, 1)", "does not serve the capture of CUDA graphs"),
        ("tell('capturing', 1); alloc(4 * MIB, 0, None)", "does not serve the capture of CUDA graphs"),
        (
            "alloc(200 * MIB, 0, 1)",
            "CUDA out of memory: memtune's allocator was asked for 209715200 bytes on GPU 0",
        ),
        ("tell('supported', 0); alloc(4 * MIB, 0, 1)", "cannot map memory"),
        ("alloc(4 * MIB, 3, 1)", "cuDeviceGet: no such device"),
        ("free(4096, 4 * MIB, 0, 1)", "no block begins here"),
    ],
)
def test_native_refusal_has_one_message(folder: Path, code: str, message: str) -> None:
    done = run(folder, code)
    assert done.returncode != 0
    assert message in done.stderr  # ctypes cannot pass C++ exceptions: the process ends


TORCH = """
import os, types
os.environ["MEMTUNE_ALLOCATOR"] = "kind:planned_layout,planned:1,arena_below_mb:4"
import torch
class Custom:  # what torch's build for CUDA has and the one for CPU lacks
    def __init__(self, alloc, free): self.given = {"alloc": alloc, "free": free}
    def set_record_stream_fn(self, at): self.given["record"] = at
    def set_memory_fraction_fn(self, at): self.given["fraction"] = at
    def set_reset_fn(self, at): self.given["reset"] = at
chosen = []
torch._C._cuda_customAllocator, torch._C._cuda_changeCurrentAllocator = Custom, chosen.append
torch.cuda.memory.is_initialized = lambda: True
torch.cuda.memory._get_device_index = lambda device, optional=True: 0
torch.cuda.device_count = lambda: 1
"""


def test_import_installs_allocator_and_serves_torch_statistics(folder: Path) -> None:
    done = run(
        folder,
        """
from memtune.memory import cuda_arena
settings = cuda_arena.installed()
assert settings.planned and settings.arena_below_mb == 4, settings
(made,) = chosen
pointers = {name: ctypes.cast(getattr(plugin, f"memtune_cuda_{symbol}"), pointer).value for name, symbol in
            dict(alloc="alloc", free="free", record="record_stream", fraction="memory_fraction", reset="empty_cache").items()}
assert made.given == pointers
small, large = alloc(3 * MIB, 0, 1), alloc(9 * MIB, 0, 1)   # small: from the arena
assert torch.cuda.memory_allocated() == 12 * MIB and torch.cuda.memory_reserved() == 14 * MIB
free(large, 9 * MIB, 0, 1)
assert torch.cuda.memory_allocated() == 3 * MIB and torch.cuda.max_memory_allocated() == 12 * MIB
torch.cuda.reset_peak_memory_stats()
assert torch.cuda.max_memory_allocated() == 3 * MIB
assert "Allocated memory" in torch.cuda.memory_summary()
segments = torch.cuda.memory_snapshot()
assert sum(each["total_size"] for each in segments) == 14 * MIB
blocks = [block for each in segments for block in each["blocks"]]
assert [(block["address"], block["size"]) for block in blocks if block["state"] == "active_allocated"] == [(small, 3 * MIB)]
for each in segments:
    assert sum(block["size"] for block in each["blocks"]) == each["total_size"]
fraction = plugin.memtune_cuda_memory_fraction
fraction.argtypes = [ctypes.c_double, ctypes.c_int]
plugin.memtune_cuda_empty_cache()
assert torch.cuda.memory_reserved() == 4 * MIB
fraction(0.125, 0)                                           # of 128 MiB
alloc(12 * MIB, 0, 1)
assert torch.cuda.memory_reserved() == 16 * MIB
print("right", flush=True)
alloc(2 * MIB, 0, 1)
""",  # noqa: E501
        before=TORCH,
    )
    assert done.stdout == "right\n", done.stderr
    assert "CUDA out of memory" in done.stderr


def test_apply_rejects_import_after_cuda_start(folder: Path) -> None:
    done = run(
        folder,
        """
from memtune.errors import ApplyError
from memtune.memory import arena
from memtune.search_spaces.allocator.planned_layout import PlannedLayout
settings = PlannedLayout().settings()
context = types.SimpleNamespace(device=torch.device("cuda", 0))
try:
    arena.use(context, settings)
except ApplyError as error:
    print(str(error))
""",
        before=TORCH
        + """
def refuse(allocator): raise RuntimeError("Can't swap an already initialized allocator")
torch._C._cuda_changeCurrentAllocator = refuse
""",
    )
    assert "CUDA had started before memtune was imported (Can't swap" in done.stdout, done.stderr
    assert "memtune run" in done.stdout


def test_gpu_steps_notify_allocator_of_their_end(folder: Path) -> None:
    """A step of an optimizer on CPU represents one on the GPU.

    What it ends is the GPU's step, and the plan is made of it.
    """
    done = run(
        folder,
        """
import contextlib
from memtune.memory import arena, cuda_arena
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
context = types.SimpleNamespace(device=torch.device("cuda", 0), optimizer=optimizer, undo=contextlib.ExitStack(), checks={})
arena.use(context, cuda_arena.installed())
calls = []
for step in range(8):
    held = [alloc(size * MIB, 0, 1) for size in (3, 5, 2, 7)]
    for size, block in zip((3, 5, 2, 7), held): free(block, size * MIB, 0, 1)
    parameter.grad = torch.ones(1)
    optimizer.step()
    calls.append(_native.arena_statistics(0).driver_calls)
facts = context.checks["allocator"]()
assert facts["kind"] == "planned_layout" and facts["planned_requests"] >= 16 and facts["deviations"] == 0, facts
assert calls[-1] == calls[4]
print("right")
""",  # noqa: E501
        before=TORCH,
    )
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


def test_missing_driver_is_reported() -> None:
    assert "CUDA driver" in _native.arena_open(0) or Path("/dev/nvidia0").exists()
