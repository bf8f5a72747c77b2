"""Harmony: Li et al. 2022, VLDB 15(11). Recorded before the first comparison.

The paper: up to 7.6 times the throughput of virtual memory for each GPU, which swaps (4m + 2)|W| for m
micro-batches and overlaps none of it with computation; Harmony swaps 3|W|. Pack sizes are searched by
simulation. The mini-batch of each ratio is unknown, so one is cut into several numbers of micro-batches.
"""

from __future__ import annotations

from published import stronghold

UP_TO = 7.6
MINI_BATCH, MICRO_BATCHES = 16, (1, 2, 4, 8)
BUDGETS_GIB = (8, 12, 24)
SOURCES = {
    "UP_TO": "abstract: up to 7.6 times",
    "MINI_BATCH": "chosen, not published",
    "BUDGETS_GIB": "10 GiB is the default of the paper's simulator; chosen around it",
    "HARDWARE": f"STRONGHOLD's, not the paper's 1080 Ti: {stronghold.SOURCES['HARDWARE']}",
}
HARDWARE, SHAPE = stronghold.HARDWARE, stronghold.SHAPE
