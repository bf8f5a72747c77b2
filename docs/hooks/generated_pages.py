"""Pages of the documentation that are made from the code: catalogue, gallery, devices, command line,
config.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from memtune.autotune.report import technique as drawing
from memtune.cli._app import app
from memtune.config import flow, schema
from memtune.device import PLATFORMS, Capability
from memtune.hardware import find, names
from memtune.search_spaces import SLOTS, all_techniques, knob_texts
from memtune.units import format_bytes, format_seconds

ROOT = Path(__file__).parents[2]
DRAWINGS = ROOT / "docs" / "hooks" / "technique_curves.json"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages; MkDocs calls this."""
    for path, lines in {
        "techniques.md": catalogue(),
        "gallery.md": gallery(),
        "reference/devices.md": devices(),
        "reference/command-line.md": command_line(),
        "reference/config.md": config_reference(),
    }.items():
        files.append(File.generated(config, path, content="\n".join(lines) + "\n"))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Insert the pass of CONTRIBUTING.md, and name files outside the site instead of linking to them.

    MkDocs calls this for each page.
    """
    outside = r"\[[^\]]*\]\((?:\.\./)+((?:benchmarks|tests|memtune|csrc|examples|[A-Z]+\.md)[^)]*)\)"
    markdown = re.sub(outside, r"`\1`", markdown)
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    source, _, _ = text[text.index("```python\nimport numpy") + len("```python") :].partition("```")
    return markdown.replace("PASS_SOURCE", f'```python title="offload_saved.py"{source}```')


def catalogue() -> Iterator[str]:
    """Yield the catalogue: one section per technique, with its drawing, knobs and source."""
    drawn = json.loads(DRAWINGS.read_text(encoding="utf-8"))
    yield "# Catalogue of techniques\n"
    yield (
        "One section per technique, in the order of the axes. Each drawing is one micro-batch and the"
        f" optimizer step of one rank, simulated for {drawn['model']}: bytes by kind in device memory, and in"
        " host memory and on SSD where the technique uses them, then what each resource does meanwhile. The"
        " dashed line is device memory without the technique. `memtune techniques --matrix` prints which of"
        " them work together."
    )
    by_slot: dict[str, list[Any]] = {slot: [] for slot in SLOTS}
    for each in all_techniques():
        by_slot[each.slot].append(each)
    for slot, techniques in by_slot.items():
        yield f"\n## {slot}\n"
        for each in techniques:
            yield from _technique(each, drawn)


def _technique(technique: Any, drawn: dict[str, Any]) -> Iterator[str]:
    kind = technique.model_fields["kind"].default
    name = f"{technique.slot}: {kind}"
    yield f"\n### `{kind}`: {technique.title} {{ #{technique.slot}-{kind} }}\n"
    yield " ".join((technique.__doc__ or "").split())
    yield f"\nSource: {technique.source}. Exactness: {technique.exactness}.\n"
    if (data := drawn["techniques"].get(name)) is not None:
        without = drawn["scenes"][str(data["scene"])]
        yield f"{_caption(technique.slot, data, without)}\n"
        yield f"{drawing(data, without, name).svg}\n"
    knobs = [(knob, field) for knob, field in technique.model_fields.items() if knob != "kind"]
    if knobs:
        yield "| knob | default | |\n|---|---|---|"
        texts = knob_texts(technique.slot, kind)
        for knob, field in knobs:
            text = texts[knob].replace("|", "\\|")
            yield f"| `{knob}` | `{field.get_default(call_default_factory=True)!r}` | {text} |"


def _caption(slot: str, data: dict[str, Any], without: dict[str, Any]) -> str:
    """Return the drawn setting, its machine, and its figures against those without it."""
    times = [format_seconds(each["step_s"]) for each in (data, without)]
    text = f"`{slot}: {flow(data['setting'])}` on {without['text']}: {times[0]}"
    text += f" instead of {times[1]}" if times[0] != times[1] else ", as without it"
    if slot == "allocator":
        reserved = [format_bytes(each["reserved_kib"] * 1024) for each in (data, without)]
        text += f"; {reserved[0]} reserved instead of {reserved[1]}, for the same tensors"
    return f"{text}."


def gallery() -> Iterator[str]:
    """Yield the examples: each one's docstring and code."""
    yield "# Gallery\n"
    yield "Each example is one file and one story. All run on a CPU in seconds; tests train every one.\n"
    for path in sorted((ROOT / "examples").glob("*.py")):
        source = path.read_text(encoding="utf-8")
        text = ast.get_docstring(ast.parse(source)) or ""
        first, _, rest = text.partition("\n\n")
        yield f"\n## {path.name}\n\n{' '.join(first.split())}\n"
        yield f"{rest.rstrip()}\n"
        code = source.split('"""', 2)[2].strip()
        yield f'??? "code"\n\n    ```python\n{_indented(code)}\n    ```\n'


