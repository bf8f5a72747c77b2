"""Write a `model.py` and check it: one training step of it must record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from memtune.autotune.record import record
from memtune.config import save_text
from memtune.errors import UsageError
from memtune.executors import probe
from memtune.program import columns_of
from memtune.scaffold.draft import Draft, marked
from memtune.scaffold.hub_model import hub_draft, is_hub_target, unknown_name
from memtune.scaffold.python_model import python_draft
from memtune.workload import Workload


@dataclass(frozen=True)
class WrittenFile:
    """A `model.py` that memtune wrote."""

    path: Path
    parameters: int
    record_s: float
    """Time to record one training step."""
    checks: tuple[str, ...]
    """Lines that hold a guess, each with its number."""


def write_model_file(
    target: str, out: Path, *, say: Callable[[str], None] = lambda text: None
) -> WrittenFile:
    """Write a `model.py` for `target` and record one training step of it.

    Args:
        target: A Hugging Face id, config or class, or the dotted path or file of a class or function.
        out: The file to write; an existing one is replaced.
        say: Called with one line about each phase as it begins.

    Raises:
        UsageError: `target` cannot be used.
        EnvironmentFault: A package is missing, or the config of an id cannot be downloaded.
        WorkloadError: The written file needs a correction before it can be trained; it stays.
    """
    say(f"reading {target}")
    draft = _draft(target, out)
    text = draft.text(str(out))
    save_text(out, text)
    say(f"looking at {out}")
    probe(out, batches=True)
    say("recording one training step")
    recorded = record(Workload.load(out))
    parameters = int(columns_of(recorded.step.parameters).numel.sum())
    return WrittenFile(out, parameters, recorded.record_s, tuple(marked(text)))


def _draft(target: str, out: Path) -> Draft:
    if is_hub_target(target):
        return hub_draft(target)
    file = Path(target.partition(":")[0])
    if file.is_file() and file.suffix != ".py":
        raise UsageError(
            f"{file} is neither a Python file nor a config.json.",
            fix=f"memtune init {file.with_suffix('.py')}:Name",
            code="MT150",
        )
    try:
        return python_draft(target, out)
    except UsageError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and cause.name == target:
            raise unknown_name(target) from error
        raise
