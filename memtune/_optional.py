"""Optional packages: imported at first use, and named with the command that installs them when they are
missing.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from memtune.errors import EnvironmentFault


def require(module: str, *, extra: str = "") -> ModuleType:
    """The imported `module`, for code that only some users need.

    Args:
        module: Dotted name of the module, such as `ray`.
        extra: memtune's extra that installs it; empty for what a plain `pip install memtune` brings.

    Raises:
        EnvironmentFault: It is not installed, or its own import fails.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        missing = isinstance(error, ModuleNotFoundError) and error.name == package
        target = f"'memtune[{extra}]'" if extra else "memtune"
        raise EnvironmentFault(
            f"{package} is needed here and is not installed."
            if missing
            else f"{package} is installed but cannot be imported.",
            evidence="" if missing else str(error),
            fix=f"pip install {target}" if missing else f"pip install --force-reinstall {package}",
            code="MT410",
        ) from error
