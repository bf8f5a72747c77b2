"""What a technique looks at of the others, so that what it said is used again only where it would say the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from memtune.search_spaces import SLOTS
from memtune.technique import Technique


class Watched(Mapping[str, Technique]):
    """Techniques by slot that note which slots were looked at, absent ones too."""

    def __init__(self, chosen: Mapping[str, Technique]) -> None:
        self._chosen = chosen
        self.seen: dict[str, Technique | None] = {}

    def __getitem__(self, slot: str) -> Technique:
        self.seen[slot] = self._chosen.get(slot)
        return self._chosen[slot]

    def __iter__(self) -> Iterator[str]:
        self.seen = {slot: self._chosen.get(slot) for slot in SLOTS}
        return iter(self._chosen)

    def __len__(self) -> int:
        self.seen = {slot: self._chosen.get(slot) for slot in SLOTS}
        return len(self._chosen)
