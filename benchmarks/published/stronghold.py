"""STRONGHOLD: Sun et al. 2022, SC 22. Recorded before the first comparison.

The paper: on one V100 1.2 to 3.7 times the throughput of baselines that keep state on the host or on SSD
(L2L, ZeRO-Offload, ZeRO-Infinity). The batch of each ratio is unknown, so several batches are simulated, not
one point.
"""

from __future__ import annotations

from dataclasses import replace

from published.paper import Shape

from memtune.hardware.spec import find

SPEED_UP = (1.2, 3.7)
MICRO_BATCHES = (2, 4, 8, 16)
SOURCES = {
    "SPEED_UP": "abstract: 1.2 to 3.7 times the throughput of state-of-the-art offloading, on a 32 GB V100",
    "MICRO_BATCHES": "4 (fm) and its neighbours",
    "HARDWARE": (
        "the hardware table's V100: PCIe 3.0 x16; its fp16 rate for the recorded 16-bit type; its SSD for"
        " ZeRO-Infinity"
    ),
}
_V100 = find("v100")
HARDWARE = replace(_V100, bf16_flops_per_s=_V100.fp16_flops_per_s)
SHAPE = Shape(20, 2560, 16, 1024, 30522, "the paper's 1.7B model (fm)")
