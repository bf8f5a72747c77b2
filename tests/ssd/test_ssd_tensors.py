"""Tensors on SSD: reads return the written bytes, and bytes that cannot be read raise an error with the
tensor's name.
"""

from __future__ import annotations

import errno
import gc
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from memtune.errors import EnvironmentFault
from memtune.runtime.memory_tiers import tier_of
from memtune.ssd.ssd_file import ALIGN, WRITE_PRIORITY, _Free
from memtune.ssd.ssd_tensors import Disk


@pytest.fixture(params=["auto", "threads"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    yield Disk(tmp_path / "tensors", engine=request.param, block_bytes=8192)
    gc.collect()


def stored(disk: Disk, values: torch.Tensor, name: str = "layer.weight") -> torch.Tensor:
    ssd = disk.tensor(name, values)
    disk.store(ssd, values).result()
    return ssd


def test_tensors_of_any_type_and_layout_round_trip(disk: Disk) -> None:
    for values in (
        torch.randn(3, 5),
        torch.randn(70, 1000).t(),
        torch.randn(50000).bfloat16(),
        torch.tensor(2.0),
        torch.ones(0),
        torch.arange(9) > 4,
    ):
        ssd = stored(disk, values)
        assert (ssd.dtype, ssd.shape, ssd.stride()) == (values.dtype, values.shape, values.stride())
        assert tier_of(ssd) == "ssd"
        back = torch.empty_strided(values.size(), values.stride(), dtype=values.dtype)
        disk.load(back, ssd).result()
        assert torch.equal(back, values)


def test_freed_extents_are_reused(disk: Disk) -> None:
    for _ in range(50):
        kept = [stored(disk, torch.full((100_000,), float(n))) for n in range(4)]
        assert disk.used_bytes >= 4 * 400_000
        del kept[::2]
        del kept
    assert disk.used_bytes == 0
    assert disk.path.stat().st_size <= 64 << 20


def test_read_and_release_wait_for_a_running_write(disk: Disk) -> None:
    first, second = torch.randn(500_000), torch.randn(500_000)
    ssd = disk.tensor("a", first)
    disk.store(ssd, first)
    disk.store(ssd, second)
    back = torch.empty_like(second)
    disk.load(back, ssd).result()
    assert torch.equal(back, second)
    disk.store(ssd, first)
    del ssd
    assert disk.used_bytes == 0


def test_memory_of_an_abandoned_transfer_lives_until_close(tmp_path: Path) -> None:
    """The engine's thread writes data and checksums into it; a reused address would be overwritten."""
    disk = Disk(tmp_path / "tensors")
    extent, memory = disk.reserve("a", 1 << 20), np.zeros(1 << 20, np.uint8)
    of_read, of_write = weakref.ref(memory), weakref.ref(extent)
    disk.move(True, extent, memory, WRITE_PRIORITY)
    disk.move(False, extent, memory, 0)
    del extent, memory
    assert of_read() is not None
    assert of_write() is not None
    stored(disk, torch.ones(9))
    assert len(disk._under_way) == 2  # awaited transfers are not kept
    del disk
    gc.collect()
    assert of_read() is of_write() is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), max_size=60))
def test_free_ranges_never_overlap_taken_ones(steps: list[tuple[int, int]]) -> None:
    free, taken = _Free([(0, 40)]), []
    for size, which in steps:
        if which < 3 and taken:
            free.give(*taken.pop(which % len(taken)))
        elif (offset := free.take(size)) is not None:
            taken.append((offset, size))
        both = sorted(free.ranges + taken)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(both))
        assert sum(n for _, n in both) == 40
        assert all(a + n < b for (a, n), (b, _) in pairwise(free.ranges))


# -- errors --------------------------------------------------------------------------------------------------


def failure(disk: Disk, ssd: torch.Tensor) -> EnvironmentFault:
    with pytest.raises(EnvironmentFault) as caught:
        disk.load(torch.empty(ssd.shape), ssd).result()
    assert "layer.weight" in caught.value.what
    return caught.value


