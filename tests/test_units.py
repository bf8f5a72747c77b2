"""Bytes in text, in a form for people."""

from __future__ import annotations

import pytest

from memtune.units import bytes_in_words, format_count, format_seconds


def test_bytes_in_words_formats_only_bytes() -> None:
    text = (
        "aten::mm: it asks for 2097152 bytes, but 29360128 of the 31457280 bytes of device memory are live (4"
        " now)"
    )
    found = "aten::mm: it asks for 2.00 MiB, but 28.0 MiB of the 30.0 MiB of device memory are live (4 now)"
    assert bytes_in_words(text) == found
    assert bytes_in_words("rank 12000 of 16384 said 7 bytes") == "rank 12000 of 16384 said 7 B"
    found = bytes_in_words("(live now: device 565407960, host 1511424, ssd 0; peak device 566231040 bytes)")
    assert found == "(live now: device 539 MiB, host 1.44 MiB, ssd 0; peak device 540 MiB)"
    assert bytes_in_words("device 0, host 12") == "device 0, host 12"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0412, "41.2 ms"),
        (0.9997, "1.00 s"),
        (0.2, "200 ms"),
        (1.7, "1.70 s"),
        (15, "15.0 s"),
        (247, "4:07"),
        (3729, "1:02:09"),
    ],
)
def test_format_seconds_has_three_digits(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (970, "970"),
        (17_290, "17.3k"),
        (28.5e6, "28.5M"),
        (999.7e6, "1.00B"),
        (6.738e9, "6.74B"),
        (405e9, "405B"),
    ],
)
def test_format_count_has_three_digits(number, text):
    assert format_count(number) == text
