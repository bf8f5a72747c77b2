"""Every error a user can meet: what happened, the evidence, and what to do next.

An error carries a stable code (`MT101`) and the process exit code that `memtune --help` documents:
0 done · 1 nothing feasible · 2 usage, config or `model.py` · 3 environment or storage · 4 bug in memtune ·
130 interrupted.
"""

from __future__ import annotations

import traceback


class MemtuneError(Exception):
    """Root of all errors memtune raises on purpose.

    Args:
        what: One sentence: what is wrong, with the value that is wrong.
        evidence: The observation (a line of code, a number, a list of names); may be empty.
        fix: The next action, as something that can be typed or edited.
        code: Stable identifier, `MT` and three digits.
    """

    exit_code = 4

    def __init__(self, what: str, *, evidence: str = "", fix: str = "", code: str = "") -> None:
        super().__init__(what)
        self.what, self.evidence, self.fix, self.code = what, evidence, fix, code

    def __str__(self) -> str:
        """The whole message as printed: code and what, then evidence, then the fix."""
        lines = [f"{self.code} {self.what}".strip()]
        if self.evidence:
            lines.append(f"      {self.evidence}")
        if self.fix:
            lines.append(f"      Fix: {self.fix}")
        return "\n".join(lines)


class NothingFits(MemtuneError):
    """The search ended and no setting fits the budget (exit code 1)."""

    exit_code = 1


class UsageError(MemtuneError):
    """A command line, a config or a `model.py` that cannot be used (exit code 2)."""

    exit_code = 2


class WorkloadError(UsageError):
    """`model.py` does not hold what memtune needs (exit code 2)."""


class ConfigError(UsageError):
    """A config file that is malformed, of a newer schema, or made for another model (exit code 2)."""


class EnvironmentFault(MemtuneError):
    """The machine, its storage or its cluster does not allow the run (exit code 3)."""

    exit_code = 3


class ApplyError(UsageError):
    """`memtune.apply` could not do what the config says; the model is as it was (exit code 2)."""


def raised_at(error: BaseException) -> str:
    """Module and line of memtune's that raised `error`, empty where none did: a rule has one place, whatever
    it names.
    """
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("memtune."):
            found = f"{module}:{line}"
    return found


# Whether an error says that the device had no memory left, whoever raised it.
_MESSAGES_BY_SOURCE = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED",
)
"""Beginnings of messages of plain RuntimeErrors from other sources than torch's allocator: memtune's
allocator, which knows nothing of torch and cannot raise its class; the driver, of a kernel or a context that
finds no memory outside of the allocator; cuBLAS.
"""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if `error` is an out-of-memory error of the device."""
    import torch  # here, so that importing the errors loads no torch

    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and str(error).lstrip().startswith(_MESSAGES_BY_SOURCE)
