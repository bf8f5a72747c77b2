"""Names in back quotes exist, in comments, docstrings and READMEs: functions, fields, modules and files."""

from __future__ import annotations

import builtins
import keyword
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("memtune/", "autotune/", "executors/", "search_spaces/", "tests/")
PAGES = ("CONTRIBUTING.md", "docs/architecture.md", "docs/glossary.md", "docs/techniques.md")

STRING_OR_COMMENT = re.compile(
    r'''"""(?:\\.|[^\\])*?"""|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|#[^\n]*''', re.DOTALL
)
SOURCE = {".py", ".pyi", ".md", ".h", ".cpp", ".inl", ".c"}
WORD = re.compile(r"[A-Za-z_]\w*")
QUOTED = re.compile(r"`([A-Za-z_][\w/]*(?:\.[A-Za-z_]\w*)*)(?:\(\))?`")
PATH = re.compile(r"[\w/]+\.(?:py|pyi|cpp|h|inl|md)|\w+/[\w/]+")
BUILTIN = {*dir(builtins), *keyword.kwlist}

PACKAGES = {"torch", "aten", "nn", "autograd", "copy"}
"""Packages whose names are not looked up."""
OBJECTS = {"tuned", "certificate", "event", "model", "module", "p", "parameter"}
"""Objects that any text may name; only their attributes are looked up."""
EXTERNAL = {
    *("model.py", "path/to/model.py", "owner/name", "package.module.Name"),  # the user's
    *("study.db", "events.jsonl", "result.json", "timelines.json", "logs", "build"),  # written
    *("tuned.yaml", "tuned.evidence.json"),
    *("random.py", "statistics.py", "get_source"),  # Python
    # PyTorch's C++ and private Python
    *("CUDACachingAllocator.cpp", "release_cached_blocks", "run_conv_plan", "areAnyTensorSubclassLike"),
    *("can_accumulate_inplace", "record_trace", "_snapshot", "_dump_snapshot", "_init_group", "unsafe_chunk"),
    *("foreach_all_gather", "foreach_reduce", "free_unsharded_param", "wait_for_unshard"),  # FSDP2
    *("CPUOffloadPolicy", "CPUOffloadOptimizer"),  # FSDP2, torchao
    *("Scheduler.fuse_nodes", "realize_reads_threshold", "StorageBox.should_realize_on_reuse"),  # inductor
    *("layout_optimization", "fallback_node_due_to_unsupported_type", "scatter_upon_const_tensor"),
    "no_weight_decay",  # timm
    # The worked example of search_spaces/recompute/README.md
    *("Above", "search_spaces/recompute/above.py", "tests/search_spaces/recompute/test_above.py"),
}


@dataclass(frozen=True)
class Names:
    """Names that the tree defines or uses."""

    words: frozenset[str]
    """Words of the code, folders and stems of files."""
    of_module: dict[str, set[str]]
    """Stem of a file, folder or class → words of the code there."""
    files: frozenset[str]
    """Parts of the paths of files and folders, of one name or several."""


@dataclass(frozen=True)
class Source:
    """The text of one file."""

    path: str
    words: set[str]
    """Words of its code, with those of strings without spaces."""
    prose: list[tuple[int, str]]
    """(line, text) of its comments and docstrings."""


def read_source(path: str, text: str) -> Source:
    """Split a file into the words of its code, and its comments and docstrings."""
    if path.endswith(".md"):
        return Source(path, set(), [(1, text)])
    code, prose, at = [], [], 0
    for match in STRING_OR_COMMENT.finditer(text):
        part = match[0]
        code.append(text[at : match.start()])
        if part.startswith(("#", '"""')):
            prose.append((text.count("\n", 0, match.start()) + 1, part))
        elif " " not in part:  # a key or a value, such as the name of a technique or of an attribute
            code.append(part)
        at = match.end()
    code.append(text[at:])
    return Source(path, set(WORD.findall(" ".join(code))), prose)


@cache
def tree() -> tuple[Names, tuple[Source, ...]]:
    """Return the names of the tree, and its files of source."""
    paths = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    sources = tuple(
        read_source(each, (ROOT / each).read_text(errors="replace"))
        for each in paths
        if Path(each).suffix in SOURCE and (ROOT / each).is_file()
    )
    of_module: dict[str, set[str]] = {}
    files: set[str] = set()
    for each in paths:
        parts = Path(each).parts
        files |= {"/".join(parts[start:end]) for end in range(1, len(parts) + 1) for start in range(end)}
    for source in sources:
        for part in Path(source.path).with_suffix("").parts:
            of_module.setdefault(part, set()).update(source.words)
    words = set().union(*(each.words for each in sources), of_module)
    return Names(frozenset(words), of_module, frozenset(files)), sources


def missing_names(source: Source, names: Names) -> list[str]:
    """Return the quoted names of `source` that resolve to none of `names`, as file:line: name."""
    found = []
    for line, text in source.prose:
        for match in QUOTED.finditer(text):
            name = match[1].rstrip("/")
            if not is_known(name, source, names):
                found.append(f"{source.path}:{line + text.count(chr(10), 0, match.start())}: `{name}`")
    return found


def is_known(name: str, source: Source, names: Names) -> bool:
    """Return True if a quoted name of `source` exists."""
    if name in names.files or name in EXTERNAL:
        return True
    if PATH.fullmatch(name):
        return False
    *owners, last = name.split(".")
    if owners and owners[0] in PACKAGES:
        return True
    if last not in names.words and last not in BUILTIN:
        return False
    if not owners or {*owners} & OBJECTS:
        return True
    # A module, folder or class, unless the file has a variable of this name.
    if owners[-1] in names.of_module and owners[-1] not in source.words:
        return last in names.of_module[owners[-1]] or last in names.of_module
    return owners[0] in names.of_module or owners[0] in (
        names.words if owners[0].strip("_")[:1].isupper() else source.words
    )


def test_quoted_names_exist() -> None:
    names, sources = tree()
    missing = [
        each
        for source in sources
        if source.path.startswith(FOLDERS) or source.path in PAGES or source.path.endswith("README.md")
        for each in missing_names(source, names)
    ]
    assert not missing, "\n".join(missing)


def test_missing_names_are_found_by_module_and_file() -> None:
    names = Names(
        frozenset({"hooks", "events", "emit", "held"}), {"hooks": {"emit"}}, frozenset({"events.py"})
    )
    text = (
        "`emit`, `gone`, `hooks.emit`,\n`hooks.held`, `shard.emit`, `events.py`, `old/events.py`, `torch.any`"
    )
    assert missing_names(Source("page.md", set(), [(1, text)]), names) == [
        "page.md:1: `gone`",
        "page.md:2: `hooks.held`",
        "page.md:2: `shard.emit`",
        "page.md:2: `old/events.py`",
    ]
