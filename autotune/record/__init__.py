"""Record one training step by running the user's code on fake tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.autotune.record.batch_equivalence import (
        activation_bytes as activation_bytes,
        affordable_draws as affordable_draws,
        batch_is_lossless as batch_is_lossless,
        coupled_samples as coupled_samples,
        parameter_bytes as parameter_bytes,
        repeated_blocks as repeated_blocks,
    )
    from memtune.autotune.record.compiled import CompiledRecordings as CompiledRecordings
    from memtune.autotune.record.mixed_precision import (
        PrecisionRecordings as PrecisionRecordings,
        most_casts_of_a_parameter as most_casts_of_a_parameter,
    )
    from memtune.autotune.record.recorder import record as record, step_of as step_of
    from memtune.autotune.record.recording_session import (
        SEED as SEED,
        Session as Session,
        Trace as Trace,
        error_line as error_line,
        fake_errors_unlogged as fake_errors_unlogged,
        start_session as start_session,
    )
else:
    __getattr__ = open_door(__name__)
