"""Print files over 700 lines and functions over 60: `make report`. A long file of one idea is fine; its
docstring says why.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("memtune", "autotune", "executors", "search_spaces", "benchmarks", "tests")
FILE_LINES, FUNCTION_LINES = 700, 60


def long_parts(path: Path) -> list[tuple[int, str]]:
    """Return (lines, where) of `path` and of its functions that are over the limits."""
    source = path.read_text()
    shown = path.relative_to(ROOT)
    count = source.count("\n")
    found = [(count, str(shown))] if count > FILE_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                found.append((lines, f"{shown}:{node.lineno} {node.name}"))
    return found


def main() -> None:
    """Print the report, longest first."""
    paths = [
        path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))
    ]  # does not follow links
    found = sorted((each for path in paths for each in long_parts(path)), reverse=True)
    for lines, where in found:
        print(f"{lines:6}  {where}")
    print(
        f"{len(paths)} files: {len(found)} files over {FILE_LINES} or functions over {FUNCTION_LINES} lines"
    )


if __name__ == "__main__":
    main()