def _indented(code: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in code.splitlines())


def devices() -> Iterator[str]:
    """Yield the device types: their capabilities, how they are tested, what is known not to work."""
    every = list(PLATFORMS.values())
    yield "# Devices\n"
    yield (
        "memtune asks torch for the accelerator of a process (`torch.accelerator`), so a device is a row of"
        " data in `memtune/device/platforms.py`. A technique that needs what a device lacks is refused with"
        " that reason. `memtune doctor` names the accelerator of this machine and what it lacks."
        " Torch and the makers document these capabilities; the row *tested* says where memtune has run."
    )
    yield f"\n| | {' | '.join(each.title for each in every)} |\n|{'---|' * (len(every) + 1)}"
    rows: dict[str, list[str]] = {
        "`--device`": [f"`{each.device}`" for each in every],
        "tested": [each.tested for each in every],
        **{
            capability: ["yes" if capability in each.capabilities else "no" for each in every]
            for capability in Capability
        },
        "known not to work": ["; ".join(each.gaps) or "–" for each in every],
        "process-group backend": [f"`{each.backend}`" for each in every],
        "visible devices": [f"`{each.visible_devices}`" if each.visible_devices else "–" for each in every],
        "hardware table": [
            ", ".join(f"`{name}`" for name in names() if find(name).platform.name == each.name) or "–"
            for each in every
        ],
    }
    for name, cells in rows.items():
        yield f"| {name} | {' | '.join(cells)} |"
    yield (
        "\nThe suite of every technique also runs on any machine (`make test-device`), on a simulated"
        " accelerator: another device type, with queued kernels and copies, its own memory and collectives on"
        " streams. The peaks that its allocator counts are compared with the predicted ones; examples,"
        " trainings that are killed and applies that fail run there too. `make gpu-check DEVICE=sim`"
        " rehearses the checks of a GPU on it, speeds excepted. It has no kernels of the inductor backend or"
        " in Triton."
    )
    yield (
        "\nOther device types, from a package that registers a PrivateUse1 backend, need no change to"
        " memtune: it asks their module by torch's usual names, and the module may describe itself"
        " (`memtune/device/README.md`). Without a table of their kernels, predictions count those of a CPU,"
        " with torch's dropout and optimizer for accelerators and, where the device is present, its fused"
        " cells of recurrent layers; layers on packed sequences and compiled ones are counted with the CPU's."
    )


def command_line() -> Iterator[str]:
    """Yield the commands with their arguments and options."""
    root = typer.main.get_command(app)
    yield f"# Command line\n\n{root.help}\n"
    yield from _commands(root, "memtune")


def _commands(group: Any, prefix: str) -> Iterator[str]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix} {name}")
            continue
        yield f"\n## {prefix} {name}\n\n{' '.join((command.help or '').split())}\n"
        yield "| | |\n|---|---|"
        for each in command.params:
            if each.name == "help":
                continue
            option = each.param_type_name == "option"
            names = ", ".join(f"`{part}`" for part in (each.opts if option else [each.metavar or each.name]))
            default = (
                f" Default: `{each.default}`." if option and each.default not in (None, False, ()) else ""
            )
            yield f"| {names} | {' '.join((getattr(each, 'help', '') or '').split())}{default} |".replace(
                "||", "|"
            )


def config_reference() -> Iterator[str]:
    """Yield the sections of `tuned.yaml` and the JSON Schema."""
    document = schema()
    yield "# tuned.yaml\n"
    yield (
        "Every key is optional but `settings`; an unknown one is an error with the nearest name. Knobs of the"
        " techniques are in the [catalogue](../techniques.md). `memtune config schema` prints this schema.\n"
    )
    yield "| section | |\n|---|---|"
    for name, part in document["properties"].items():
        yield f"| `{name}` | {_in_a_cell(part)} |"
    yield "\n`settings: {execution: {…}}` has, besides the order of ops:\n\n| knob | |\n|---|---|"
    for name, part in document["$defs"]["Execution"]["properties"].items():
        if "description" in part:
            yield f"| `{name}` | {_in_a_cell(part)} |"
    yield f'\n??? "JSON Schema"\n\n    ```json\n{_indented(json.dumps(document, indent=1))}\n    ```'


def _in_a_cell(part: dict[str, Any]) -> str:
    return " ".join(part["description"].split()).replace("|", "\\|")
