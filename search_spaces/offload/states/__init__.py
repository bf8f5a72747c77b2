"""Techniques that offload parameters, gradients and optimizer state: device bytes for link and host time."""

from __future__ import annotations

from typing import Any


def state_settings(**settings: Any) -> dict[str, Any]:
    """Return `settings` of the offload of states, as `Technique.record` returns them."""
    return {"states.offload": settings}
