#pragma once

#include <nanobind/nanobind.h>

// Adds the allocators of this process, and the options of a replayed one, to the Python module.
void bind_vmm(nanobind::module_& m);
