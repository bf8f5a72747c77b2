#pragma once

#include <nanobind/nanobind.h>

// Adds the functions with which passes build a new step.
void bind_edit(nanobind::module_& m);
