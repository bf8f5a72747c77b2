"""`TunedConfig`, the file that a search writes and `memtune.apply` reads; its YAML and its JSON Schema."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.config.json_schema import schema
    from memtune.config.tuned_config import (
        BUCKET_SLOTS,
        UNCHANGED,
        Bucket,
        MadeFor,
        Settings,
        TunedConfig,
        check_blocks,
        check_environment,
        check_machine,
        check_made_for,
        dump_yaml,
        environment,
        file_texts,
        fingerprint,
        load_config,
        save,
    )
    from memtune.config.yaml_io import flow, save_text
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "BUCKET_SLOTS",
    "UNCHANGED",
    "Bucket",
    "MadeFor",
    "Settings",
    "TunedConfig",
    "check_blocks",
    "check_environment",
    "check_machine",
    "check_made_for",
    "dump_yaml",
    "environment",
    "file_texts",
    "fingerprint",
    "flow",
    "load_config",
    "save",
    "save_text",
    "schema",
]
