"""`TunedConfig`, the file that a search writes and `memtune.apply` reads; its YAML and its JSON Schema."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.config.apply_checks import (
        check_blocks as check_blocks,
        check_environment as check_environment,
        check_machine as check_machine,
        check_made_for as check_made_for,
        fingerprint as fingerprint,
    )
    from memtune.config.json_schema import schema as schema
    from memtune.config.tuned_config import (
        BUCKET_SLOTS as BUCKET_SLOTS,
        UNCHANGED as UNCHANGED,
        Bucket as Bucket,
        MadeFor as MadeFor,
        Settings as Settings,
        TunedConfig as TunedConfig,
        dump_yaml as dump_yaml,
        file_texts as file_texts,
        load_config as load_config,
        save as save,
    )
    from memtune.config.yaml_io import flow as flow, save_private as save_private, save_text as save_text
else:
    __getattr__ = open_door(__name__)
