"""LoHan (Fuyou, Ratel): Liao et al. 2024, arXiv:2403.06504. Recorded before the first comparison.

The paper: on one RTX 4090 a step of a 13B model is 2.32 times as fast as with the best baseline;
ZeRO-Infinity, whose optimizer runs after backward, has the GPU idle for 40 to 70 % of a step. Batch and
number of drives of these figures are uncertain, so several are simulated, not one point.
"""

from __future__ import annotations

from dataclasses import replace

from published.paper import Shape

from memtune.hardware.spec import Hardware, find

SPEED_UP = 2.32
IDLE, IDLE_LOHAN = (0.40, 0.70), 0.10
MICRO_BATCHES = (8, 16, 32, 64)
DRIVES = (3, 12)
DRIVE_READ_BYTES_PER_S, DRIVE_WRITE_BYTES_PER_S = 6.5e9, 3.4e9
HOST_LINKS_BYTES_PER_S = 32e9
SOURCES = {
    "SPEED_UP": (
        "abstract of version 2: 2.32 times the throughput of the best baseline with a 13B model on an RTX"
        " 4090"
    ),
    "IDLE": (
        "motivation: with ZeRO-Infinity's optimizer after backward the GPU is idle for 40 to 70 % of a step"
    ),
    "IDLE_LOHAN": (
        "that updates inside backward leave next to none is the paper's claim; 10 % is what is asked of the"
        " simulator"
    ),
    "MICRO_BATCHES": "the paper's batches for 13B (fm)",
    "DRIVES": "up to 12 Intel P5510 (fm), and a quarter of them, to see what they decide",
    "DRIVE_READ_BYTES_PER_S": "data sheet of the Intel P5510: 6.5 GB/s sequential read, 3.4 GB/s write",
    "HOST_LINKS_BYTES_PER_S": (
        "two PCIe 4.0 x16 slots with switches, at 16 GB/s of use each; all drives together (fm)"
    ),
    "HARDWARE": (
        "the hardware table's RTX 4090; a server's host memory: the table's 100 GB/s of host Adam for the "
        "V100"
    ),
}
SHAPE = Shape(
    40,
    5120,
    40,
    1024,
    50304,
    "GPT-3 13B, arXiv:2005.14165, table 2.1, with 40 heads for its 40.6; sequences (fm)",
)


def machine(drives: int) -> Hardware:
    """Return one card with that many drives."""
    return replace(
        find("rtx-4090"),
        ssd_read_bytes_per_s=min(drives * DRIVE_READ_BYTES_PER_S, HOST_LINKS_BYTES_PER_S),
        ssd_write_bytes_per_s=min(drives * DRIVE_WRITE_BYTES_PER_S, HOST_LINKS_BYTES_PER_S),
        host_adam_bytes_per_s=find("v100").host_adam_bytes_per_s,
    )
