#pragma once

#include <nanobind/nanobind.h>

// Adds the simulator's functions to the Python module.
void bind_simulator(nanobind::module_& m);
