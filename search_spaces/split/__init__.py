"""Which ops run in parts, so that their temporaries are smaller: bytes for launches."""
