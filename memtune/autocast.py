"""Autocast as it is at some moment, for code that runs again later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.amp.autocast_mode import autocast


def autocast_now() -> list[Callable[[], AbstractContextManager[Any]]]:
    """Context makers that bring autocast back to what it is now."""

    def maker(device: str) -> Callable[[], AbstractContextManager[Any]]:
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        cache = torch.is_autocast_cache_enabled()
        return lambda: torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache)

    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return [maker(device) for device in devices]


@contextmanager
def asked_for() -> Iterator[None]:
    """Inside, autocast contexts note whether they were asked to cast (`asked`): without CUDA, torch turns those of CUDA off."""
    init = autocast.__init__

    def noted(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None) -> None:
        self.asked = enabled
        init(self, device_type, dtype, enabled, cache_enabled)

    autocast.__init__ = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        autocast.__init__ = init  # type: ignore[method-assign]
