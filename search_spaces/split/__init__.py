"""Run ops in parts, so that their temporaries are smaller: fewer bytes for more launches."""
