"""A dispatch mode that torch.compile runs beside."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class WatchingMode(TorchDispatchMode):  # torch's __init_subclass__
    """A mode under which compiled graphs are made and run; beside any other mode Dynamo stays eager."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Off while graphs are made, on while they run: graphs that run op by op are seen op by op."""
        return True
