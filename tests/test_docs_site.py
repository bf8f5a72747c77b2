"""The documentation: links lead to pages, commands parse, Python compiles, generated parts are complete."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

import memtune
from memtune.cli._app import app
from memtune.device import PLATFORMS, Capability
from memtune.hardware import known_name
from memtune.search_spaces import all_techniques, find, is_null

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
GENERATED = {
    "techniques.md",
    "gallery.md",
    "reference/devices.md",
    "reference/command-line.md",
    "reference/config.md",
}


def fences(page: Path) -> list[tuple[str, str]]:
    """Return language and text of each fenced block."""
    return re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_lead_to_pages(page):
    targets = re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text())
    resolved = {each: (page.parent / each).resolve() for each in targets}
    missing = [
        each
        for each, path in resolved.items()
        if not path.exists() and str(path.relative_to(DOCS)) not in GENERATED
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_commands_on_a_page_parse(page):
    """Every `memtune …` line of a block of commands is a command with its options."""
    root = typer.main.get_command(app)
    lines = [
        line for language, text in fences(page) if language in ("", "bash") for line in text.splitlines()
    ]
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[:1] == ["memtune"] and "…" not in line and "TARGET" not in line and "MODEL" not in line:
            command, arguments = root.commands[words[1]], words[2:]
            if hasattr(command, "commands"):
                command, arguments = command.commands[arguments[0]], arguments[1:]
            command.make_context(words[1], arguments)


def test_named_gpus_exist():
    for path in (ROOT / "README.md", *PAGES, *(ROOT / "examples").glob("*.py")):
        for pair in re.findall(r"--gpu-type[ =]([\w-]+)|gpu_type=\"([\w-]+)\"", path.read_text()):
            assert known_name("".join(pair)), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_python_compiles_and_names_the_public_api(page):
    for language, text in fences(page):
        if language != "python":
            continue
        tree = ast.parse(text)
        used = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "memtune"
        }
        assert used <= set(memtune.__all__)


def test_navigation_has_every_page():
    named = set(re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert {str(page.relative_to(DOCS)) for page in PAGES} | GENERATED == named


def test_catalogue_draws_every_technique():
    found = json.loads((DOCS / "hooks" / "technique_curves.json").read_text())
    known = {
        f"{each.slot}: {each.model_fields['kind'].default}"
        for each in all_techniques()
        if not is_null(each(kind=each.model_fields["kind"].default))
    }
    assert known == set(found["techniques"])
    for name, each in found["techniques"].items():
        without = found["scenes"][str(each["scene"])]
        assert each["device"]["time"], name
        assert each != without, name
        slot, _, kind = name.partition(": ")
        find(slot, kind).model_validate(each["setting"])  # its knobs still exist


def test_python_reference_has_every_public_name():
    listed = set(
        re.findall(r"^::: [\w.]+\.(\w+)$", (DOCS / "reference" / "python.md").read_text(), re.MULTILINE)
    )
    assert listed - {"SharedOptions"} == set(memtune.__all__) - {"__version__"}


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra memtune[docs]")
def test_devices_page_has_each_platform_and_capability(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "hooks")
    from generated_pages import devices

    lines = [line for line in "\n".join(devices()).splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert header[1:] == [each.title for each in PLATFORMS.values()]
    table = {row[0]: dict(zip(PLATFORMS, row[1:], strict=True)) for row in rows}
    for name, platform in PLATFORMS.items():
        assert table["tested"][name] == platform.tested
        for capability in Capability:
            assert table[capability][name] == ("no" if capability in platform.lacks else "yes")
    assert "`mi250x`" in table["hardware table"]["rocm"]


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra memtune[docs]")
def test_generated_tables_have_a_text_in_each_row(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "hooks")
    from generated_pages import catalogue, command_line, config_reference

    rows = {
        page.__name__: [line for line in "\n".join(page()).splitlines() if line.startswith("| `")]
        for page in (catalogue, command_line, config_reference)
    }
    assert all(rows.values())
    assert [row for found in rows.values() for row in found if row.split("|")[-2].strip() == ""] == []


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra memtune[docs]")
def test_site_builds_without_a_warning(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-q", "-d", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 30
    for page in pages:  # a page asks no other server for anything
        assert not re.search(r'<(?:script|link|img)[^>]+(?:src|href)="?https?://', page.read_text())
