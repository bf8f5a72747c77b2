"""How memtune's own allocator (csrc/vmm) serves requests, as a technique asks for it and as the simulator replays it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from memtune import _native
from memtune.units import MIB

VARIABLE = "MEMTUNE_ALLOCATOR"
"""Names the allocator of a process, in the environment that a technique asks for."""


@dataclass(frozen=True, kw_only=True)
class ArenaSettings:
    """How the allocator serves requests."""

    kind: str
    """Of the technique that asked for it."""
    planned: bool = False
    """One step is watched, laid out, and replayed from then on; all else goes to stitched memory."""
    defragment: bool = True
    """Free pieces of memory are stitched into one block."""
    stitch_from_mb: int = 2
    """Smaller requests (MiB) are stitched only where memory has run out."""
    reuse_limit: int = 10
    """A stitched block serves requests of at least this part of its size."""
    most_stitched_mb: int = 1 << 20
    """Addresses (MiB) in stitched blocks; beyond it the longest unused ones go."""
    arena_below_mb: int = 2
    """Smaller requests (MiB) come from an expandable arena, in multiples of 512 bytes."""
    replan_after: int = 64
    """Requests that are not as planned before another step is watched; doubles each time."""
    pools: bool = False
    """All requests come from expandable arenas, one for each lifetime, as the requests of a watched step lived."""
    transient_within: int = 64
    """What is freed within so many requests and frees is transient."""

    def text(self) -> str:
        """As `VARIABLE` holds it; fields at their defaults are left out."""
        fields = {name: value for name, value in asdict(self).items() if value != getattr(type(self), name, None)}
        return ",".join(f"{name}:{int(value) if isinstance(value, bool) else value}" for name, value in fields.items())

    @classmethod
    def parse(cls, text: str) -> ArenaSettings:
        """The settings in `text`, as `text()` writes them.

        Raises:
            ValueError: It is something else.
        """
        given = dict(each.split(":", 1) for each in text.split(","))
        kinds = {name: type(getattr(cls, name)) for name in cls.__dataclass_fields__ if name != "kind"}
        if set(given) - {"kind", *kinds}:
            raise ValueError(f"{VARIABLE} knows no '{sorted(set(given) - {'kind', *kinds})[0]}'")
        values = {name: kinds[name](int(value)) for name, value in given.items() if name != "kind"}
        return cls(kind=given["kind"], **values)

    def options(self) -> _native.ArenaOptions:
        """As the native allocator takes them."""
        return _native.ArenaOptions(
            defragment=self.defragment, stitch_from_bytes=self.stitch_from_mb * MIB, reuse_limit=self.reuse_limit,
            most_stitched_bytes=self.most_stitched_mb * MIB, arena_below_bytes=self.arena_below_mb * MIB, planned=self.planned,
            replan_after=self.replan_after, pools=self.pools, transient_within=self.transient_within,
        )  # fmt: skip
