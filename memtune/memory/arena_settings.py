"""Settings of memtune's own allocator (csrc/vmm), for techniques and for the simulator's replay."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from memtune import _native
from memtune.units import MIB

VARIABLE = "MEMTUNE_ALLOCATOR"
"""The environment variable that names the allocator of a process."""


@dataclass(frozen=True, kw_only=True)
class ArenaSettings:
    """The settings of the allocator."""

    kind: str
    """Kind of the technique that asked for it."""
    planned: bool = False
    """Observe one step, plan its layout, and replay it from then on; other requests get stitched memory."""
    defragment: bool = True
    """Stitch free pieces of memory into one block."""
    stitch_from_mb: int = 2
    """Smaller requests (MiB) are stitched only if memory has run out."""
    reuse_limit: int = 10
    """A stitched block serves requests of at least 1/`reuse_limit` of its size."""
    max_stitched_mb: int = 1 << 20
    """Addresses (MiB) in stitched blocks; beyond it the least recently used ones are released."""
    arena_below_mb: int = 2
    """Smaller requests (MiB) come from an expandable arena, in multiples of 512 bytes."""
    replan_after: int = 64
    """Deviations from the plan before another step is observed; doubles each time."""
    pools: bool = False
    """Serve all requests from expandable arenas, one per lifetime, with the lifetimes of an observed step."""
    transient_within: int = 64
    """A block freed within this many requests and frees is transient."""

    def text(self) -> str:
        """Return the value of `VARIABLE`, without fields at their defaults."""
        fields = {
            name: value for name, value in asdict(self).items() if value != getattr(type(self), name, None)
        }
        return ",".join(
            f"{name}:{int(value) if isinstance(value, bool) else value}" for name, value in fields.items()
        )

    @classmethod
    def parse(cls, text: str) -> ArenaSettings:
        """Return the settings in `text`, the inverse of `text()`.

        Raises:
            ValueError: It is something else.
        """
        given = dict(each.split(":", 1) for each in text.split(","))
        kinds = {name: type(getattr(cls, name)) for name in cls.__dataclass_fields__ if name != "kind"}
        if set(given) - {"kind", *kinds}:
            raise ValueError(f"{VARIABLE} has no option '{sorted(set(given) - {'kind', *kinds})[0]}'")
        values = {name: kinds[name](int(value)) for name, value in given.items() if name != "kind"}
        return cls(kind=given["kind"], **values)

    def options(self) -> _native.ArenaOptions:
        """Return the options of the native allocator."""
        return _native.ArenaOptions(
            defragment=self.defragment,
            stitch_from_bytes=self.stitch_from_mb * MIB,
            reuse_limit=self.reuse_limit,
            most_stitched_bytes=self.max_stitched_mb * MIB,
            arena_below_bytes=self.arena_below_mb * MIB,
            planned=self.planned,
            replan_after=self.replan_after,
            pools=self.pools,
            transient_within=self.transient_within,
        )
