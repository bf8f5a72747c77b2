"""The SSD engine against `fio` with equal file, block size, depth, direct I/O and page size; and the cost of
checksums.

Every round times every contestant once, in random order: reading and writing with and without checksums, and
fio's read and write of the file that the engine has laid out. Ratios are medians over rounds of the ratios
within a round.

The engine's buffers are on huge pages. fio's default buffers are on pages of 4 KiB: each of its reads of 1
MiB names up to 256 pieces of memory, the engine's names one, which alone can halve the rate of a virtual
drive. The comparison is with fio on huge pages; its rate without them is reported too.

fio is Debian's (`apt-get install fio`); without it the comparison is skipped with the reason, and checksums
are still measured.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from memtune.ssd import offload_dir
from memtune.ssd.ssd_file import Extent
from memtune.ssd.ssd_tensors import Disk
from memtune.units import MIB

HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Has malloc, and so fio, ask for huge pages (glibc 2.35 and later); the system may refuse them, as it may
the engine's.
"""
FIO = {"fio": HUGE_PAGES, "fio, pages of 4 KiB": {}}
FIO_MISSING = "fio is not installed (Debian: apt-get install fio): not compared"


def ours(
    folder: Path, n_bytes: int, depth: int, block_bytes: int, checksums: bool
) -> tuple[Disk, Extent, torch.Tensor]:
    """Return an engine file with one tensor, written once."""
    disk = Disk(folder / f"tensors-{checksums}", depth=depth, block_bytes=block_bytes, checksums=checksums)
    memory = torch.randint(-(2**31), 2**31 - 1, (n_bytes // 4,), dtype=torch.int32)
    extent = disk.reserve("bench", n_bytes)
    disk.write(extent, memory).result()
    return disk, extent, memory


def fio(
    mode: str, disk: Disk, extent: Extent, depth: int, block_bytes: int, environment: dict[str, str]
) -> float:
    """Return the seconds fio takes to read or write `extent` of the engine's file once, through io_uring with
    registered buffers.
    """
    command = [
        "fio",
        f"--name={mode}",
        f"--filename={disk.path}",
        f"--offset={extent.offset}",
        f"--size={extent.n_bytes}",
        f"--rw={mode}",
        f"--bs={block_bytes}",
        f"--iodepth={depth}",
        f"--direct={int(disk.direct)}",
        "--ioengine=io_uring",
        "--fixedbufs=1",
        f"--iomem_align={2 * MIB}",
        "--allow_file_create=0",
        "--fallocate=none",
        "--overwrite=1",
        "--refill_buffers=0",
        "--scramble_buffers=0",
        "--output-format=json",
    ]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return extent.n_bytes / float(json.loads(ran.stdout)["jobs"][0][mode]["bw_bytes"])


def contestants(folder: Path, n_bytes: int, depth: int, block_bytes: int) -> dict[str, Callable[[], float]]:
    """Return one call per contestant that returns its seconds."""

    def timed(begin: Callable[[], Any]) -> Callable[[], float]:
        def run() -> float:
            start = time.perf_counter()
            begin().result()
            return time.perf_counter() - start

        return run

    found = {}
    for checksums in (True, False):
        disk, extent, memory = ours(folder, n_bytes, depth, block_bytes, checksums)
        name = "ours" if checksums else "ours, no checksums"
        found[f"{name}: write"] = timed(lambda d=disk, e=extent, m=memory: d.write(e, m))  # type: ignore[misc]
        found[f"{name}: read"] = timed(lambda d=disk, e=extent, m=memory: d.read(e, m))  # type: ignore[misc]
    if shutil.which("fio") is not None:  # in the file without checksums: what it writes there has none
        for (name, environment), mode in itertools.product(FIO.items(), ("write", "read")):
            found[f"{name}: {mode}"] = functools.partial(
                fio, mode, disk, extent, depth, block_bytes, environment
            )
    return found


def measure(folder: Path, n_bytes: int, depth: int, block_bytes: int, rounds: int) -> dict[str, Any]:
    """Return medians of every contestant, and the ratios compared with aims."""
    calls = contestants(folder, n_bytes, depth, block_bytes)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    for round_ in range(rounds + 1):
        # In random order: the first contestant after a process has started is slower.
        for name in order.sample(sorted(calls), len(calls)):
            taken = calls[name]()
            if round_:
                seconds[name].append(taken)
    rows = {}
    for name, taken_s in seconds.items():
        spread = quartiles(taken_s)
        rows[name] = {
            **{f"{which}_s": s for which, s in spread.items()},
            "bytes_per_s": n_bytes / spread["median"],
        }
    found: dict[str, Any] = {}
    for mode in ("write", "read"):
        if f"fio: {mode}" in seconds:
            found[f"{mode} of fio (aim 0.9)"] = ratio(seconds[f"fio: {mode}"], seconds[f"ours: {mode}"])
            found[f"{mode} of fio on huge pages, of fio on pages of 4 KiB"] = ratio(
                seconds[f"fio, pages of 4 KiB: {mode}"], seconds[f"fio: {mode}"]
            )
        found[f"{mode} with checksums of without (aim 0.97)"] = ratio(
            seconds[f"ours, no checksums: {mode}"], seconds[f"ours: {mode}"]
        )
    return {
        "bytes": n_bytes,
        "depth": depth,
        "block_bytes": block_bytes,
        "rounds": rounds,
        "rows": rows,
        "ratios": found,
    }


def ratio(theirs: list[float], ours: list[float]) -> dict[str, float]:
    """Return the median over rounds, with quartiles."""
    return quartiles([one / other for one, other in zip(theirs, ours, strict=True)])


def quartiles(values: list[float]) -> dict[str, float]:
    """Return the median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "low": low, "high": high}


def main() -> None:
    """Print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="on the drive that is measured")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory, prefix="ssd-bench-") as name:
        folder = Path(name)
        result = measure(folder, given.mib * MIB, given.depth, MIB, given.rounds)
        system = offload_dir.file_system(folder)
        backend = Disk(folder / "probe").engine.backend
    version = (
        subprocess.run(["fio", "--version"], capture_output=True, text=True).stdout.strip()
        if shutil.which("fio")
        else FIO_MISSING
    )
    machine = {
        "file_system": system,
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "engine": backend,
        "fio": version,
    }
    machine["load"] = os.getloadavg()  # type: ignore[assignment]
    for row, value in result["rows"].items():
        print(f"{row:<30} {value['median_s'] * 1e3:9.1f} ms  {value['bytes_per_s'] / 1e9:6.2f} GB/s")
    for row, value in result["ratios"].items():
        print(f"{row:<50} {value['median']:.3f}  ({value['low']:.3f} to {value['high']:.3f})")
    if given.json:
        given.json.write_text(json.dumps({"machine": machine, "result": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
