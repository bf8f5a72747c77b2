"""Plain data survives a round trip; everything else is refused with a message, for any bytes."""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
from collections.abc import Collection
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from memtune import safe_pickle
from memtune.errors import UsageError


def load(data: bytes, name: str, allowed: Collection[tuple[str, str]] = ()) -> Any:
    return safe_pickle.load(data, name, fix="write it again", allowed=allowed)


NUMBERS = st.integers(-(2**63), 2**64) | st.floats(allow_nan=False) | st.booleans() | st.none()
PLAIN = st.recursive(
    NUMBERS | st.text(max_size=5) | st.just("x" * 300),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 70000), inner, max_size=5)
    ),
    max_leaves=30,
)


@settings(max_examples=200, deadline=None)
@given(PLAIN, st.integers(2, 5))
def test_load_returns_plain_data(value: Any, protocol: int) -> None:
    assert load(pickle.dumps(value, protocol=protocol), "file") == value


def test_load_preserves_shared_objects() -> None:
    frames = [{"filename": "model.py", "line": 3}]
    found = load(pickle.dumps([{"frames": frames}] * 2 + [{"frames": frames}] * 300), "file")
    assert found[0]["frames"] is found[-1]["frames"]


@settings(max_examples=300, deadline=None)
@given(PLAIN, st.data())
def test_load_of_damaged_data_raises_or_is_harmless(value: Any, data: st.DataObject) -> None:
    whole = bytearray(pickle.dumps(value, protocol=data.draw(st.integers(2, 5))))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(UsageError):
        load(bytes(whole), "file")


def test_load_detects_every_truncation() -> None:
    whole = pickle.dumps(
        {"segments": [1, 2**40, "text", (None, 2.5)], "device_traces": [[{"action": "alloc"}]]}
    )
    for length in range(len(whole)):
        with pytest.raises(UsageError) as error:
            load(whole[:length], "file")
        assert error.value.code == "MT141"


class Shape:
    """An object with attributes."""

    def __init__(self, rows: int) -> None:
        self.rows = rows


CONSTRUCTORS = {("copy_reg", "_reconstructor"), ("__builtin__", "object")}
"""Names by which protocol 2 builds objects."""


class Command:
    """Content of a hostile file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch hacked",)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_load_refuses_code_by_name(protocol: int) -> None:
    with pytest.raises(UsageError, match="asks for code to be run") as error:
        load(pickle.dumps({"segments": [], "device_traces": [Command()]}, protocol=protocol), "file")
    assert error.value.code == "MT142"
    assert "system" in error.value.evidence
    assert error.value.evidence.startswith("GLOBAL" if protocol < 4 else "STACK_GLOBAL")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_load_returns_objects_of_allowed_classes_as_records(protocol: int) -> None:
    data = pickle.dumps({"at": [Fraction(1, 3)], "shape": Shape(2)}, protocol=protocol)
    found = load(data, "file", {("fractions", "Fraction"), (Shape.__module__, "Shape")} | CONSTRUCTORS)
    assert found["at"][0].of == ("fractions", "Fraction")
    assert found["shape"].state == {"rows": 2}
    with pytest.raises(UsageError, match="MT142"):
        load(data, "file", {("fractions", "Fraction")})


@pytest.mark.parametrize(
    "body",
    [
        b"cbuiltins\neval\nX\x01\x00\x00\x001\x85R.",  # a function that is not allowed
        b"N)R.",  # a call of what is no class
        b"cfractions\nFraction\n}b.",  # a state for a class: it would change the class
        b"cfractions\nFraction\n)R}b}b.",  # a second state
        b"cfractions\nFraction.__new__\n.",
    ],
)
def test_load_refuses_calls_of_other_names(body: bytes) -> None:
    with pytest.raises(UsageError, match="MT142"):
        load(b"\x80\x02" + body, "file", {("fractions", "Fraction")})


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02Nr\xff\xff\xff\x7f.",  # a memo of 2^31 places would be 32 GiB in Python's unpickler
        b"\x80\x04" + b"(" * 100_000 + b".",
        b"\x80\x04N" + b"\x85" * 200_000 + b".",  # hashing this as a key would overrun the stack
    ],
)
def test_load_bounds_memory_of_small_files(data: bytes) -> None:
    with contextlib.suppress(UsageError):
        load(data, "file")


@pytest.mark.parametrize(
    ("data", "evidence"),
    [
        (b"", "it is empty"),
        (b"PK\x03\x04rest", "an archive, as torch.save writes them"),
        (b'{"segments": []}', "text"),
        (b"\x1f\x8b\x08", "compressed"),
        (b"\x80\x09}.", "starts with"),
        (pickle.dumps([1], protocol=0), "starts with"),
    ],
)
def test_load_names_other_file_types(data: bytes, evidence: str) -> None:
    with pytest.raises(UsageError) as error:
        load(data, "file")
    assert error.value.code == "MT141"
    assert evidence in error.value.evidence


@pytest.mark.parametrize(
    "body",
    [
        b"]Na",
        b"}Nu.",
        b"Na.",
        b"N(Ne.",
        b"}(NNu.",
        b"})Ns.",
        b"h\x05.",
        b"N" * 2 + b".",
        b".",
        b"\x85.",
        b"\x8a\xff" + b"1" * 255,
        b"X" + struct.pack("<I", 1) + b"\xff.",
        b"t.",
        b"N\x80\x09.",
    ],
)
def test_load_reports_nonsense_as_damage(body: bytes) -> None:
    with pytest.raises(UsageError) as error:
        load(b"\x80\x04" + body, "file")
    assert error.value.code == "MT141"
