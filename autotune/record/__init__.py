"""Record one training step by running the user's code on fake tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.autotune.record.batch_equivalence import (
        batch_is_lossless,
        coupled_samples,
        parameter_bytes,
        takes_too_long,
    )
    from memtune.autotune.record.compiled import CompiledRecordings
    from memtune.autotune.record.mixed_precision import PrecisionRecordings, most_casts_of_a_parameter
    from memtune.autotune.record.recorder import (
        SEED,
        Session,
        Trace,
        error_line,
        fake_errors_unlogged,
        record,
        start_session,
        step_of,
    )
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "SEED",
    "CompiledRecordings",
    "PrecisionRecordings",
    "Session",
    "Trace",
    "batch_is_lossless",
    "coupled_samples",
    "error_line",
    "fake_errors_unlogged",
    "most_casts_of_a_parameter",
    "parameter_bytes",
    "record",
    "start_session",
    "step_of",
    "takes_too_long",
]
