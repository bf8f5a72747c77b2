"""Record five first minutes of a new user in a terminal: seconds, lines and words until the answer.

    python benchmarks/first_minutes.py [--version NAME=DIR ...] [--only NAME] [--casts DIR] [--json FILE]

Each session is one command in an empty folder with an empty home directory. Each `--version` names the folder
of a `memtune` to record, by default this one; versions are recorded one after the other, session by session.
The answer is the first line that matches the pattern of the session; lines are counted as a reader sees them,
after redraws. Silence is the longest time in which nothing was written. Unexplained words are those of the
whole output that neither a dictionary of English (`--words`, Debian's wamerican-small) nor docs/glossary.md
has. `--casts` keeps the recordings for asciinema; `--json` replaces in FILE the sessions that were recorded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pexpect
import pyte

ROOT = Path(__file__).resolve().parent.parent
COLUMNS, ROWS = 120, 400
CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 128,
}
PYTHON = """\
import memtune

result = memtune.search("model.py", device="cpu", workers=1, max_memory="7MiB", trials=3)
print(result)
"""


@dataclass(frozen=True)
class Session:
    """A command and the line that answers it."""

    command: str
    answer: str


SESSIONS = {
    "plan": Session("memtune plan model.py --gpu-type a100-40g --max-memory 24MiB", r"^do this|^1 "),
    "search": Session(
        "memtune search model.py --device cpu --workers 1 --max-memory 7MiB --trials 3 --no-tui",
        r"^✔|^tuned.yaml|samples/s \(",
    ),
    "init": Session("memtune init config.json --out llama.py", r"^next:"),
    "python": Session("python search.py", r"^written to|^AttributeError"),
    "wrong file": Session("memtune plan modle.py --gpu-type a100-40g", r"Fix:"),
}


@dataclass(frozen=True)
class Minutes:
    """Figures of one recording; seconds of wall time, the answer's None if it never came."""

    first_line_s: float
    answer_s: float | None
    answer_line: int | None
    lines: int
    silence_s: float
    cpu_s: float
    exit_code: int | None
    unexplained: tuple[str, ...]


def record(session: Session, bin_folder: Path, known: set[str], cast: Path | None) -> Minutes:
    """Run the command in a terminal and return its figures."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "work")
        folder.mkdir()
        (folder / "model.py").write_text((ROOT / "examples" / "gpt.py").read_text())
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / "search.py").write_text(PYTHON)
        env = {
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "HOME": place,
            "TERM": "xterm-256color",
            "LANG": "C.UTF-8",
            "HF_HUB_OFFLINE": "1",
            "MEMTUNE_GPT_SIZE": "tiny",
        }
        before, start_s = os.times(), time.monotonic()
        child = pexpect.spawn(
            "/bin/bash", ["-c", session.command], cwd=folder, env=env, encoding="utf-8", timeout=900
        )
        child.setwinsize(ROWS, COLUMNS)
        chunks: list[tuple[float, str]] = []
        while True:
            try:
                text = child.read_nonblocking(65536, timeout=900)
            except pexpect.EOF:
                break
            chunks.append((time.monotonic() - start_s, text))
        child.close()
        after = os.times()
    if cast is not None:
        header = {"version": 2, "width": COLUMNS, "height": 40, "command": session.command}
        cast.write_text(
            "\n".join(json.dumps(each) for each in (header, *([s, "o", t] for s, t in chunks))) + "\n"
        )
    return figures(
        session,
        chunks,
        known,
        after.children_user + after.children_system - before.children_user - before.children_system,
        child.exitstatus,
    )


def figures(
    session: Session, chunks: list[tuple[float, str]], known: set[str], cpu_s: float, exit_code: int | None
) -> Minutes:
    """Return the figures of what a terminal received: text with its seconds."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream, answer_s, lines = pyte.Stream(screen), None, list[str]()
    for second, text in chunks:
        stream.feed(text)
        lines = [line.rstrip() for line in screen.display if line.strip()]
        if answer_s is None and any(re.search(session.answer, line) for line in lines):
            answer_s = second
    at = next((i for i, line in enumerate(lines) if re.search(session.answer, line)), None)
    seconds = [0.0, *(second for second, _ in chunks)]
    return Minutes(
        first_line_s=round(seconds[1], 1),
        answer_s=None if answer_s is None else round(answer_s, 1),
        answer_line=None if at is None else at + 1,
        lines=len(lines),
        silence_s=round(max(b - a for a, b in itertools.pairwise(seconds)), 1),
        cpu_s=round(cpu_s, 1),
        exit_code=exit_code,
        unexplained=unexplained(lines, session.command, known),
    )


def unexplained(lines: list[str], command: str, known: set[str]) -> tuple[str, ...]:
    """Return the words of `lines` that are not known: without options, files and the user's own words."""
    text = re.sub(r"--[a-z-]+|\S+\.\w+\b|\b\w+(?=\()", " ", " ".join(lines))
    words = {each.lower() for each in re.findall(r"[A-Za-z_]{2,}", text)}
    return tuple(sorted(words - known - {each.lower() for each in re.findall(r"[A-Za-z_]{2,}", command)}))


def vocabulary(words: Path) -> set[str]:
    """Return the words of the dictionary, of the glossary, and units."""
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").partition("## Retired words")[0]
    found = words.read_text(encoding="utf-8").split() + re.findall(r"[A-Za-z_]{2,}", glossary)
    return {each.lower() for each in found} | {"kib", "mib", "gib", "gb", "ms"}


def main() -> None:
    """Record, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="append", metavar="NAME=DIR")
    parser.add_argument("--words", type=Path, default=Path("/usr/share/dict/words"))
    parser.add_argument("--only", choices=SESSIONS, action="append")
    parser.add_argument("--casts", type=Path, help="write NAME-SESSION.cast there")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    versions = dict(each.split("=", 1) for each in options.version or (f"now={Path(sys.executable).parent}",))
    known, found = vocabulary(options.words), dict[str, dict[str, Any]]()
    if options.json is not None and options.json.exists():
        found = json.loads(options.json.read_text())
    for name in options.only or SESSIONS:
        found.setdefault(name, {})["command"] = SESSIONS[name].command
        for version, folder in versions.items():
            file = f"{version}-{name.replace(' ', '-')}.cast"
            cast = None if options.casts is None else options.casts / file
            found[name][version] = asdict(record(SESSIONS[name], Path(folder), known, cast))
            print(name, version, json.dumps(found[name][version], ensure_ascii=False), flush=True)
        if options.json is not None:  # after each session, so that a killed run keeps those before
            options.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
