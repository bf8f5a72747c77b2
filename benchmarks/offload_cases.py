"""Cases of the offload sweep: each technique with options that change placement, and the bytes that its paper
states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Slots = dict[str, Any]
"""`settings` of a config without execution and sharding."""
Links = dict[str, int]
Formula = Callable[["Sizes"], Links]


@dataclass(frozen=True)
class Sizes:
    """Bytes of a rank's trained weights (or its shards of them) and a step's schedule."""

    blocks: tuple[int, ...]
    outside: int
    """Bytes outside of all blocks."""
    smallest: int
    """Bytes of the smallest parameter, whose gradient is the sentinel: it stays on the device when the others
    are offloaded as soon as they are ready.
    """
    parts: int
    """Micro-batches per step."""
    batch: int
    """Bytes of one micro-batch, copied to the device."""
    moments: int
    """Number of the optimizer's moments, each as large as the weights."""
    boundary: int
    """Bytes of a block's input, for one micro-batch."""

    @property
    def all(self) -> int:
        """Bytes of all weights, and of all gradients."""
        return sum(self.blocks) + self.outside


@dataclass(frozen=True)
class Case:
    """A technique with one choice of its options."""

    technique: str
    option: str
    slots: Slots
    model: str = "gpt"
    """A model of the tests' zoo, or `chain`."""
    ranks: tuple[tuple[int, str], ...] = ((1, "none"), (2, "ddp"), (2, "fsdp"))
    """Number of ranks, and the technique that shards or replicates states."""
    parts: int = 1
    share: float | None = None
    """Budget of plans as a share of the plain peak; None for no budget."""
    formula: Formula | None = None
    """Published bytes on each link, per rank and step; None if the bytes follow from a search over a
    cache.
    """


ALONE = ((1, "none"),)
DIVIDED = ((1, "none"), (2, "fsdp"))
REPLICAS = ((2, "ddp"),)


def _both(down: int, up: int, s: Sizes) -> Links:
    return {"device_to_host": down, "host_to_device": up + s.parts * s.batch}


def _at_end(s: Sizes) -> Links:
    """ZeRO-Offload, section 4: each gradient is offloaded once, each weight reloaded once."""
    return _both(s.all, s.all, s)


def _when_ready(s: Sizes) -> Links:
    """As `_at_end`, with gradients offloaded in every micro-batch."""
    return _both(s.parts * (s.all - s.smallest) + s.smallest, s.all, s)


def _window(width: int) -> Formula:
    """Return the formula of a window: each pass reloads all blocks except those resident when the direction
    changes; gradients are offloaded in every micro-batch.
    """
    return lambda s: _both(
        s.parts * sum(s.blocks) + s.outside,
        s.parts * (2 * sum(s.blocks) - sum(s.blocks[-width:])) + s.outside,
        s,
    )


def _ssd(link: Formula) -> Formula:
    """Add SSD traffic: master weights and moments are read and written once per step, with AdamW 12 bytes per
    parameter (ZeRO-Infinity, section 3).
    """
    return lambda s: {**link(s), "ssd_read": (1 + s.moments) * s.all, "ssd_write": (1 + s.moments) * s.all}


def _no_state(link: Formula) -> Formula:
    """Add no SSD traffic: no optimizer state is on SSD."""
    return lambda s: {**link(s), "ssd_read": 0, "ssd_write": 0}


def _ssd_weights(gradients: bool, *, state: bool = True) -> Formula:
    """Add the SSD traffic of weights: read whenever a window reloads them and written once; gradients written
    and read once.
    """

    def links(s: Sizes) -> Links:
        found, mine = (
            (_ssd if state else _no_state)(_window(2))(s),
            s.parts * sum(s.blocks) if gradients else 0,
        )
        read = s.parts * (2 * sum(s.blocks) - sum(s.blocks[-2:]))
        return found | {
            "ssd_read": found["ssd_read"] + read + mine,
            "ssd_write": found["ssd_write"] + sum(s.blocks) + mine,
        }

    return links


def _updaters(s: Sizes) -> Links:
    """Smart-Infinity, section 4: gradients to the updaters, weights back."""
    return {**_at_end(s), "to_updaters": s.all, "from_updaters": s.all}


def _packs(last: int) -> Formula:
    """Harmony, section 3: 3|W| less the last pack's, for any number of micro-batches; each batch is copied
    for both passes.
    """
    return lambda s: _both(
        s.all, 2 * sum(s.blocks) - sum(s.blocks[-last:]) + s.outside + s.parts * s.batch, s
    )


