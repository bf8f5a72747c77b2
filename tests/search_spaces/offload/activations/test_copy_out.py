"""Saved activations to the host: the claimed share crosses the link once down and once up."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from zoo_paths import ZOO

from memtune.program import Resource, Tier
from memtune.runtime import disk, offload_dir
from memtune.search_spaces.offload.activations.copy_out import CopyOut
from memtune.search_spaces.recompute.full import Full
from memtune.search_spaces.recompute.selective import Selective
from memtune.technique import Technique
from memtune.testing import TechniqueSuite, drift, rewritten, train
from memtune.testing.drift import plain_program, target_of
from memtune.testing.training import differences, plain

ALL = CopyOut(kind="copy_out", min_bytes=0)
HALF = CopyOut(kind="copy_out", min_bytes=0, ratio=0.5)
SSD = CopyOut(kind="copy_out", min_bytes=0, target="ssd", ahead=2)


class TestCopyOut(TechniqueSuite):
    technique = CopyOut
    models = ZOO
    quick = ("tied",)
    variants = (ALL, HALF, SSD)

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))
        yield
        gc.collect()
        assert not disk.is_open() or disk.current().used_bytes == 0  # nothing is left on SSD when a test ends

    @pytest.mark.parametrize("variant", [ALL, HALF, SSD], ids=["all", "half", "ssd"])
    @pytest.mark.parametrize("recompute", [Full(kind="full"), Selective(kind="selective")], ids=lambda each: each.kind)
    @pytest.mark.parametrize("model", ZOO)
    def test_composes_with_recompute(self, model: str, recompute: Technique, variant: CopyOut) -> None:
        assert drift(ZOO[model], recompute, variant) == ""

    @pytest.mark.parametrize("recompute", [Full(kind="full"), Selective(kind="selective")], ids=lambda each: each.kind)
    @pytest.mark.parametrize("model", ["gpt", "cnn_bn", "inplace_views"])
    def test_trains_with_recompute(self, model: str, recompute: Technique) -> None:
        assert not differences(train(ZOO[model], recompute, HALF), plain(ZOO[model]))

    @pytest.mark.parametrize(("variant", "blocks"), [(ALL, 4), (HALF, 2)], ids=["all", "half"])
    def test_the_claimed_share_leaves_once_and_comes_back_once(self, variant: CopyOut, blocks: int) -> None:
        before, step = rewritten(ZOO["gpt"]), rewritten(ZOO["gpt"], variant)
        down = int(step.op_traffic_bytes[step.op_resource == Resource.DEVICE_TO_HOST].sum())
        up = int(step.op_traffic_bytes[step.op_resource == Resource.HOST_TO_DEVICE].sum())
        batch = int(before.op_traffic_bytes[before.op_resource == Resource.HOST_TO_DEVICE].sum())
        assert down == up - batch == sum(before.saved_bytes(block) for block in range(blocks))

    def test_small_tensors_stay(self) -> None:
        step = rewritten(ZOO["gpt"], CopyOut(kind="copy_out", min_bytes=20_000))
        sizes = step.op_traffic_bytes[step.op_resource == Resource.DEVICE_TO_HOST]
        assert len(sizes)
        assert sizes.min() >= 20_000

    def test_nothing_large_enough_is_a_reason(self) -> None:
        technique = CopyOut(kind="copy_out", min_bytes=1 << 30)
        assert "1073741824" in str(technique.fits(plain_program(ZOO["gpt"]), target_of(technique)))
