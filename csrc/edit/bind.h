#pragma once

#include <nanobind/nanobind.h>

// Adds what the passes need to build a new step to the Python module.
void bind_edit(nanobind::module_& m);
