"""Names, prose and docstring openings follow docs/glossary.md.

`pytest tests/test_language.py` checks the tree. As a tool it takes files and folders, and exits with 1 if it
finds anything:

    python tests/test_language.py [PATH ...]      print each finding as file:line: word → replacement
    python tests/test_language.py --count [PATH ...]   print the number of findings per folder and rule
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"
RETIRED_HEADING = "## Retired words"

RULES = ("name", "prose", "opening", "sentence", "test name")
CPP = {".h", ".cpp", ".inl", ".c", ".cu"}
HASH_COMMENTS = {"", ".toml", ".txt", ".yaml", ".yml", ".cfg", ".sh"}
EXEMPT = {
    "LICENSE",
    "memtune/_native.pyi",  # written by nanobind
    "tests/test_language.py",
    "benchmarks/results/*.md",  # written by runs, some of them old; the scripts that write them are checked
}

RELATIVE = re.compile(r"(?:What|Whatever|Who|Whose|Whoever|Where|Wherever|Which|Whichever|Whether|Why|How)\b")
SENTENCE = re.compile(r"(?:^|(?<=[.:!?]\s)|(?<=\n\n))(?:What|Whatever|Who|Whose|Whoever)\b[^.?!]*[.?!]?")
TEST_NAME = re.compile(
    r"test_(?:what|who|whose|whoever|where|which|a|an|the|some|any|every(?!_nth)|each|no(?!_dropout|_color))(?:_|$)"
)
WORDS_MIN = 3  # a string of fewer words is a key or a value, not a message
STRING_OR_COMMENT = re.compile(
    r'''"""(?:\\.|[^\\])*?"""|\'{3}(?:\\.|[^\\])*?\'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|(#[^\n]*)''',
    re.DOTALL,
)
LETTERS = re.compile(r"[^\W\d_]+")


@dataclass(frozen=True)
class Retired:
    """One row of the glossary's table, compiled."""

    replacement: str
    prose: re.Pattern[str] | None
    in_test_names: bool
    names: tuple[tuple[str, ...], ...]
    allowed: tuple[tuple[str, ...], ...]
    classes: frozenset[str]
    firsts: frozenset[str]
    """First letters of the first word of each form: most texts have none of them, and need no search."""


@dataclass(frozen=True, order=True)
class Finding:
    """One use of a retired word, or one opening that a rule forbids."""

    path: str
    line: int
    rule: str
    text: str
    replacement: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text!r} → {self.replacement}"


@dataclass(frozen=True)
class Prose:
    """A docstring, comment, message or document, with the source line of each of its lines."""

    text: str
    lines: tuple[int, ...]
    is_docstring: bool = False


@dataclass(frozen=True)
class Name:
    """A name that a file defines."""

    text: str
    line: int
    is_class: bool = False


def phrases(cell: str) -> tuple[list[str], list[str]]:
    """Return the forms of a table cell and the exceptions in its `(not: ...)`."""
    kept, _, allowed = cell.partition("(not:")
    return [each.strip() for each in kept.split(",")], [
        each.strip(" )") for each in allowed.split(",") if each.strip(" )")
    ]


@cache
def retired_words() -> tuple[Retired, ...]:
    """Return the rows of the glossary's table of retired words."""
    rows = []
    _, found, table = GLOSSARY.read_text().partition(RETIRED_HEADING)
    assert found, f"{GLOSSARY} has no heading {RETIRED_HEADING!r}"
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 3 or cells[0] == "retired" or set(cells[0]) <= {"-"}:
            continue
        forms, allowed = phrases(cells[0])
        places = {place.strip() for place in cells[1].split(",")}
        assert places <= {"prose", "names", "identifiers", "class names"}, (
            f"{GLOSSARY}: unknown place in {cells[1]!r}"
        )
        rows.append(
            Retired(
                cells[2],
                prose_pattern(forms, allowed) if "prose" in places else None,
                "names" in places,
                tuple(tuple(form.lower().split()) for form in forms)
                if places & {"names", "identifiers"}
                else (),
                tuple(tuple(form.lower().split()) for form in allowed),
                frozenset(forms) if "class names" in places else frozenset(),
                frozenset(LETTERS.findall(form.lower())[0] for form in forms),
            )
        )
    return tuple(rows)


def prose_pattern(forms: list[str], allowed: list[str]) -> re.Pattern[str]:
    """Return a pattern that finds any of `forms` as whole words, also across line ends and hyphens."""

    def joined(form: str) -> str:
        return r"[\s\-]+".join(map(re.escape, form.split()))

    skip = "".join(rf"(?!{joined(form)}\b)" for form in allowed)
    longest_first = sorted(forms, key=len, reverse=True)
    return re.compile(
        rf"(?<![\w.]){skip}(?:{'|'.join(map(joined, longest_first))})\b(?!\w|\()", re.IGNORECASE
    )


