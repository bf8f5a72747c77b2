"""Parts of sentences that techniques share."""

from __future__ import annotations

from memtune.units import format_bytes

UPDATES = {
    "user": ", by your optimizer",
    "native": "",
    "master": ", from float32 masters of bfloat16 weights",
}
"""End of a sentence about an update on the host, by the knob `update`."""


def ranks(degree: int | None) -> str:
    """Return `4 ranks`, or `all ranks` for None."""
    return "all ranks" if degree is None else f"{degree} ranks"


def within(budget_bytes: int | None, share: float | None) -> str:
    """Return the purpose of a plan: to stay within bytes, a share of the range from the smallest peak to the
    plain one, or the limit of the search.
    """
    if budget_bytes is not None:
        return f"to stay within {format_bytes(budget_bytes)}"
    limit = (
        "the memory limit" if share is None else f"{share:.0%} of the way from the least to the plain peak"
    )
    return f"to stay within {limit}"
