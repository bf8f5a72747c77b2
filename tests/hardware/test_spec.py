"""The hardware table, this machine, and op classes."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path

import pytest

from memtune import hardware
from memtune.errors import EnvironmentFault, UsageError
from memtune.hardware import cpu_probe, known_devices
from memtune.hardware.roofline import op_class

CONSTANTS = {each.name for each in fields(hardware.Hardware)} - {
    "name",
    "device",
    "sources",
    "curves",
    "residuals",
    "rates_from",
}


@pytest.mark.parametrize("name", hardware.names())
def test_table_has_a_source_for_each_constant(name: str) -> None:
    found = hardware.find(name)
    assert set(found.sources) == CONSTANTS
    assert all(found.sources.values())
    assert all(isinstance(value := getattr(found, constant), bool) or value for constant in CONSTANTS)
    assert found.usable_bytes(1) == found.memory_bytes - found.context_bytes
    assert found.usable_bytes(2) == found.usable_bytes(1) - found.communicator_bytes
    assert (
        "http" in found.sources["memory_bytes_per_s"] or "white paper" in found.sources["memory_bytes_per_s"]
    )
    assert found.architecture.startswith(("sm", "gfx", "xe"))
    assert found.fp32_flops_per_s <= found.fp16_flops_per_s
    assert found.name == name


@pytest.mark.parametrize(
    ("name", "device", "platform"),
    [("h100-80g", "cuda", "cuda"), ("mi250x", "cuda", "rocm"), ("max1550", "xpu", "xpu")],
)
def test_card_has_the_device_type_and_runtime_of_its_vendor(name: str, device: str, platform: str) -> None:
    found = hardware.find(name)
    assert (found.device, found.platform.name) == (device, platform)


def test_table_has_documented_cards() -> None:
    promised = (
        "h200 h100-80g h100-96g h100-nvl h100-pcie h20 h800 gh200-96g gh200-144g b200 gb200 b300 a100-40g"
        " a100-80g a100-pcie l40s l4 a10 t4 v100 v100-16g rtx-3060 rtx-3090 rtx-4070-ti-super rtx-4090"
        " rtx-5090 rtx-a6000 rtx-pro-6000 mi250x mi300x mi325x mi355x max1550"
    )
    assert set(promised.split()) == set(hardware.names())


@pytest.mark.parametrize(
    ("written", "key"), [("H100 80GB", "h100-80g"), ("rtx_4090", "rtx-4090"), (" A100 ", "a100-80g")]
)
def test_find_normalizes_names(written: str, key: str) -> None:
    assert hardware.find(written).name == key


@pytest.mark.parametrize(("written", "fix"), [("h100-8og", "h100-80g"), ("h10", "use h100-80g or h100-pcie")])
def test_find_suggests_nearest_names(written: str, fix: str) -> None:
    with pytest.raises(UsageError, match=written) as caught:
        hardware.find(written)
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("title", "gib", "key"),
    [
        ("NVIDIA H100 80GB HBM3", 79, "h100-80g"),
        ("NVIDIA H100 PCIe", 79, "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", 39, "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", 79, "a100-80g"),
        ("NVIDIA GeForce RTX 4090", 24, "rtx-4090"),
        ("Tesla V100-SXM2-32GB", 32, "v100"),
        ("NVIDIA L4", 22, "l4"),
        ("NVIDIA H200", 140, "h200"),
        ("AMD Instinct MI250X", 64, "mi250x"),
        ("Intel(R) Data Center GPU Max 1550", 64, "max1550"),
        ("NVIDIA GeForce RTX 3090 with Max-Q Design", 24, "rtx-3090"),
        ("NVIDIA H100 NVL", 93, "h100-nvl"),
        ("NVIDIA GH200 480GB", 95, "gh200-96g"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 95, "rtx-pro-6000"),
        ("Quadro P400", 2, None),
    ],
)
def test_match_maps_driver_names(title: str, gib: int, key: str | None) -> None:
    assert known_devices.match(title, gib * 2**30) == key


def test_equal_hardware_has_equal_hash() -> None:
    assert len({hardware.find("h100"), hardware.find("h100-80g")}) == 1


def test_cpu_rates_are_measured_once_and_cached(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_probe.LoadMeter, "others", lambda self: 0.0)
    monkeypatch.setattr(cpu_probe, "_confirmed", lambda kept: True)  # however busy this machine is
    first = hardware.detect("cpu")
    assert first.device == "cpu"
    assert set(first.sources) == CONSTANTS
    assert 1e8 < first.fp32_flops_per_s < 1e14
    assert 1e8 < first.memory_bytes_per_s < 1e13
    assert 1e-8 < first.launch_s < 1e-3
    assert first.allocation_rounding_bytes == 1
    (kept,) = empty_cache.iterdir()
    cpu_probe.cpu.cache_clear()
    assert hardware.detect("cpu") == first  # bitwise equal, so it was read, not measured again
    kept.write_text('{"cores": "many"}')
    cpu_probe.cpu.cache_clear()
    assert hardware.detect("cpu").cores == first.cores  # an unreadable file is measured again


def test_detect_without_cuda_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memtune.device.accelerator.device_type", lambda: None)
    with pytest.raises(EnvironmentFault, match="no CUDA device"):
        hardware.detect("cuda")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten.addmm.default", "matmul"),
        ("aten.mm.default", "matmul"),
        ("aten._scaled_dot_product_flash_attention_for_cpu.default", "attention"),
        ("aten.convolution_backward.default", "convolution"),
        ("aten._fused_adamw_.default", "optimizer"),
        ("aten._log_softmax.default", "normalisation"),
        ("aten.embedding_dense_backward.default", "gather"),
        ("aten.gelu_backward.default", "transcendental"),
        ("aten.add.Tensor", "elementwise"),
    ],
)
def test_op_class_follows_from_the_name(name: str, kind: str) -> None:
    assert op_class(name) == kind


def test_plain_card_is_not_taken_for_its_ti_super() -> None:
    gib = 2**30
    assert known_devices.match("NVIDIA GeForce RTX 4070 Ti SUPER", 16 * gib) == "rtx-4070-ti-super"
    assert known_devices.match("NVIDIA GeForce RTX 4070", 12 * gib) is None


@pytest.mark.parametrize(("name", "watts"), [("h100-96g", 500), ("h100-nvl", 400)])
def test_products_of_power_capped_cards_lie_between_those_of_measured_cards(name: str, watts: float) -> None:
    def per_unit(card: str, dtype: str, units: int) -> float:
        found = hardware.find(card)
        return found.matmul_flops_per_s(dtype) * found.matmul_share(dtype) / units

    for dtype in ("bfloat16", "float32"):
        low, high = per_unit("h100-pcie", dtype, 114), per_unit("h100-80g", dtype, 132)
        slope = math.log(high / low) / math.log(700 / 132 * 114 / 350)
        expected = high * (watts / 700) ** slope
        assert per_unit(name, dtype, 132) == pytest.approx(expected, rel=5e-3)
