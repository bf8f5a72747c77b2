"""The pluggable CUDA allocator's C symbols over a stand-in for the driver: what a GPU would be asked, one message per refusal."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from memtune import _native

SOURCE = Path(__file__).parents[2] / "reference" / "libcuda.c"
COMPILER = shutil.which("cc") or shutil.which("gcc")
BEGIN = """
import ctypes, sys
from memtune import _native
driver, plugin = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(_native.__file__)
alloc, free, record = plugin.memtune_cuda_alloc, plugin.memtune_cuda_free, plugin.memtune_cuda_record_stream
pointer = ctypes.c_void_p
alloc.restype, alloc.argtypes = pointer, [ctypes.c_size_t, ctypes.c_int, pointer]
free.argtypes, record.argtypes = [pointer, ctypes.c_size_t, ctypes.c_int, pointer], [pointer, pointer]
tell = lambda what, value: driver.stand_in_set(what.encode(), value)
MIB = 1 << 20
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("no C compiler")
    made = tmp_path_factory.mktemp("driver")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", str(SOURCE), "-o", str(made / "libcuda.so.1")], check=True)
    return made


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    return subprocess.run([sys.executable, "-c", BEGIN + code], env=env, capture_output=True, text=True, check=False)


def test_stitched_memory_is_written_and_read(folder: Path) -> None:
    done = run(folder, """
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
""")  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


def test_block_that_another_stream_works_on_waits_for_it(folder: Path) -> None:
    done = run(folder, """
tell("pass", 0)
block = alloc(4 * MIB, 0, 1)
record(block, 2)
free(block, 4 * MIB, 0, 1)
other = alloc(4 * MIB, 0, 1)
assert other != block
tell("pass", 1)
assert alloc(4 * MIB, 0, 1) == block
print("right")
""")  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("tell('capturing', 1); alloc(4 * MIB, 0, 1)", "does not serve the capture of CUDA graphs"),
        ("alloc(200 * MIB, 0, 1)", "CUDA out of memory: memtune's allocator was asked for 209715200 bytes on GPU 0"),
        ("tell('supported', 0); alloc(4 * MIB, 0, 1)", "cannot map memory"),
        ("alloc(4 * MIB, 3, 1)", "cuDeviceGet: no such device"),
        ("free(4096, 4 * MIB, 0, 1)", "no block begins here"),
    ],
)
def test_refusals_are_one_message(folder: Path, code: str, message: str) -> None:
    done = run(folder, code)
    assert done.returncode != 0
    assert message in done.stderr  # ctypes does not hand errors on: the process ends with what was thrown


def test_machine_without_a_driver_says_so() -> None:
    assert "CUDA driver" in _native.arena_open(0) or Path("/dev/nvidia0").exists()
