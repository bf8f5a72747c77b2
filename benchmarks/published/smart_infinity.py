"""Smart-Infinity: Jang et al. 2024, HPCA 24. Recorded before the first comparison.

The paper: compared with ZeRO-Infinity on software RAID0, updates inside the drives make a step of GPT-2 8.4B
(batch 4) 1.18 to 1.24 times as fast with 6 drives and 1.54 to 1.60 times with 10, 1.60 to 1.66 with its
handler; with one drive it is slightly slower. The baseline stops gaining at 4 drives, where the drives
together are as fast as the host's interconnect.
"""

from __future__ import annotations

from dataclasses import replace

from published.paper import Shape

from memtune.hardware.spec import Hardware, find

DRIVES = (1, 2, 4, 6, 8, 10)
PUBLISHED = {6: (1.18, 1.24), 10: (1.54, 1.66)}
"""By number of drives: the least and the largest speed-up, the handler included."""
DRIVE_READ_BYTES_PER_S, DRIVE_WRITE_BYTES_PER_S = 3.3e9, 2.2e9
LINK_BYTES_PER_S = 12e9
DRIVE_MEMORY_BYTES_PER_S = 19.2e9
SOURCES = {
    "PUBLISHED": (
        "evaluation: SmartUpdate 1.18 to 1.24 (6 drives), 1.54 to 1.60 (10), with the handler 1.60 to 1.66"
    ),
    "DRIVE_READ_BYTES_PER_S": "sequential read of a SmartSSD behind PCIe 3.0 x4 (fm)",
    "DRIVE_WRITE_BYTES_PER_S": "sequential write of the same (fm)",
    "LINK_BYTES_PER_S": (
        "what PCIe 3.0 x16 gives; four such drives fill it, as the paper finds of its baseline"
    ),
    "DRIVE_MEMORY_BYTES_PER_S": "one channel of DDR4-2400 at each drive's FPGA (fm)",
    "HARDWARE": "the hardware table's A10 for the paper's A5000, of the same generation",
}
SHAPE = Shape(
    72,
    3072,
    32,
    1024,
    50304,
    "8.3 billion parameters, the shape of Megatron's GPT-2; the paper's own is not known",
)
MICRO_BATCH = 4


def baseline(drives: int) -> Hardware:
    """Return RAID0 over `drives` behind one link."""
    return replace(
        find("a10"),
        host_to_device_bytes_per_s=LINK_BYTES_PER_S,
        device_to_host_bytes_per_s=LINK_BYTES_PER_S,
        ssd_read_bytes_per_s=min(drives * DRIVE_READ_BYTES_PER_S, LINK_BYTES_PER_S),
        ssd_write_bytes_per_s=min(drives * DRIVE_WRITE_BYTES_PER_S, LINK_BYTES_PER_S),
    )


def smart(drives: int) -> Hardware:
    """Return the same drives, each with an updater and memory of its own: state crosses no shared link."""
    return replace(
        baseline(drives),
        ssd_read_bytes_per_s=drives * DRIVE_READ_BYTES_PER_S,
        ssd_write_bytes_per_s=drives * DRIVE_WRITE_BYTES_PER_S,
        host_adam_bytes_per_s=drives * DRIVE_MEMORY_BYTES_PER_S,
    )
