"""FSDP2 frees and fills storages in place; what does so is noticed here, because no op runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def watch_resizes(note: Callable[[torch.UntypedStorage, int, int], None]) -> Iterator[None]:
    """Inside, `note` is told of every storage that is resized, with its bytes before and after."""
    original = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        before = self.nbytes()
        result = original(self, size)
        note(self, before, self.nbytes())
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]
