"""PatrickStar: Fang et al. 2021, arXiv:2108.05818. Recorded before the first comparison, except the shape.

The paper: models 2.27 times as large as DeepSpeed's on a node of eight V100 with 240 GB of host memory.
"""

from __future__ import annotations

from published.paper import Shape

from memtune.hardware.spec import find

SCALE = 2.27
RANKS, MICRO_BATCH, LAYERS = 8, 8, range(8, 65)
DEVICE_BYTES, HOST_BYTES = 30 << 30, (240 << 30) // RANKS
SOURCES = {
    "SCALE": "abstract: 2.27 times, against DeepSpeed on a node of the class of eight V100 (fm)",
    "DEVICE_BYTES": "a 32 GB V100 without CUDA's context",
    "HOST_BYTES": "240 GB of host memory (fm), divided evenly",
    "SHAPE": "chosen: one width for all sizes, layers are searched",
}
HARDWARE = find("v100")
WIDTH = Shape(0, 4096, 32, 1024, 50304, SOURCES["SHAPE"])
