from __future__ import annotations

import subprocess
import sys
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
def test_a_technique_says_what_it_is(cls: type[Technique]):
    *_, folder, stem = cls.__module__.removeprefix("memtune.search_spaces.").split(".")
    assert cls.slot.endswith(folder)
    assert cls.model_fields["kind"].default == stem
    assert cls.title
    assert cls.source
    assert isinstance(cls.exactness, Exactness)
    assert cls.__doc__
    assert sys.modules[cls.__module__].__doc__


@pytest.mark.parametrize("slot", search_spaces.SLOTS)
def test_null_techniques_use_no_mechanism(slot: str):
    null = search_spaces.null(slot)
    assert null.slot == slot
    assert null.env() == {}
    assert null.record(None) == {}  # type: ignore[arg-type]  # null techniques look at no target


def test_typo_in_kind_names_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'expandable_segments'"):
        search_spaces.find("allocator", "expandable_segment")


def test_typo_in_axis_names_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'recompute'"):
        search_spaces.kinds("recompte")


@pytest.mark.parametrize("kind", ["../allocator/native", "__init__", "native.os", "", "_helper"])
def test_a_kind_never_reaches_other_files(kind: str):
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
