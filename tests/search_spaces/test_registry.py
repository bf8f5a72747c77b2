from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path

import pytest

from memtune import search_spaces
from memtune.errors import ConfigError
from memtune.technique import Exactness, Technique

FOLDER = Path(search_spaces.__file__).parent


def test_pass_order_holds_every_slot_once():
    assert sorted(search_spaces.PASS_ORDER) == sorted(search_spaces.SLOTS)


def test_sharding_passes_see_recomputed_weights():
    order = search_spaces.PASS_ORDER.index
    assert (
        order("recompute") < order("offload.activations") < order("sharding.states") < order("offload.states")
    )


@pytest.mark.parametrize("slot", search_spaces.SLOTS)
def test_kinds_are_the_files_of_the_folder(slot: str):
    stems = {path.stem for path in (FOLDER / slot.replace(".", "/")).glob("*.py") if path.stem[0] != "_"}
    assert set(search_spaces.kinds(slot)) == stems
    assert search_spaces.kinds(slot)[0] == search_spaces.NULL_KINDS[slot]


@pytest.mark.parametrize(
    "cls", search_spaces.all_techniques(), ids=lambda cls: f"{cls.slot}-{cls.__module__.split('.')[-1]}"
)
def test_technique_describes_itself(cls: type[Technique]):
    *_, folder, stem = cls.__module__.removeprefix("memtune.search_spaces.").split(".")
    assert cls.slot.endswith(folder)
    assert cls.model_fields["kind"].default == stem
    assert cls.title
    assert cls.source
    assert isinstance(cls.exactness, Exactness)
    assert cls.__doc__
    assert sys.modules[cls.__module__].__doc__


def settings_of(cls: type[Technique]) -> Iterator[Technique]:
    """The default knobs, then each other value that a search tries, where the technique allows it alone."""
    default = cls()
    yield default
    for knob, values in default.choices().items():
        yield from (default.model_copy(update={knob: value}) for value in values[1:])


@pytest.mark.parametrize("slot", search_spaces.SLOTS)
def test_settings_have_clauses_of_their_own(slot: str):
    clauses = [
        each.described()
        for cls in search_spaces.all_techniques()
        if cls.slot == slot
        for each in settings_of(cls)
    ]
    assert len(set(clauses)) == len(clauses)
    for clause in clauses:
        verb, *rest = clause.split()
        assert re.fullmatch(r"[a-z]+s", verb), clause
        assert rest, clause
        assert "." not in clause.split("(")[0], clause
        assert len(clause) <= 150, clause


def test_clause_names_the_paper_of_a_published_technique():
    unnamed = {
        cls.model_fields["kind"].default
        for cls in search_spaces.all_techniques()
        if not cls.paper and re.search(r"\d{4}", cls.source)
    }
    assert unnamed == set()


def test_knob_that_the_clause_does_not_depend_on_is_appended():
    copied = search_spaces.find("offload.activations", "copy_out")(kind="copy_out", ratio=0.5, prefetch=3)
    assert copied.described() == (
        "moves 50% of the blocks' saved activations to host memory until backward (vDNN, prefetch: 3)"
    )


@pytest.mark.parametrize("slot", search_spaces.SLOTS)
def test_null_techniques_use_no_mechanism(slot: str):
    null = search_spaces.null(slot)
    assert null.slot == slot
    assert null.env() == {}
    assert null.record(None) == {}  # type: ignore[arg-type]  # null techniques look at no target


def test_cards_equal_the_classes_and_load_no_torch():
    classes = [
        (cls.slot, cls.model_fields["kind"].default, cls.title, cls.source, cls.paper, str(cls.exactness))
        for cls in search_spaces.all_techniques()
    ]
    assert [astuple(card) for card in search_spaces.cards()] == classes
    code = "import sys, memtune.search_spaces as s; s.cards(); print({'torch', 'pydantic'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_typo_in_kind_names_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'expandable_segments'"):
        search_spaces.find("allocator", "expandable_segment")


def test_typo_in_axis_names_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'recompute'"):
        search_spaces.kinds("recompte")


@pytest.mark.parametrize("kind", ["../allocator/native", "__init__", "native.os", "", "_helper"])
def test_kind_never_reaches_other_files(kind: str):
    with pytest.raises(ConfigError):
        search_spaces.find("allocator", kind)


def test_finding_one_technique_imports_no_other():
    code = (
        "import sys; from memtune.search_spaces import find; find('allocator', 'native'); "
        "print([m for m in sys.modules if m.startswith('memtune.search_spaces.') and m.count('.') > 2]); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=FOLDER.parent, check=True
    )
    assert done.stdout.splitlines() == ["['memtune.search_spaces.allocator.native']", "False"]
