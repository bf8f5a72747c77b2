"""Import of optional packages at first use, with an error that names the command which installs them."""

from __future__ import annotations

import importlib
import re
import shlex
from importlib.metadata import PackageNotFoundError, requires
from types import ModuleType

from memtune.errors import EnvironmentFault


def require(module: str) -> ModuleType:
    """Import and return `module`, such as `ray.util`, which only some users need.

    Raises:
        EnvironmentFault: The package is not installed, or its own import fails.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        # A package can be installed and still fail to import, because a dependency of its own is missing.
        missing = isinstance(error, ModuleNotFoundError) and error.name == package
        raise EnvironmentFault(
            f"{package} is needed here and is not installed."
            if missing
            else f"{package} is installed but cannot be imported.",
            evidence="" if missing else str(error),
            fix=install_command(package) if missing else f"pip install --force-reinstall {package}",
            code="MT410",
        ) from error


def install_command(package: str) -> str:
    """Return the command that installs `package` in a version that memtune works with."""
    try:
        wanted = [each.partition(";")[0].strip() for each in requires("memtune") or ()]
    except PackageNotFoundError:  # run from its source, without an installation
        wanted = []
    found = next((each for each in wanted if re.split(r"[^\w.-]", each)[0] == package), package)
    return f"pip install {shlex.quote(found)}"
