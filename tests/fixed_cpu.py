"""The CPU that tests plan for: constants instead of the rates of the current machine.

Measured rates differ by a factor of twenty between machines, and with the load of one. So `conftest.py` saves
these rates as if they had been measured, multiplied by MEMTUNE_TEST_SPEED. A test whose assertion needs the
ratio of this CPU's rates to those of links, drives or overheads takes `CPU`, or the fixture `fixed_cpu`,
which MEMTUNE_TEST_SPEED does not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from memtune.hardware import mechanism_costs
from memtune.hardware.cpu_probe import CpuRates
from memtune.hardware.spec import of_cpu

RATES: Final = CpuRates(
    title="CPU of the tests",
    cores=2,
    memory_bytes=16 * 2**30,
    fp32_flops_per_s=120e9,
    bf16_flops_per_s=80e9,
    memory_bytes_per_s=12e9,
    op_s=5e-6,
    measured_s=0.3,
    is_given=True,
)
CPU: Final = of_cpu(RATES)
NO_HOST_COSTS: Final[Mapping[str, float]] = dict.fromkeys(mechanism_costs.defaults(0.0), 0.0)
"""Fields of `Hardware`: on tiny models a planner that prices its hooks takes other plans than the finest."""


def rates(speed: str) -> CpuRates:
    """Return `RATES` times `speed`: one factor for all, or `10,0.1,1` for products, memory and dispatch of
    ops.
    """
    factors = [float(each) for each in speed.split(",")]
    products, memory, dispatch = factors * 3 if len(factors) == 1 else factors
    return replace(
        RATES,
        fp32_flops_per_s=RATES.fp32_flops_per_s * products,
        bf16_flops_per_s=RATES.bf16_flops_per_s * products,
        memory_bytes_per_s=RATES.memory_bytes_per_s * memory,
        op_s=RATES.op_s / dispatch,
    )