def words_of(name: str) -> list[str]:
    """Split an identifier at underscores and capitals."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


@cache
def rows_by_first_word() -> dict[str, tuple[Retired, ...]]:
    """Return the rows of the table by each word that a form of theirs begins with."""
    firsts = {first for row in retired_words() for first in row.firsts}
    return {first: tuple(row for row in retired_words() if first in row.firsts) for first in firsts}


def rows_for(words: Iterable[str]) -> dict[int, Retired]:
    """Return the rows of which a form may begin at one of the lower-case `words`."""
    known = rows_by_first_word()
    return {id(row): row for word in known.keys() & set(words) for row in known[word]}


def contains(words: list[str], phrase: tuple[str, ...]) -> bool:
    return any(tuple(words[at : at + len(phrase)]) == phrase for at in range(len(words)))


def name_findings(path: str, name: Name) -> Iterator[Finding]:
    words = words_of(name.text)
    is_test = name.text.startswith("test_")
    for row in rows_for(words).values():
        if is_test and not row.in_test_names:
            continue
        if name.is_class and name.text.strip("_") in row.classes:
            yield Finding(path, name.line, "name", name.text, row.replacement)
        elif any(
            contains(words, phrase) and not any(contains(words, each) for each in row.allowed)
            for phrase in row.names
        ):
            yield Finding(path, name.line, "name", name.text, row.replacement)
    if TEST_NAME.match(name.text):
        yield Finding(path, name.line, "test name", name.text, "begin with the unit under test")


def prose_findings(path: str, prose: Prose) -> Iterator[Finding]:
    def line_at(offset: int) -> int:
        return prose.lines[min(prose.text.count("\n", 0, offset), len(prose.lines) - 1)]

    def excerpt(match: re.Match[str]) -> str:
        words = " ".join(match[0].split())
        return words if len(words) <= 60 else f"{words[:57]}..."

    for row in rows_for(LETTERS.findall(prose.text.lower())).values():
        for match in row.prose.finditer(prose.text) if row.prose else ():
            yield Finding(path, line_at(match.start()), "prose", excerpt(match), row.replacement)
    opening = RELATIVE.match(prose.text.lstrip()) if prose.is_docstring else None
    if opening:
        yield Finding(path, prose.lines[0], "opening", opening[0], "a verb in the imperative, or a noun")
    for match in SENTENCE.finditer(prose.text):
        if not match[0].endswith("?") and not (opening and match.start() == 0):
            yield Finding(path, line_at(match.start()), "sentence", excerpt(match), "subject, verb, object")


def python_names(nodes: Iterable[ast.AST], *, with_variables: bool = False) -> Iterator[Name]:
    """Yield classes, functions, parameters and the fields and constants of modules and classes; on demand
    also the other variables and attributes that are assigned.
    """
    for node in nodes:
        if with_variables and isinstance(getattr(node, "ctx", None), ast.Store):
            text = getattr(node, "id", "") or getattr(node, "attr", "")
            yield Name(text, node.lineno)
        if isinstance(node, ast.ClassDef):
            yield Name(node.name, node.lineno, is_class=True)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Name(node.name, node.lineno)
        elif isinstance(node, ast.arg):
            yield Name(node.arg, node.lineno)
        if isinstance(node, ast.ClassDef | ast.Module):
            for statement in node.body:
                targets = (
                    statement.targets
                    if isinstance(statement, ast.Assign)
                    else [getattr(statement, "target", None)]
                )
                yield from (Name(each.id, each.lineno) for each in targets if isinstance(each, ast.Name))


def docstring_nodes(nodes: Iterable[ast.AST]) -> Iterator[ast.Constant]:
    """Yield strings that stand alone as a statement: docstrings of modules, classes, functions and
    attributes.
    """
    for node in nodes:
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value


def python_prose(source: str, nodes: list[ast.AST]) -> Iterator[Prose]:
    docstrings = list(docstring_nodes(nodes))
    for node in docstrings:
        text = str(node.value)
        yield Prose(text, tuple(range(node.lineno, node.lineno + text.count("\n") + 1)), is_docstring=True)
    f_strings = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    inside = {id(part) for node in f_strings for part in ast.walk(node) if part is not node}
    inside |= {id(node) for node in docstrings}
    for node in nodes:
        if id(node) in inside:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if len(text.split()) >= WORDS_MIN:
            yield Prose(
                text,
                (node.lineno,)
                if node.lineno == node.end_lineno or "\n" not in text
                else line_numbers(node, text),
            )
    yield from comment_blocks(source)


def line_numbers(node: ast.expr, text: str) -> tuple[int, ...]:
    """Return the source line of each line of a string: exact for a triple-quoted one, else the first."""
    height = text.count("\n") + 1
    exact = node.end_lineno is not None and node.end_lineno - node.lineno + 1 == height
    return tuple(range(node.lineno, node.lineno + height)) if exact else (node.lineno,)


def comment_blocks(source: str) -> Iterator[Prose]:
    """Yield each run of comment lines as one text, so that a phrase is found across line ends."""
    block: list[tuple[int, int, str]] = []
    at, line = 0, 1
    for match in STRING_OR_COMMENT.finditer(source):
        if match[1] is None:
            continue
        line += source.count("\n", at, match.start())
        at = match.start()
        column = at - source.rfind("\n", 0, at)
        if block and (line != block[-1][0] + 1 or column != block[-1][1]):
            yield Prose("\n".join(text for _, _, text in block), tuple(line for line, _, _ in block))
            block = []
        block.append((line, column, match[1].lstrip("# ")))
    if block:
        yield Prose("\n".join(text for _, _, text in block), tuple(line for line, _, _ in block))


def cpp_parts(source: str) -> tuple[list[Name], list[Prose]]:
    """Return the names a C++ file declares and its comments and messages."""
    prose, code, at = [], [], 0
    for match in re.finditer(
        r"//[^\n]*(?:\n[ \t]*//[^\n]*)*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", source, re.DOTALL
    ):
        code.append(source[at : match.start()])
        first = source.count("\n", 0, match.start()) + 1
        text = match[0]
        code.append("\n" * text.count("\n"))
        at = match.end()
        if not text.startswith('"') or len(text.split()) >= WORDS_MIN:
            stripped = "\n".join(line.strip(' \t/*"') for line in text.split("\n"))
            prose.append(Prose(stripped, tuple(range(first, first + text.count("\n") + 1))))
    code.append(source[at:])
    names, seen = [], set()
    for number, line in enumerate("".join(code).split("\n"), 1):
        for word in re.findall(r"\b[A-Za-z_]\w*", line):
            if word not in seen:
                seen.add(word)
                names.append(Name(word, number))
    return names, prose


def hash_comments(source: str) -> Iterator[Prose]:
    for number, line in enumerate(source.split("\n"), 1):
        found = re.search(r"(?:^|\s)#+\s(.*)", line)
        if found:
            yield Prose(found[1], (number,))


def findings_in(path: Path, shown: str) -> Iterator[Finding]:
    """Yield what is to change in the file at `path`, reported under the name `shown`."""
    parts = Path(shown).with_suffix("").parts
    for part in dict.fromkeys([*parts[:-1][-1:], parts[-1]]) if parts else ():
        yield from name_findings(shown, Name(part, 1))
    source = path.read_text(errors="replace")
    names: list[Name] = []
    prose: list[Prose] = []
    if path.suffix in {".py", ".pyi"}:
        nodes = list(ast.walk(ast.parse(source)))
        is_product = parts[:1] not in (("tests",), ("benchmarks",), ("examples",))
        names = list(python_names(nodes, with_variables=is_product))
        prose = list(python_prose(source, nodes))
    elif path.suffix == ".md":
        text = source.partition(RETIRED_HEADING)[0] if path.name == GLOSSARY.name else source
        prose = [Prose(text, tuple(range(1, text.count("\n") + 2)))]
    elif path.suffix in CPP:
        names, prose = cpp_parts(source)
    elif path.suffix in HASH_COMMENTS:
        prose = list(hash_comments(source))
    for name in names:
        yield from name_findings(shown, name)
    for each in prose:
        yield from prose_findings(shown, each)


def tracked(folder: Path) -> list[Path]:
    """Return the files below `folder` that git does not ignore; without git, all of them."""
    command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:
        return sorted(path for path in folder.rglob("*") if path.is_file())
    return sorted({folder / name for name in listed.stdout.split("\0") if name})


def all_findings(paths: list[Path], base: Path = ROOT) -> list[Finding]:
    """Return the findings of all files in `paths`, sorted, each once; paths are shown relative to `base`."""
    found: set[Finding] = set()
    for path in (each for top in paths for each in (tracked(top) if top.is_dir() else [top])):
        absolute = path.resolve()
        shown = str(absolute.relative_to(base)) if absolute.is_relative_to(base) else str(path)
        readable = path.suffix in {".py", ".pyi", ".md"} | CPP | HASH_COMMENTS
        if (
            path.is_file()
            and not path.is_symlink()
            and readable
            and not any(absolute.match(each) for each in EXEMPT)
        ):
            found |= set(findings_in(path, shown))
    return sorted(found)


@cache
def findings_of_the_tree() -> tuple[Finding, ...]:
    return tuple(all_findings([ROOT]))


@pytest.mark.parametrize("rule", RULES)
def test_tree_has_no_findings(rule: str) -> None:
    found = [str(finding) for finding in findings_of_the_tree() if finding.rule == rule]
    assert not found, "\n".join(found)


def findings_of(tmp_path: Path, name: str, text: str) -> list[tuple[int, str, str]]:
    (tmp_path / name).write_text(text)
    return [(each.line, each.rule, each.text) for each in all_findings([tmp_path / name], tmp_path)]


def test_name_findings_cover_classes_functions_parameters_fields_and_variables(tmp_path: Path) -> None:
    source = "class Kept:\n    late: int = 0\n\n\ndef let_go(beside, kept):\n    late = 1\n\n\nclass LandedGrads: ...\n"  # noqa: E501
    found = findings_of(tmp_path, "names.py", source)
    assert found == [
        (1, "name", "Kept"),
        (2, "name", "late"),
        (5, "name", "beside"),
        (5, "name", "let_go"),
        (6, "name", "late"),
        (9, "name", "LandedGrads"),
    ]


def test_name_findings_allow_exceptions_and_parts_of_words(tmp_path: Path) -> None:
    assert (
        findings_of(tmp_path, "names.py", "def read_ahead(latency, turn_off, landscape, island): ...\n") == []
    )


def test_prose_findings_cover_docstrings_comments_messages_and_line_ends(tmp_path: Path) -> None:
    source = (
        '"""Copies run beside it.\n\nThe tensor is let\ngo here.\n"""\n\nx = 1  # the gradient landed\n'
        '# a comment that lets\n# go of it\nraise ValueError(f"{x} comes back here")\n'
    )
    found = findings_of(tmp_path, "prose.py", source)
    assert found == [
        (1, "prose", "beside"),
        (3, "prose", "let go"),
        (7, "prose", "landed"),
        (8, "prose", "lets go"),
        (10, "prose", "comes back"),
    ]


def test_prose_findings_skip_the_list_of_retired_words(tmp_path: Path) -> None:
    found = findings_of(
        tmp_path, "glossary.md", f"Runs beside it.\n\n{RETIRED_HEADING}\n\n| let go | prose | free |\n"
    )
    assert found == [(1, "prose", "beside")]


def test_docstring_openings_and_sentences_that_begin_with_a_relative_are_found(tmp_path: Path) -> None:
    source = (
        'def a():\n    """Whether it is there."""\n\n\ndef b():\n    """Return it. What is not there is loaded."""\n\n\n'  # noqa: E501
        'def c():\n    """Return it. Which tensors move? Those of `table`."""\n\n\ndef test_what_is_there(): ...\n'  # noqa: E501
        "def test_each_tensor(): ...\ndef test_anything(): ...\ndef test_no_dropout(): ...\n"
    )
    found = findings_of(tmp_path, "openings.py", source)
    assert found == [
        (2, "opening", "Whether"),
        (6, "sentence", "What is not there is loaded."),
        (13, "test name", "test_what_is_there"),
        (14, "test name", "test_each_tensor"),
    ]


def test_cpp_comments_and_identifiers_are_read(tmp_path: Path) -> None:
    found = findings_of(tmp_path, "queue.h", "// runs beside\nint landed = 0;  /* let go */\n")
    assert found == [(1, "prose", "beside"), (2, "name", "landed"), (2, "prose", "let go")]


def test_retired_words_have_replacements() -> None:
    assert len(retired_words()) > 40
    assert all(row.replacement for row in retired_words())


def counts_by_folder(found: Iterable[Finding]) -> Counter[tuple[str, str]]:
    """Return the number of findings by (folder, rule)."""
    return Counter((str(Path(each.path).parent), each.rule) for each in found)


def main() -> int:
    """Print the findings of the given paths; return 1 if there are any."""
    parser = argparse.ArgumentParser(description="Find words that docs/glossary.md retires.")
    parser.add_argument(
        "--count", action="store_true", help="print counts per folder and rule instead of findings"
    )
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders; default: the whole tree")
    options = parser.parse_args()
    found = all_findings(options.paths or [ROOT], Path.cwd() if options.paths else ROOT)
    if options.count:
        counts = counts_by_folder(found)
        folders = sorted({folder for folder, _ in counts})
        print(f"{'folder':60}", *(f"{rule:>10}" for rule in RULES))
        for folder in folders:
            print(f"{folder:60}", *(f"{counts[folder, rule]:10}" for rule in RULES))
        print(f"{'all':60}", *(f"{sum(counts[folder, rule] for folder in folders):10}" for rule in RULES))
    else:
        print("\n".join(map(str, found)) or "no findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