def _stashed(last: int, packs: int) -> Formula:
    """As `_packs`; each pack's input is offloaded once and reloaded for its forward and its backward."""

    def links(s: Sizes) -> Links:
        found, each = _packs(last)(s), s.parts * s.boundary
        return {
            "device_to_host": found["device_to_host"] + packs * each,
            "host_to_device": found["host_to_device"] + (2 * packs - 1) * each,
        }

    return links


def _states(
    technique: str,
    option: str,
    formula: Formula | None = None,
    *,
    case: Mapping[str, Any] | None = None,
    **knobs: Any,
) -> Case:
    return Case(
        technique,
        option,
        {"offload": {"states": {"kind": technique, **knobs}}},
        formula=formula,
        **(case or {}),
    )


def _activations(technique: str, option: str, *, case: Mapping[str, Any] | None = None, **knobs: Any) -> Case:
    return Case(technique, option, {"offload": {"activations": {"kind": technique, **knobs}}}, **(case or {}))


def cases() -> list[Case]:
    """Return all cases."""
    return [Case("none", "", {}), *_optimizers(), *_weights(), *_others()]


def _optimizers() -> list[Case]:
    """Return cases that offload only optimizer state."""
    native: dict[str, Any] = {"update": "native"}
    narrow, in_parts = {"model": "tobf16"}, {"parts": 3}
    return [
        _states("optimizer_cpu", "user", _at_end),
        _states("optimizer_cpu", "native", _at_end, **native),
        _states("optimizer_cpu", "native, 3 micro-batches", _at_end, case=in_parts, **native),
        _states("optimizer_cpu", "master", _at_end, case=narrow, update="master"),
        _states(
            "optimizer_cpu", "master, moments int8", _at_end, case=narrow, update="master", moments="int8"
        ),
        _states(
            "optimizer_cpu",
            "per_gradient",
            _when_ready,
            case={"ranks": DIVIDED},
            trigger="per_gradient",
            **native,
        ),
        _states(
            "optimizer_cpu",
            "per_layer",
            _when_ready,
            case={"ranks": DIVIDED},
            trigger="per_layer",
            **native,
        ),
        _states(
            "optimizer_cpu",
            "per_gradient, 3 micro-batches",
            _when_ready,
            case={"ranks": DIVIDED, **in_parts},
            trigger="per_gradient",
            **native,
        ),
        _states(
            "optimizer_cpu",
            "per_layer, master",
            _when_ready,
            case={"ranks": DIVIDED, **narrow},
            trigger="per_layer",
            update="master",
        ),
        _states("zero_offload", "defaults", _when_ready, case={"ranks": DIVIDED}),
        _states(
            "zero_offload",
            "buckets of 5 KiB",
            _when_ready,
            case={"ranks": DIVIDED, **in_parts},
            bucket_mib=0.005,
        ),
        _states("zero_offload", "ratio 0.5", case={"ranks": DIVIDED}, ratio=0.5, bucket_mib=0.005),
        _states(
            "zero_offload",
            "delayed",
            _when_ready,
            case={"ranks": ALONE},
            delayed=True,
            delay_after=0,
            bucket_mib=0.005,
        ),
    ]


