"""The bytes of a row, and which values of it are quantised."""

from __future__ import annotations

import pytest

from memtune.parallel.collectives.message_layout import Form, Row


def test_row_starts_block_per_parameter_and_groups_kept_values() -> None:
    form = Form(8, 4, 0)
    assert form.row([5, 6], [False, False]).lengths == (5, 0, 6)
    assert form.row([5, 6, 7], [True, True, False]).lengths == (0, 11, 7)
    assert form.row([5, 6, 7], [False, True, True]).lengths == (5, 13)
    assert form.row([3, 5, 6, 7], [True, False, False, True]).lengths == (0, 3, 5, 0, 6, 7)
    assert form.row([], []).lengths == ()


@pytest.mark.parametrize(
    ("row", "n_bytes"),
    [
        (Row((256,), 8, 256), 272),  # 256 codes and one scale, rounded up
        (Row((256,), 4, 256), 144),
        (Row((257, 3), 4, 256), 160),  # two scales, three kept values, 129 bytes of codes: 149
        (Row((0, 4), 8, 256), 16),
        (Row((), 8, 256), 0),
    ],
)
def test_row_counts_values_and_scales_in_bytes(row: Row, n_bytes: int) -> None:
    assert row.n_bytes == n_bytes


def test_large_messages_are_half_or_quarter_of_bfloat16_plus_scales() -> None:
    n = 10**6
    for bits, share in ((8, 0.5), (4, 0.25)):
        assert Row((n,), bits, 256).n_bytes == pytest.approx(2 * n * (share + 4 / (2 * 256)), rel=1e-4)  # type: ignore[arg-type]
