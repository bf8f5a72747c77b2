#pragma once

#include <nanobind/nanobind.h>

// Each adds one part of the simulator to the Python module.
void bind_simulator(nanobind::module_& m);
void bind_allocator(nanobind::module_& m);
