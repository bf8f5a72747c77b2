#pragma once

#include <nanobind/nanobind.h>

// Adds the layout of buffers in memory to the Python module.
void bind_layout(nanobind::module_& m);
