"""Real transfers of four processes over one link: uncoordinated, under the token, and of disjoint blocks.

    python benchmarks/link_contention.py [--rounds N] [--json FILE]

The link is a pipe that is read at a constant rate, and each process sends its swapped blocks through it with
`memtune.offload.parameters.link_token.LinkToken` and the block masks of `link_coordination`, as
`orchestrated` does. Computation is a wait, so that nothing but the link is shared: the figures are of
contention and order on a link, not of a GPU. A step is forward and backward over all blocks; a block's copy
begins one block before it is used (`window: 2`), and all processes meet at the end of a step, as for the
average of gradients. All modes send equal bytes.

Modes alternate in every round. `ratio` is the median over rounds of the uncoordinated step time over the
mode's, with the smallest and largest; `fairness` is Jain's index of the time that each process waits for
copies, 1 if all wait equally long.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from memtune.offload.parameters.link_coordination import place_of, swapped_blocks
from memtune.offload.parameters.link_token import LinkToken

FORK = multiprocessing.get_context("fork")
RANKS, BLOCKS, STEPS = 4, 24, 3
BLOCK_BYTES, PIECE_BYTES, RATE_BYTES_PER_S = 4 << 20, 1 << 20, 200e6
COMPUTE_S = 0.025
"""Time of a block: one copy alone (21 ms) is hidden by it, four at once (84 ms) are not."""
MODES = ("none", "token", "disjoint")


def moments(place: int, mode: str) -> list[tuple[int, bool]]:
    """Return the blocks of a step in order of use, and whether the block is copied before it."""
    swapped = swapped_blocks(BLOCKS, RANKS, place if mode == "disjoint" else 0)
    order = [*range(BLOCKS), *reversed(range(BLOCKS))]
    # Once a pass, the last block too, so that all masks copy equal bytes.
    return [(block, block in swapped) for block in order]


def send(link: int, token: LinkToken | None) -> None:
    """Send a block over the link, in pieces."""
    piece = memoryview(bytes(PIECE_BYTES))
    for _ in range(BLOCK_BYTES // PIECE_BYTES):
        with nullcontext() if token is None else token.exclusive():
            rest = piece
            while rest:
                rest = rest[os.write(link, rest) :]


def run_rank(rank: int, path: Path, link: int, mode: str, meet: Any, results: Any) -> None:
    """Run the steps of one process; report its seconds per step, and those that it waited for copies."""
    token = LinkToken(path, rank, RANKS) if mode == "token" else None
    steps, waited = [], 0.0
    with ThreadPoolExecutor(1) as copies:
        for _ in range(STEPS):
            meet.wait()
            began, order = time.perf_counter(), moments(place_of(rank, RANKS, RANKS), mode)
            arriving = copies.submit(send, link, token) if order[0][1] else None
            for at in range(len(order)):
                if arriving is not None:
                    asked = time.perf_counter()
                    arriving.result()
                    waited += time.perf_counter() - asked
                following = at + 1 < len(order) and order[at + 1][1]
                arriving = copies.submit(send, link, token) if following else None
                time.sleep(COMPUTE_S)
            meet.wait()
            steps.append(time.perf_counter() - began)
    results.put((rank, steps, waited))


def drain(link: int, received: list[int]) -> None:
    """Read the link at its rate until all writers have closed it; append the bytes."""
    began, total = time.perf_counter(), 0
    while part := os.read(link, 1 << 16):
        now, total = time.perf_counter(), total + len(part)
        # An idle link does not save up its rate for later.
        began = max(began, now - total / RATE_BYTES_PER_S)
        if (rest := began + total / RATE_BYTES_PER_S - now) > 0:
            time.sleep(rest)
    received.append(total)


def run_mode(mode: str) -> dict[str, Any]:
    """Return the median step time of all processes in a mode, the fairness of their waits, and the bytes."""
    path, meet, results = LinkToken.create(RANKS), FORK.Barrier(RANKS), FORK.Queue()
    reading, writing = os.pipe()
    children = [
        FORK.Process(target=run_rank, args=(rank, path, writing, mode, meet, results))
        for rank in range(RANKS)
    ]
    for child in children:
        child.start()
    os.close(writing)
    received: list[int] = []
    reader = threading.Thread(target=drain, args=(reading, received))
    reader.start()
    found = sorted(results.get() for _ in children)
    for child in children:
        child.join()
    reader.join()
    os.close(reading)
    path.unlink()
    waits = [waited for *_, waited in found]
    return {
        "step_s": statistics.median(step for _, steps, _ in found for step in steps),
        "waited_s": sum(waits) / RANKS / STEPS,
        "fairness": jain(waits),
        "bytes": received[0],
    }


def jain(values: Sequence[float]) -> float:
    """Return Jain's fairness index, between 1/n and 1; 1 if all values are zero."""
    squares = sum(each * each for each in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def rows(rounds: int) -> list[dict[str, Any]]:
    """Return a row per mode, over rounds in which the modes alternate."""
    found = [{mode: run_mode(mode) for mode in MODES} for _ in range(rounds)]
    assert len({each["bytes"] for modes in found for each in modes.values()}) == 1
    made = []
    for mode in MODES:
        ratios = [modes["none"]["step_s"] / modes[mode]["step_s"] for modes in found]
        medians = {
            key: round(statistics.median(modes[mode][key] for modes in found), 4)
            for key in ("step_s", "waited_s", "fairness")
        }
        spread = {name: round(of(ratios), 3) for name, of in (("least", min), ("most", max))}
        made.append({"mode": mode, **medians, "ratio": round(statistics.median(ratios), 3), **spread})
    return made


def main() -> None:
    """Print a row per mode, and write them as JSON if requested."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found = rows(asked.rounds)
    for row in found:
        print(row)
    if asked.json:
        asked.json.write_text(
            json.dumps({"schema": 1, "rounds": asked.rounds, "rows": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