def _weights() -> list[Case]:
    """Return cases that also offload weights, or put everything on SSD."""
    in_parts, chain = {"parts": 3}, {"model": "chain", "parts": 3, "ranks": ALONE}
    return [
        _states("l2l", "defaults", _window(1)),
        _states("l2l", "3 micro-batches", _window(1), case=in_parts),
        _states("l2l", "together", _packs(1), case=chain, order="layer_major"),
        _states(
            "l2l",
            "together, stash on the host",
            _stashed(1, 6),
            case=chain,
            order="layer_major",
            stash="host",
        ),
        _states("stronghold", "solved"),
        _states("stronghold", "window 2", _window(2), window=2),
        _states(
            "stronghold", "3 micro-batches, deferred", _window(2), case=in_parts, window=2, deferred=[0, 2]
        ),
        _states("stronghold", "at the end of the step", _window(2), window=2, trigger="end_of_step"),
        _states("patrickstar", "no budget"),
        _states("patrickstar", "0.8 of the plain peak", case={"share": 0.8}),
        _states("patrickstar", "gradients in place", case={"model": "tied"}, gradients="in_place"),
        _states("patrickstar", "all updated on the host", device_updates=False),
        _states("elixir", "no budget"),
        _states("elixir", "all updated on the host", device_updates=False),
        _states("elixir", "0.8 of the plain peak, no prefetch", case={"share": 0.8}, prefetch=0),
        _states("angel_ptm", "pages of 10 KiB", page_mib=0.01),
        _states("angel_ptm", "0.9 of the plain peak", case={"ranks": ALONE, "share": 0.9}, page_mib=0.01),
        _states(
            "angel_ptm",
            "optimizer on SSD",
            case={"ranks": ((1, "none"), (2, "ddp"))},
            page_mib=0.01,
            optimizer="ssd",
        ),
        _states("orchestrated", "disjoint", case={"ranks": REPLICAS}, group=2),
        _states("orchestrated", "token", case={"ranks": REPLICAS}, group=2, mode="token"),
        _states("zero_infinity", "optimizer on SSD", _ssd(_at_end)),
        _states("zero_infinity", "3 micro-batches", _ssd(_at_end), case=in_parts),
        _states("zero_infinity", "parameters on the host", _ssd(_window(2)), parameters="host"),
        _states("zero_infinity", "parameters on SSD", _ssd_weights(False), parameters="ssd"),
        _states("zero_infinity", "gradients too", _ssd_weights(True), parameters="ssd", gradients="ssd"),
        _states("zero_infinity", "optimizer on the host", _at_end, optimizer="host"),
        _states(
            "zero_infinity",
            "parameters on SSD, optimizer on the host",
            _ssd_weights(False, state=False),
            parameters="ssd",
            optimizer="host",
        ),
        _states(
            "zero_infinity",
            "all but the optimizer on SSD",
            _ssd_weights(True, state=False),
            parameters="ssd",
            gradients="ssd",
            optimizer="host",
        ),
        _states("zero_infinity", "2 tiles", parameters="host", tiles=2),
        _states("zero_infinity", "2 tiles, all on SSD", parameters="ssd", gradients="ssd", tiles=2),
        _states("smart_infinity", "2 domains", _updaters),
        _states("smart_infinity", "a tenth is sent", topk_ratio=0.1),
        _states("lohan", "defaults", _ssd(_when_ready), case={"ranks": DIVIDED}),
        _states(
            "lohan",
            "buckets of 5 KiB",
            _ssd(_when_ready),
            case={"ranks": DIVIDED, **in_parts},
            bucket_mib=0.005,
        ),
        _states("moesys", "all cached", case={"model": "moe"}),
        _states(
            "moesys",
            "6 cached",
            case={"model": "moe", "ranks": ((1, "none"), (2, "ddp"))},
            cache=6,
            on_device=1,
        ),
        _states("harmony", "packs of 2", _packs(2), case=chain, backward=2),
        _states(
            "harmony", "boundaries on the host", _stashed(2, 3), case=chain, backward=2, boundaries="host"
        ),
        _states("harmony", "prefetch", _packs(1), case=chain, backward=1, prefetch=True),
        _states("mobius", "3 stages", case=chain, stages=3),
    ]


def _others() -> list[Case]:
    """Return cases that offload activations, alone or together with states."""
    return [
        _activations("copy_out", "all", min_bytes=0),
        _activations("copy_out", "half", min_bytes=0, ratio=0.5),
        _activations("copy_out", "all to SSD", min_bytes=0, target="ssd"),
        _activations("pipelined", "half", min_bytes=0, ratio=0.5),
        _activations("tsplit", "0.94 of the plain peak", case={"share": 0.94}, min_bytes=256),
        Case("planned", "0.96 of the plain peak", {"recompute": {"kind": "planned"}}, share=0.96),
        Case(
            "lohan, both halves",
            "activations on to SSD",
            {
                "recompute": {"kind": "lohan", "spill": "ssd", "host_bytes": 1 << 18, "min_bytes": 256},
                "offload": {"states": {"kind": "lohan"}},
            },
            ranks=DIVIDED,
        ),
    ]


EVERYWHERE = (
    "none",
    "optimizer_cpu",
    "zero_offload",
    "l2l",
    "patrickstar",
    "elixir",
    "zero_infinity",
    "lohan",
    "copy_out",
)
"""Techniques that are run on every model that trains, on one rank, with the first of their options."""
