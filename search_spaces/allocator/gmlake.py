"""Virtual-memory stitching: free pieces of memory at any addresses become one block (GMLake)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune.memory import ArenaSettings
from memtune.search_spaces.allocator._own_allocator import OwnAllocator
from memtune.technique import Target


class GMLake(OwnAllocator):
    """Stitches free pieces of memory into one block, so that no request fails for fragmentation, at the cost
    of driver calls in the first steps.
    """

    kind: Literal["gmlake"] = "gmlake"
    title: ClassVar[str] = "Stitched memory"
    clause: ClassVar[str] = "stitches free pieces of memory into large blocks"
    source: ClassVar[str] = "Guo et al. 2024, GMLake, ASPLOS 2024, arXiv:2401.08156"
    paper: ClassVar[str] = "GMLake"

    defragment: bool = True
    """Stitch pieces; if false they are only split and reused."""
    stitch_from_mb: Annotated[int, Field(ge=2, le=1024)] = 2
    """Smaller requests (MiB, the paper's fragLimit) are not stitched: fewer mappings, more holes. The paper's
    code uses 512.
    """
    reuse_limit: Annotated[int, Field(ge=1, le=16)] = 10
    """A stitched block serves requests of at least this fraction of its size: fewer mappings, more pieces
    held by small requests.
    """
    max_stitched_gb: Annotated[int, Field(ge=1)] = 1000
    """Addresses (GiB) in stitched blocks before the least recently used ones are freed (the paper's autoGC).
    """
    arena_below_mb: Annotated[int, Field(ge=2, le=64)] = 2
    """Smaller requests (MiB) share pages in an expandable arena: no rounding to 2 MiB, but more holes."""

    def record(self, target: Target) -> dict[str, Any]:
        return {"allocator": {"stitched": dict(self.knobs())}}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        # Stitched from any size, and from the paper's value for small models.
        return {"stitch_from_mb": (2, 256), "arena_below_mb": (2, 20, 64)}

    def settings(self) -> ArenaSettings:
        """Return the knobs as the allocator takes them."""
        return ArenaSettings(
            kind=self.kind,
            defragment=self.defragment,
            stitch_from_mb=self.stitch_from_mb,
            reuse_limit=self.reuse_limit,
            max_stitched_mb=self.max_stitched_gb * 1024,
            arena_below_mb=self.arena_below_mb,
        )
