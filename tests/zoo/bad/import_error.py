"""Imports a module that is not installed, at line 4."""

import no_such_module_for_memtune
import torch  # noqa: F401


def model():
    return no_such_module_for_memtune.Net()
