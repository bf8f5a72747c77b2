"""Host memory that copies to and from a GPU go through: page-locked, and pageable where the system gives no more of that.

A refusal is the driver's: the host is short of memory, or a container may not lock pages. torch clears the driver's error when it
raises, so nothing surfaces at a later kernel. Copies are right either way; those of pageable memory are slower and keep the host
waiting.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch import Tensor

_said = False


def page_locked(make: Callable[[bool], Tensor], wanted: bool) -> Tensor:
    """What `make` gives, page-locked if that is `wanted` and the system allows it; says once per process that it does not.

    Args:
        make: A new tensor in host memory, given whether it is page-locked.
        wanted: Whether copies to or from a GPU are to use it.
    """
    if wanted:
        try:
            return make(True)
        except RuntimeError as error:  # torch.AcceleratorError among them
            _say(str(error).splitlines()[0] if str(error) else type(error).__name__)
    return make(False)


def _say(reason: str) -> None:
    global _said
    if not _said:
        _said = True
        warnings.warn(
            f"The system locks no more host memory for copies to the GPU ({reason}): they go through pageable memory, which is "
            "slower. Give the container more memory or a higher limit, or move less to the host.",
            stacklevel=4,
        )
