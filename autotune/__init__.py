"""How to choose: record, predict, search, show."""
