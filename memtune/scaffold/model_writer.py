"""Write a `model.py` and check it: one training step of it must record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from memtune.autotune.record import record
from memtune.config import save_text
from memtune.executors import probe
from memtune.program import columns_of
from memtune.scaffold.draft import marked
from memtune.scaffold.hub_model import hub_draft, is_hub_target
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
    draft = hub_draft(target) if is_hub_target(target) else python_draft(target, out)
    text = draft.text(str(out))
    save_text(out, text)
    say(f"looking at {out}")
    probe(out, batches=True)
    say("recording one training step")
    recorded = record(Workload.load(out))
    parameters = int(columns_of(recorded.step.parameters).numel.sum())
    return WrittenFile(out, parameters, recorded.record_s, tuple(marked(text)))
