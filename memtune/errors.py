"""Errors for users: what happened, the evidence, and what to do next.

An error carries a stable code (`MT101`) and the exit code of the process that `memtune --help` documents: 0
done · 1 nothing feasible · 2 usage, config or `model.py` · 3 environment or storage · 4 bug in memtune · 130
interrupted.
"""

from __future__ import annotations

import traceback


class MemtuneError(Exception):
    """Root of all errors that memtune raises on purpose.

    Args:
        what: One sentence that states the problem, with the offending value.
        evidence: The observation (a line of code, a number, a list of names); may be empty.
        fix: The next action, as a command to type or a line to edit.
        code: Stable identifier, `MT` and three digits.
    """

    exit_code = 4

    def __init__(self, what: str, *, evidence: str = "", fix: str = "", code: str = "") -> None:
        super().__init__(what)
        self.what, self.evidence, self.fix, self.code = what, evidence, fix, code

    def __str__(self) -> str:
        """Return the whole message as printed: code and what, then evidence, then the fix."""
        lines = [f"{self.code} {self.what}".strip()]
        if self.evidence:
            lines.append(f"      {self.evidence}")
        if self.fix:
            lines.append(f"      Fix: {self.fix}")
        return "\n".join(lines)


class NothingFits(MemtuneError):
    """Error when the search ends and no setting fits the budget (exit code 1)."""

    exit_code = 1


class UsageError(MemtuneError):
    """Error in a command line, a config or a `model.py` (exit code 2)."""

    exit_code = 2


class WorkloadError(UsageError):
    """Error when `model.py` lacks something that memtune needs (exit code 2)."""


class ConfigError(UsageError):
    """Error in a config file: malformed, of a newer schema, or made for another model (exit code 2)."""


class EnvironmentFault(MemtuneError):
    """Error when the machine, its storage or its cluster does not allow the run (exit code 3)."""

    exit_code = 3


class Interrupted(MemtuneError):
    """Ctrl-C or a signal ended the command at once."""

    def __init__(self, what: str, exit_code: int) -> None:
        super().__init__(what, code="MT130")
        self.exit_code = exit_code


class ApplyError(UsageError):
    """Error when `memtune.apply` cannot do what the config says; the model is unchanged (exit code 2)."""


def missing_file(path: object, fix: str, code: str = "MT110") -> UsageError:
    """Return the error for a file that the user names and that does not exist."""
    return UsageError(f"There is no file {path}.", fix=fix, code=code)


def existing_file(path: object, fix: str, evidence: str = "") -> UsageError:
    """Return the error for a file that exists and would be overwritten."""
    return UsageError(f"{path} exists.", evidence=evidence, fix=fix, code="MT408")


def raised_at(error: BaseException) -> str:
    """Return module and line of memtune that raised `error`, or an empty text if memtune did not raise it."""
    # Errors with the same origin come from the same rule, whichever names their texts contain.
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("memtune."):
            found = f"{module}:{line}"
    return found
