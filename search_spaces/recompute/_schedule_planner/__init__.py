"""Plan schedules of single ops for a model or its blocks (`checkmate`, `planned`, `dtr`)."""
