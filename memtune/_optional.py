"""Import of optional packages at first use, with an error that names the command which installs them."""

from __future__ import annotations

import importlib
from types import ModuleType

from memtune.errors import EnvironmentFault


def require(module: str, *, extra: str = "") -> ModuleType:
    """Import and return `module`, which only some users need.

    Args:
        module: Dotted name of the module, such as `ray`.
        extra: memtune's extra that installs it; empty for a dependency of plain `pip install memtune`.

    Raises:
        EnvironmentFault: The package is not installed, or its own import fails.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        # A package can be installed and still fail to import, because a dependency of its own is missing.
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
