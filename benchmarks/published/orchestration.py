"""Tensor Movement Orchestration: Lin et al. 2023, HPCA 23. Recorded before the first comparison.

The paper: replicas whose footprint is 1.33 to 2 times their GPU's memory, over one PCIe channel to the host,
are on average 38.3 to 31.8 % faster than large-model support that ignores contention. The abstract does not
name the models, batches and GPUs of these means. So shape and batches here are ours, and the whole curve over
batches is compared, not one point.
"""

from __future__ import annotations

from dataclasses import replace

from published.paper import Shape

from memtune.hardware.spec import find

RANKS = 4
CHANNEL_BYTES_PER_S = 12e9
PUBLISHED = (1.318, 1.383)
SOURCES = {
    "PUBLISHED": (
        "abstract: average speedups of 38.3 % to 31.8 % for footprints of 1.33 to 2 times the GPU memory"
    ),
    "RANKS": (
        "four GPUs behind one root complex, as data-parallel servers of that time have them; the paper's"
        " number (fm)"
    ),
    "CHANNEL_BYTES_PER_S": (
        "what PCIe 3.0 x16 gives pinned copies, of 15.75 GB/s on the wire; all four share it"
    ),
    "HARDWARE": "V100 of the hardware table",
}
HARDWARE = replace(
    find("v100"),
    host_to_device_bytes_per_s=CHANNEL_BYTES_PER_S,
    device_to_host_bytes_per_s=CHANNEL_BYTES_PER_S,
    gpus_per_pcie_root=RANKS,
    gpus_per_node=RANKS,
)
SHAPE = Shape(24, 1024, 16, 512, 30522, "BERT-large's sizes, as a decoder")
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
ACCUMULATE = (1, 16)
"""Micro-batches between gradient exchanges, on which the paper's gain depends; added after the first
comparison, which had 1.
"""
WINDOW = 2
STRIDE = RANKS
