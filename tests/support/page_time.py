"""Duration of a pass over pages, to compare prefetch schedules."""

from __future__ import annotations

from collections.abc import Sequence

from memtune.offload.core.parameter_layout import Pages, timeline
from memtune.program import Units


def duration_s(pages: Pages, prefetch: Units, compute_s: Sequence[float], load_s: float) -> float:
    """Return the seconds from the first moment's beginning to the last one's end.

    Args:
        pages: Layout.
        prefetch: A result of `schedule`; all zeros: no prefetch.
        compute_s: (moments,) seconds of each moment's computation.
        load_s: Seconds that the load of a page takes.
    """
    uses, total = pages.uses(), 0.0
    for used, comes, seconds in zip(uses, timeline(pages, prefetch).loads, compute_s, strict=False):
        late = sum(page in used for page in comes)
        total += late * load_s + max(seconds, (len(comes) - late) * load_s)
    return total
