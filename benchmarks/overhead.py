"""Host time that each mechanism adds to a step of small ops, against what one would write by hand.

    python benchmarks/overhead.py [--groups recompute,states] [--rounds 30] [--json FILE] [--markdown FILE]

A GPT whose ops take about ten microseconds (`small_ops/gpt.py`) is trained in one process (`ranks`: two
gloo ranks, both kinds in each process) under memtune's mechanism and under the stock form of the same, in
rotation, in CPU seconds of the process on one thread; copy threads count. Nothing hides host work in such a
step, as in a host-bound step of a GPU. `added` is the time beyond the plain step, recomputed ops included.
Ratios are
medians over rounds of pairs within a round, with quartiles. Counts are of one step (`overhead_clock.Counts`).

Peers: `torch.utils.checkpoint`, selective checkpointing, `save_on_cpu`, which moves nothing of a model on a
CPU, and hooks by hand that move what `copy_out` moves, a cross-entropy in parts by hand, a
host AdamW by hand (torchao's `CPUOffloadOptimizer`, which runs on GPUs only, in its order of copies and with
gradients that stay on the host, which memtune frees in every step), weights
fetched per block by module hooks by hand, and accelerate's `cpu_offload` in forward where it is installed;
DDP, `ZeroRedundancyOptimizer`, FSDP2, `parallelize_module` and `torch.distributed.pipelining` on ranks. All
ways of a pipeline run four micro-batches; under memtune each of the two ranks brings two of them.
torchtune's `OffloadActivations` was not compared.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from clock_results import header, options, write
from overhead_cases import Case, Step
from overhead_clock import Counts, Paired, Times, counts_of, measure, paired
from overhead_peers import block_fetching, chunked_loss, forward_alone, host_adam, saved_copied, saved_on_cpu

from memtune.hardware.cpu_cores import cpu_threads
from memtune.search_spaces import find
from memtune.search_spaces.offload.activations.copy_out import CopyOut

GROUPS = ("recompute", "activations", "loss", "states", "ranks")


@dataclass(frozen=True)
class Row:
    """One mechanism and its stock peer."""

    group: str
    mechanism: str
    peer: str
    added_s: float
    """CPU seconds of a step beyond the plain one."""
    peer_added_s: float
    over_plain: Paired
    over_peer: Paired
    counts: Counts
    peer_counts: Counts
    blocks: int


Group = tuple[dict[str, Step], list[tuple[str, str, str]]]
"""Ways by name, and (mechanism, its peer, the plain way) to compare."""


def recompute(case: Case) -> Group:
    """Return recompute techniques at the peaks of full and selective recompute."""
    ways: dict[str, Step] = {
        "plain": case.step(case.build()),
        "torch checkpoint": case.checkpointed(),
        "torch selective checkpoint": case.checkpointed(selective=True),
        "full": case.tuned("recompute", "full"),
        "selective": case.tuned("recompute", "selective"),
    }
    rows = [
        ("full", "torch checkpoint", "plain"),
        ("selective", "torch selective checkpoint", "plain"),
    ]
    for peer, kind in (("torch checkpoint", "full"), ("torch selective checkpoint", "selective")):
        _, peak = case.planned(find("recompute", kind)(kind=kind))
        for name, technique, knobs in (
            ("planned", "planned", {"headroom": 0.0}),
            ("planned by blocks", "planned", {"headroom": 0.0, "by_schedule": False}),
            ("checkmate", "checkmate", {}),
            ("dtr, frozen", "dtr", {}),
            ("dtr, online", "dtr", {"online": True}),
        ):
            way = f"{name} at {kind}'s peak"
            ways[way] = case.tuned("recompute", technique, budget_bytes=peak, **knobs)
            rows.append((way, peer, "plain"))
    return ways, rows


def activations(case: Case) -> Group:
    """Return activation offload of the tensors that `copy_out` moves by default, and of all."""
    least_bytes = CopyOut(kind="copy_out").min_bytes
    ways = {
        "plain": case.step(case.build()),
        "torch save_on_cpu": saved_on_cpu(case),
        "by hand: saved tensors copied by hooks": saved_copied(case, least_bytes),
        "by hand: all saved tensors copied by hooks": saved_copied(case, 0),
        "copy_out": case.tuned("offload.activations", "copy_out"),
        "copy_out, two prefetched": case.tuned("offload.activations", "copy_out", prefetch=2),
        "copy_out, all tensors": case.tuned("offload.activations", "copy_out", min_bytes=0),
    }
    return ways, [
        ("copy_out", "by hand: saved tensors copied by hooks", "plain"),
        ("copy_out", "torch save_on_cpu", "plain"),
        ("copy_out, two prefetched", "by hand: saved tensors copied by hooks", "plain"),
        ("copy_out, all tensors", "by hand: all saved tensors copied by hooks", "plain"),
    ]


def loss(case: Case) -> Group:
    """Return the loss in four parts."""
    ways = {
        "plain": case.step(case.build()),
        "by hand: loss in 4 parts": chunked_loss(case, 4),
        "tiled": case.tuned("split", "tiled", chunks=4),
    }
    return ways, [("tiled", "by hand: loss in 4 parts", "plain")]


def states(case: Case) -> Group:
    """Return optimizer state and weights on the host; all ways update the weights."""
    ways = {
        "plain": case.step(*case.with_optimizer()),
        "by hand: host AdamW": host_adam(case),
        "by hand: host AdamW, gradients in backward": host_adam(case, in_backward=True),
        "by hand: weights fetched by hooks": block_fetching(case),
    }
    rows = []
    for name, peer, kind, knobs in (
        ("optimizer_cpu", "by hand: host AdamW", "optimizer_cpu", {}),
        ("optimizer_cpu, native", "by hand: host AdamW", "optimizer_cpu", {"update": "native"}),
        ("zero_offload", "by hand: host AdamW, gradients in backward", "zero_offload", {}),
        ("l2l", "by hand: weights fetched by hooks", "l2l", {}),
        ("stronghold", "by hand: weights fetched by hooks", "stronghold", {"window": 2}),
        ("patrickstar", "by hand: weights fetched by hooks", "patrickstar", {}),
    ):
        ways[name] = case.tuned("offload.states", kind, updates=True, **knobs)
        rows.append((name, peer, "plain"))
    alone = forward_alone(case)
    if alone:
        ways |= alone
        rows.append(("l2l, forward alone", "accelerate cpu_offload, forward alone", "plain, forward alone"))
    return ways, rows


def timed(group: str, made: Group, blocks: int, rounds: int) -> list[Row]:
    """Return the rows of a group of one process."""
    ways, compared = made
    times = measure(ways, rounds)
    counts = {name: counts_of(way) for name, way in ways.items()}
    return rows_of(group, times, counts, compared, blocks)


def rows_of(
    group: str, times: Times, counts: dict[str, Counts], compared: list[tuple[str, str, str]], blocks: int
) -> list[Row]:
    """Return a row for each mechanism and its peer."""
    rows = []
    for name, peer, plain in compared:
        own, theirs = paired(times, name, plain), paired(times, peer, plain)
        plain_s = paired(times, plain, plain).step_s
        rows.append(
            Row(
                group,
                name,
                peer,
                plain_s * (own.ratio - 1),
                plain_s * (theirs.ratio - 1),
                own,
                paired(times, name, peer),
                counts[name],
                counts[peer],
                blocks,
            )
        )
    return rows


MADE: dict[str, Callable[[Case], Group]] = {
    "recompute": recompute,
    "activations": activations,
    "loss": loss,
    "states": states,
}


def markdown(found: dict[str, Any], rows: list[Row]) -> str:
    """Return the page of results."""
    lines = [
        "# Host time of each mechanism against its stock peer",
        "",
        f"`{found['command']}` on {found['machine']['cpu']}, one thread, {found['rounds']} rounds, CPU time.",
        "A step of six blocks of small ops. `added`: milliseconds beyond the plain step, recomputed ops too.",
        "`ratio`: step time over the peer's, with quartiles; below 1 is cheaper. Counts are memtune's,",
        "then the peer's: ops below autograd, calls of Python, of these entered from C++ (hooks, nodes), ops",
        "seen by dispatch modes, modes entered.",
        *(["", found["note"]] if found["note"] else []),
        "",
        "| group | mechanism | peer | added, ms | peer's | ratio | quartiles | ops | Python calls |"
        " from C++ | dispatched | modes |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        pairs = [
            f"{mine}, {theirs}"
            for mine, theirs in zip(
                asdict(row.counts).values(), asdict(row.peer_counts).values(), strict=True
            )
        ]
        lines.append(
            f"| {row.group} | {row.mechanism} | {row.peer} | {1e3 * row.added_s:.2f} |"
            f" {1e3 * row.peer_added_s:.2f} | {row.over_peer.ratio:.3f} | {row.over_peer.ratio_low:.3f} to"
            f" {row.over_peer.ratio_high:.3f} | {' | '.join(pairs)} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure, print and write the results."""
    parser = options(__doc__, rounds=30)
    parser.add_argument(
        "--groups",
        default=",".join(GROUPS),
        help="of these, with commas between; rows of others that the JSON file has are kept",
    )
    parser.add_argument("--note", default="", help="sentences for the page, on how its groups were measured")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    groups, rows = asked.groups.split(","), list[Row]()
    kept = json.loads(asked.json.read_text())["rows"] if asked.json and asked.json.exists() else []
    rows += [_row(each) for each in kept if each["group"] not in groups]
    case = Case("gpt")
    with cpu_threads(1):
        for group in groups:
            if group == "ranks":
                from overhead_ranks import on_ranks

                rows += on_ranks(asked.rounds)
            else:
                rows += timed(group, MADE[group](case), len(case.blocks), asked.rounds)
            print(f"{group}: done", file=sys.stderr, flush=True)
    rows.sort(key=lambda row: GROUPS.index(row.group))
    found = {
        **header("make bench-overhead", asked),
        "note": asked.note,
        "dearer": [f"{row.mechanism} than {row.peer}" for row in rows if row.over_peer.ratio_low > 1.0],
    }
    text = markdown(found, rows)
    print(text, json.dumps(found["dearer"], indent=1))
    write(asked, found, text, rows=rows)
    return 0


def _row(document: dict[str, Any]) -> Row:
    made: dict[str, Callable[..., Any]] = {
        "over_plain": Paired,
        "over_peer": Paired,
        "counts": Counts,
        "peer_counts": Counts,
    }
    return Row(**{name: made[name](**each) if name in made else each for name, each in document.items()})


if __name__ == "__main__":
    sys.exit(main())