def test_checksum_finds_every_flipped_bit(disk: Disk) -> None:
    values = torch.randn(25_000)
    ssd = stored(disk, values)
    with open(disk.path, "r+b") as file:
        for at in range(0, 100_000, 1000):
            file.seek(at)
            (right,) = file.read(1)
            for byte in (right ^ (1 << at // 1000 % 8), right):
                file.seek(at)
                file.write(bytes([byte]))
                file.flush()
                os.fsync(file.fileno())
                if byte != right:
                    assert failure(disk, ssd).code == "MT363"
    back = torch.empty_like(values)
    disk.load(back, ssd).result()
    assert torch.equal(back, values)


def test_messages_name_the_users_directory(tmp_path: Path) -> None:
    (inside := tmp_path / "memtune-run-1-abc").mkdir()
    disk = Disk(inside / "tensors")
    ssd = stored(disk, torch.randn(25_000))
    os.truncate(disk.path, 0)
    assert failure(disk, ssd).evidence == f"In {tmp_path}, block 0 of it."
    with pytest.raises(EnvironmentFault) as caught:
        Disk(inside / "missing" / "tensors")
    assert (
        caught.value.what
        == f"No file can be made in the offload directory {tmp_path}: No such file or directory."
    )


def test_truncated_file_raises_and_deleted_file_works(disk: Disk) -> None:
    values = torch.randn(25_000)
    ssd = stored(disk, values)
    os.truncate(disk.path, ALIGN * 2)
    assert failure(disk, ssd).code == "MT364"
    os.truncate(disk.path, 64 << 20)  # long enough again, but zeros
    assert failure(disk, ssd).code == "MT363"
    disk.store(ssd, values).result()
    disk.path.unlink()
    back = torch.empty_like(values)
    disk.load(back, ssd).result()
    assert torch.equal(back, values)


def run(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", dedent(code), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_full_drive_raises_before_any_write(tmp_path: Path) -> None:
    """A file may not grow beyond 1 MiB: a tensor that fits is stored, one that does not is refused and leaves
    no hole.
    """
    out = run(
        """
        import resource, signal, sys, torch
        from pathlib import Path
        from memtune.errors import EnvironmentFault
        from memtune.ssd.ssd_tensors import Disk
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        disk, values = Disk(Path(sys.argv[1]) / "tensors"), torch.randn(100_000)
        kept = []
        try:
            for n in range(9):
                kept.append(disk.tensor(f"layer.{n}", values))
                disk.store(kept[-1], values).result()
        except EnvironmentFault as error:
            print(error)
        back = torch.empty_like(values)
        disk.load(back, kept[0]).result()
        assert torch.equal(back, values) and disk.used_bytes <= 1 << 20
        """,
        str(tmp_path),
    )
    assert "MT362 There is no room for layer.2 on SSD" in out
    assert "MiB free in" in out or "GiB free in" in out


def test_small_drive_raises_when_full(tmp_path: Path) -> None:
    if os.geteuid() != 0 or os.system(f"mount -t tmpfs -o size=4m none {tmp_path} 2>/dev/null") != 0:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        (inside := tmp_path / "memtune-run-1-abc").mkdir()
        disk = Disk(inside / "tensors")
        kept = [stored(disk, torch.full((500_000,), 3.0))]
        with pytest.raises(EnvironmentFault, match=r"no room for layer\.1 on SSD: No space left") as caught:
            disk.tensor("layer.1", torch.empty(2_000_000))
        assert f"free in {tmp_path}." in caught.value.evidence
        (inside / "manifest-0").touch()
        with pytest.raises(EnvironmentFault) as caught:
            disk.tensor("layer.1", torch.empty(2_000_000))
        assert (
            "; runs that ended keep 1.91 MiB to resume from, which memtune clean removes."
            in caught.value.evidence
        )
        shutil.rmtree(inside)
        with pytest.raises(EnvironmentFault, match=r"no room for layer\.1 on SSD: No space left") as caught:
            disk.tensor("layer.1", torch.empty(2_000_000))
        assert caught.value.evidence.endswith(f"free in {tmp_path}.")
        back = torch.empty(500_000)
        disk.load(back, kept[0]).result()
        assert (back == 3.0).all()
        del disk, kept
        gc.collect()
    finally:
        os.system(f"umount -l {tmp_path}")


def test_engine_falls_back_to_threads_without_io_uring(tmp_path: Path) -> None:
    """A seccomp filter answers io_uring_setup with EPERM, as in containers."""
    out = run(
        """
        import ctypes, platform, struct, sys, torch
        from pathlib import Path
        from memtune.ssd.ssd_tensors import Disk
        libc = ctypes.CDLL(None, use_errno=True)
        # load the number of the system call; io_uring_setup (425 everywhere): EPERM, else: allowed
        rows = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
        program = b"".join(struct.pack("HBBI", *row) for row in rows)
        code = ctypes.create_string_buffer(program)
        filter = struct.pack("HxxxxxxQ", len(rows), ctypes.addressof(code))
        if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, filter, 0, 0):
            print("not allowed")
            sys.exit()
        disk, values = Disk(Path(sys.argv[1]) / "tensors"), torch.randn(100_000)
        ssd = disk.tensor("a", values)
        disk.store(ssd, values).result()
        back = torch.empty_like(values)
        disk.load(back, ssd).result()
        assert torch.equal(back, values)
        print(disk.engine.backend, disk.engine.refused)
        """,
        str(tmp_path),
    )
    if out == "not allowed\n":
        pytest.skip("filters of system calls are not allowed here")
    assert out == f"threads io_uring_setup: {os.strerror(errno.EPERM)}\n"


def test_tensor_in_a_truncated_file_raises(disk: Disk) -> None:
    kept = stored(disk, torch.randn(1000))
    os.truncate(disk.path, 0)
    with pytest.raises(EnvironmentFault, match="truncated") as caught:
        disk.tensor("layer.bias", torch.zeros(1000))
    assert caught.value.code == "MT364"
    assert "layer.bias" in caught.value.what
    assert disk.used_bytes == kept.numel() * 4 + 96  # filled up to a block of the file


class _Held:
    """Something that a frame holds."""


def test_ticket_error_holds_no_frames(disk: Disk) -> None:
    """Else a failed transfer would keep the graph whose tensors on SSD keep their file, and the engine would
    outlive the process.
    """
    ssd = stored(disk, torch.randn(1000))
    os.truncate(disk.path, 0)
    ticket = disk.load(torch.empty(1000), ssd)

    def asked() -> weakref.ref[_Held]:
        held = _Held()
        with pytest.raises(EnvironmentFault, match="truncated"):
            ticket.result()
        return weakref.ref(held)

    assert [asked()(), asked()()] == [None, None]


def test_leaked_file_holds_no_engine(tmp_path: Path) -> None:
    """A reference such as that of an error in a nested backward, which torch keeps with the frames that it
    passed.
    """
    script = f"""
import ctypes
from pathlib import Path
from memtune.ssd.ssd_tensors import Disk
ctypes.pythonapi.Py_IncRef(ctypes.py_object(Disk(Path({str(tmp_path / "tensors")!r}))))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "leaked" not in done.stderr
