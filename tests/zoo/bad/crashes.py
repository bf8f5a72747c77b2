"""Crashes the process on import: reads address zero."""

import ctypes

print("loading kernels", flush=True)
ctypes.string_at(0)
