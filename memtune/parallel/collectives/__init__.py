"""All-gathers and reduce-scatters of FSDP2 replaced by quantized, hierarchical or ring ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.parallel.collectives.collectives_pass import rewrite_collectives as rewrite_collectives
    from memtune.parallel.collectives.fsdp_comm_hooks import install_collectives as install_collectives
    from memtune.parallel.collectives.message_layout import (
        Bits as Bits,
        Communication as Communication,
        Form as Form,
        Gathering as Gathering,
    )
else:
    __getattr__ = open_door(__name__)
