#pragma once

#include <nanobind/nanobind.h>

// Adds TSPLIT's greedy planner to the Python module.
void bind_tsplit(nanobind::module_& m);
