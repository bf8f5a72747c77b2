"""Options and files that the benchmarks of paired CPU times share."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from predict import machine, sources


def options(page: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """Return a parser of `--rounds`, `--json` and `--markdown`, described by `page`."""
    parser = argparse.ArgumentParser(description=page, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for all figures")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="file for the tables")
    return parser


def header(command: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Return the fields with which a file of results begins: how, on which sources, and where it was made."""
    return {
        "schema": 1,
        "command": command,
        "sources": sources(),
        "machine": machine(),
        "rounds": asked.rounds,
    }


def write(asked: argparse.Namespace, found: dict[str, Any], page: str, **tables: list[Any]) -> None:
    """Write `found` with `tables`, lists of dataclasses, as JSON, and `page` as Markdown, where asked."""
    if asked.json:
        rows = {name: [asdict(each) for each in table] for name, table in tables.items()}
        asked.json.write_text(json.dumps({**found, **rows}, indent=1) + "\n")
    if asked.markdown:
        asked.markdown.write_text(page)
