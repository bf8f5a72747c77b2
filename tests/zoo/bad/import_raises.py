"""Raises on import, at line 5, inside a function."""


def read_config():
    return {}["learning_rate"]


lr = read_config()
