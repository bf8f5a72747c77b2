"""Lets the tests of this folder import what all tests share (`zoo_paths`, `search_world`)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # two busy cores: no test asserts how long it takes
settings.load_profile("untimed")
