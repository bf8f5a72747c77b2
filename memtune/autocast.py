"""Autocast as it is at some moment, for code that runs again later."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch


def autocast_now() -> list[Callable[[], AbstractContextManager[Any]]]:
    """Context makers that bring autocast back to what it is now."""

    def maker(device: str) -> Callable[[], AbstractContextManager[Any]]:
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        cache = torch.is_autocast_cache_enabled()
        return lambda: torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache)

    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return [maker(device) for device in devices]
