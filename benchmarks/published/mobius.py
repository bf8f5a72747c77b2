"""Mobius: Feng et al. 2023, ASPLOS 23. Recorded before the first comparison.

The paper: on servers of four consumer GPUs without direct links a step takes 3.8 to 5.1 times less than with
DeepSpeed's heterogeneous memory (ZeRO-3 with shards in host memory), over several model sizes and PCIe
topologies.
"""

from __future__ import annotations

from dataclasses import replace

from published.paper import Shape

from memtune.hardware.spec import Hardware, find

RANKS = 4
SPEED_UP = (3.8, 5.1)
ROOTS = (4, 2)
CHANNEL_BYTES_PER_S = 12e9
MICRO_BATCH = 2
FORESEEN = {"3B": {4: 4.6, 2: 3.4}, "8B": {4: 4.9, 2: 3.4}}
"""Ratios by GPUs per root, expected of two mechanisms before either was built: gathers through the host share
the root with copies (11 |W| instead of 9 |W| in one direction, overlapped with the update), and host updates
overlap the next step's forward, so that a step is as long as its longest link or the host, not their sum.
Neither changes a constant.
"""
SOURCES = {
    "SPEED_UP": "abstract: 3.8 to 5.1 times less time than prior art, for several models and topologies",
    "RANKS": "four GPUs (fm); a step has a micro-batch of each",
    "ROOTS": "GPUs behind one root complex: all four, or two and two (fm)",
    "CHANNEL_BYTES_PER_S": (
        "what PCIe 3.0 x16 gives pinned copies, of 15.75 GB/s on the wire; shared behind one root"
    ),
    "MICRO_BATCH": "(fm)",
    "HARDWARE": (
        "the hardware table's RTX 3090 for the paper's 3090 Ti (fm); gathers between GPUs that cannot reach"
        " each other go through the host, over the root that its copies go over, and share it with them"
    ),
}
SHAPES = {
    "3B": Shape(32, 2560, 32, 512, 50304, "the paper's number of parameters; layers and width are ours"),
    "8B": Shape(40, 4096, 32, 512, 50304, "as above (fm)"),
}


def machine(root: int) -> Hardware:
    """Return a machine with `root` GPUs behind each root complex."""
    return replace(
        find("rtx-3090"),
        host_to_device_bytes_per_s=CHANNEL_BYTES_PER_S,
        device_to_host_bytes_per_s=CHANNEL_BYTES_PER_S,
        intra_link_bytes_per_s=CHANNEL_BYTES_PER_S,
        gpus_per_pcie_root=root,
        links_through_host=True,
        gpus_per_node=RANKS,
    )
