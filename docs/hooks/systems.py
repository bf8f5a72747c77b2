"""Write docs/systems.md from systems.yaml: each published system with its claim, tests, figures and gaps.

python docs/hooks/systems.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

PAGE = Path(__file__).parents[1] / "systems.md"
DATA = Path(__file__).with_suffix(".yaml")

INTRODUCTION = """\
# Published systems

Each row: the claim of the paper, the tests that hold the mechanism to it, figures with the command that
gives them, and differences to the paper, with those not built yet after *Missing*. No figure is from a GPU;
"simulated" ones are predictions of the simulator with the paper's hardware. Written by
`python docs/hooks/systems.py` from `docs/hooks/systems.yaml`.

| system | claim | tests | measured | better than published | different, and why |
|---|---|---|---|---|---|"""


def entries() -> list[dict[str, Any]]:
    """Return the entries of systems.yaml."""
    found: list[dict[str, Any]] = YAML(typ="safe").load(DATA)
    return found


def page() -> Iterator[str]:
    """Yield the lines of docs/systems.md."""
    yield INTRODUCTION
    for each in entries():
        kinds = ", ".join(f"`{name.rpartition('/')[2]}`" for name in each["techniques"])
        tests = "<br>".join(_link(name) for name in each["tests"])
        missing = f"*Missing*: {each['missing']}" if "missing" in each else ""
        gaps = ". ".join(filter(None, (each.get("deviates"), missing)))
        cells = f"{each['system']}: {kinds}", each["claim"], tests, each["measured"], each.get("better"), gaps
        yield f"| {' | '.join(cell or '–' for cell in cells)} |"


def _link(test: str) -> str:
    file, _, function = test.partition("::")
    return f"[{function}](../tests/{file})"


if __name__ == "__main__":
    PAGE.write_text("\n".join(page()) + "\n", encoding="utf-8")
